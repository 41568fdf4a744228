from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_search import largest_trained


def test_without_a_cuda_device_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert capsys.readouterr() == ("", "gpu_check needs a CUDA device, and torch finds none.\n")


def test_the_failure_of_a_part_is_a_row_after_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> gpu_check.Rows:
        yield {"size": 8}
        raise RuntimeError("no device\nmore")

    sent: list[object] = []
    monkeypatch.setitem(gpu_check.PARTS, "sync", (failing, 1.0))
    monkeypatch.setattr(gpu_check, "emit", lambda **values: sent.append(values))
    gpu_check.run_part("sync")
    assert sent[-1] == {"rows": [{"size": 8}, {"error": "RuntimeError: no device"}]}


@pytest.mark.parametrize("largest", [0, 1, 7, 90, 130, 1000])
def test_the_largest_size_that_trains_is_found_from_any_start(largest: int) -> None:
    for start in (1, 100):
        found = largest_trained(lambda size: size <= largest, start)
        assert 0.97 * largest <= found <= largest
