"""Whether the memory of a step can be divided among its modules."""

from torch import nn

from lightning_batchmem.devices.module_memory import why_not_possible
from lightning_batchmem.devices.peaks import LiveStorages


def test_it_is_not_possible_in_every_program():
    module = nn.Linear(2, 2)
    assert why_not_possible(module, is_compiled=False) == ""
    assert "torch.compile" in why_not_possible(module, is_compiled=True)
    with LiveStorages():
        assert "another dispatch mode" in why_not_possible(module, is_compiled=False)
