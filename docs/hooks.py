"""Hooks of the MkDocs build: files from outside ``docs``, and Sphinx roles in docstrings."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

REPOSITORY = Path(__file__).parents[1]
LINK_TO_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
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


class Roles(griffe.Extension):
    """Show ``:class:`~package.Name``` as ``Name``."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
