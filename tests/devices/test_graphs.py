import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_batchmem.devices.graphs import replays_graphs


@pytest.mark.parametrize(
    ("device", "manager"), [("cuda:1", object()), ("cuda:1", None), ("cpu", 7)]
)
def test_graphs_are_those_of_the_device(monkeypatch, device, manager):
    asked = []

    def get_manager(index, create_if_none_exists):
        asked.append((index, create_if_none_exists))
        return manager

    trees = SimpleNamespace(get_manager=get_manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    is_cuda = device != "cpu"
    assert replays_graphs(torch.device(device)) is (is_cuda and manager is not None)
    assert asked == [(1, False)] * is_cuda


def test_without_torch_compile_there_are_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert not replays_graphs(torch.device("cuda:0"))
