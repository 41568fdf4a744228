"""The judgement of a search in benchmarks.cuda_search; tests/gpu runs the searches."""

import json

import pytest

from benchmarks.cuda_search import is_good, summary, variant, written_rows


def row(quiet, size, training="ok"):
    found = {"size": size, "training": training}
    if size:
        found |= {"steps": 20, "cost": 15.0, "errors": 1}
    return {"network": "mlp", "GiB": 1.5, "true": quiet, "quiet": quiet, "found": {"ours": found}}


@pytest.mark.parametrize(
    ("quiet", "size", "training", "expected"),
    [
        (100, 93, "ok", True),
        (100, 92, "ok", False),
        (3, 2, "ok", True),
        (100, 100, "dies in step 2", False),
        # A search is right to find nothing where nothing is quiet.
        (0, 0, "NothingFitsError: Nothing fits", True),
        (1, 0, "NothingFitsError: Nothing fits", False),
        (100, 0, "NothingFitsError: Nothing fits", False),
    ],
)
def test_a_good_search_finds_nearly_the_largest_quiet_size(quiet, size, training, expected):
    assert is_good(row(quiet, size, training), "ours") is expected


def test_the_summary_counts_refusals_apart_from_trainings_that_die():
    rows = [
        row(100, 90),
        row(100, 100, "dies in step 2"),
        row(0, 0, "NothingFitsError: Nothing fits"),
    ]
    text = summary(rows, "ours")
    assert text.startswith("ours: 1 of 3 ")
    assert "; 1 trainings end with an error; lowest share of quiet 0.90;" in text


def test_each_variant_has_a_name(monkeypatch):
    for name in ("CUDA_STUB_CAPABILITY", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert variant("32-true", None) == ""
    assert variant("bf16-mixed", None) == "_bf16-mixed"
    monkeypatch.setenv("CUDA_STUB_CAPABILITY", "9.0")
    assert variant("32-true", None) == "_capability_9.0"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert variant("32-true", None) == "_capability_9.0_expandable_segments_True"


def test_rows_that_were_written_have_all_finders(tmp_path):
    path = tmp_path / "rows.json"
    assert written_rows(path, ["ours"]) == {}
    path.write_text(json.dumps([row(3, 2)]))
    assert written_rows(path, ["ours"]) == {("mlp", 1.5): row(3, 2)}
    assert written_rows(path, ["ours", "theirs"]) == {}
