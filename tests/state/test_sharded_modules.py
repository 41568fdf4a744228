"""torch's table of sharded modules, without a process group, which sharding itself would need."""

import pytest
from torch import nn
from torch.distributed._composable_state import _get_module_state, _insert_module_state, _State

from lightning_batchmem.state.snapshot import Snapshot


def test_a_module_that_was_not_sharded_can_be_sharded_again():
    module = nn.Sequential(nn.Linear(1, 1))
    kept = Snapshot([module])
    for again in range(2):
        state = _State()
        _insert_module_state(module[0], state)
        with pytest.raises(AssertionError, match="more than once"):
            _insert_module_state(module[0], state)
        assert kept.restore() == [], again
        assert _get_module_state(module[0]) is None


def test_a_module_that_was_sharded_has_its_state_again():
    module = nn.Sequential(nn.Linear(1, 1))
    state = _State()
    other = _State()
    _insert_module_state(module, state)
    kept = Snapshot([module])
    # As fully_shard would leave it after a class and a dictionary of another state.
    _insert_module_state(module[0], other)
    assert kept.restore() == []
    assert (_get_module_state(module), _get_module_state(module[0])) == (state, None)


def test_modules_of_others_stay_as_they_are():
    teacher = nn.Linear(1, 1)
    kept = Snapshot([nn.Linear(1, 1)])
    state = _State()
    _insert_module_state(teacher, state)
    assert kept.restore() == []
    assert _get_module_state(teacher) is state
