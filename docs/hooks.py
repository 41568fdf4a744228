"""Hooks of the MkDocs build: files from outside ``docs``, and Sphinx roles in docstrings."""

import re
import shutil
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

REPOSITORY = Path(__file__).parents[1]
LINK_TO_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the changelog, and the files that pages in ``docs`` link to as ``../...``."""
    files.append(
        File.generated(config, "changelog.md", abs_src_path=str(REPOSITORY / "CHANGELOG.md"))
    )
    pages = [file.content_string for file in files.documentation_pages()]
    for path in sorted({path for page in pages for path in LINK_TO_OUTSIDE.findall(page)}):
        file = File.generated(
            config,
            f"../{path}",
            abs_src_path=str(REPOSITORY / path),
            inclusion=InclusionLevel.INCLUDED,
        )
        # The page has no dots in its address, because they would lead out of the site.
        file.dest_uri = path
        files.append(file)
    return files


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write ``llms.txt``: a list of the pages, each with its first sentences, for language models.

    Source of the format: https://llmstxt.org
    """
    docs = Path(config.docs_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for entry in config.nav or []:
        (path,) = entry.values()
        source = docs / path
        # The changelog is not in the folder.
        if source.is_file():
            text = source.read_text(encoding="utf-8")
            shutil.copyfile(source, Path(config.site_dir) / path)
            lines.append(f"- [{_title(text)}]({path}): {_first_paragraph(text)}")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _title(text: str) -> str:
    title = TITLE.search(text)
    return title[1] if title else ""


def _first_paragraph(text: str) -> str:
    """The first text below the title, on one line and without links."""
    paragraph = TITLE.split(text, maxsplit=1)[-1].strip().split("\n\n")[0]
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))


class Roles(griffe.Extension):
    """Show ``:class:`~package.Name``` as ``Name``."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
