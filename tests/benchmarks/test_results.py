from __future__ import annotations

from pathlib import Path

from benchmarks.results import forget, load, merge, save


def test_what_is_saved_is_loaded_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "device" / "2026-01-02.json"
    assert load(path) == {"runs": [], "search": {}}
    save(path, {"runs": [1], "search": {}})
    save(path, {"runs": [1, 2], "search": {}})
    assert load(path) == {"runs": [1, 2], "search": {}}
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_merging_keeps_what_only_the_old_one_says() -> None:
    old = {"a": {"x": 1, "y": [1]}, "b": 2}
    assert merge(old, {"a": {"y": [2], "z": 3}, "c": 4}) == {"a": {"x": 1, "y": [2], "z": 3}, "b": 2, "c": 4}
    assert old == {"a": {"x": 1, "y": [1]}, "b": 2}


def test_forgets_the_searches_that_are_named_only() -> None:
    def known() -> dict[str, object]:
        return {"ways": {"ours": [1], "power": [2]}, "trainings": {"8": [None]}, "oracle": {"batch_size": 8}}

    results = {"search": {"rlimit": {"small": known(), "large": known()}, "cgroup": {"small": known()}}}
    forget(results, ["small"], ["ours"], ["rlimit"])
    assert results["search"]["rlimit"]["small"] == {**known(), "ways": {"power": [2]}}
    assert results["search"]["rlimit"]["large"] == known()
    assert results["search"]["cgroup"]["small"] == known()
