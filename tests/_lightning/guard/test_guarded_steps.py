"""The sizes that a training has seen; tests/test_oom_guard.py has the steps."""

from __future__ import annotations

import torch

from lightning_batchmem import OomGuard
from lightning_batchmem._lightning.guard.guarded_steps import GuardedSteps
from tests.helpers.guarded import Failing, trained


def test_parts_are_known_by_bytes_and_each_size_is_kept_once() -> None:
    trainer, _, _ = trained(Failing, None, max_steps=1)
    seen: list[tuple[int, int]] = []
    steps = GuardedSteps(trainer, OomGuard(), "mean", 8, lambda _, *what: seen.append(what))
    wide, long = torch.zeros(4, 30), torch.zeros(12, 20)
    assert steps.known_parts(long) == 1
    for _ in range(3):
        steps.note_parts(wide, 2)
        steps.note_parts(long, 4)
    assert seen == [(4, 2), (12, 4)] * 3
    assert steps._known == [(480, 2), (960, 4)]
    sizes = (119, 120, 239, 240, 999)
    assert [steps.known_parts(torch.zeros(size, 1)) for size in sizes] == [1, 2, 2, 4, 4]
    assert [steps.most_parts(samples) for samples in (1, 7, 8, 99)] == [1, 7, 8, 8]
    steps.has_batch_norm = True
    assert [steps.most_parts(samples) for samples in (1, 7, 8, 99)] == [1, 3, 4, 8]
