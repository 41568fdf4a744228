"""Ranks that are taken to be equal, and the weights that one of them has gathered."""

import torch
from torch import nn

from lightning_batchmem.simulated_gpu.ranks import EqualRanks, GatheredWeights


def test_equal_ranks_exchange_what_this_one_has():
    ranks = EqualRanks(4, ends_together=False)
    assert ranks.exchange("a size") == ["a size"] * 4
    assert ranks.on_this_host() == 1


class Sharded(nn.Module):
    """Two weights, of which a backward pass shards some in two parts."""

    def __init__(self, *frees):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(100))
        self.second = nn.Parameter(torch.zeros(20))
        self.frees = frees

    def shard(self, *_):
        for name in self.frees:
            weight = getattr(self, name)
            weight.data = weight.data[: weight.numel() // 2].clone()


def gathered_in(module, monkeypatch):
    monkeypatch.setattr(torch.autograd, "backward", module.shard)
    watched = GatheredWeights(lambda: module, ranks=2)
    watched.backward()
    return watched


def test_weights_that_backward_frees_were_gathered(monkeypatch):
    watched = gathered_in(Sharded("first", "second"), monkeypatch)
    assert watched.most_bytes == 4 * 120
    (note,) = watched.notes
    assert note.startswith("Gathered weights of ")
    assert "and then the whole module" in note


def test_a_small_part_that_stays_gathered_has_no_note(monkeypatch):
    watched = gathered_in(Sharded("second"), monkeypatch)
    assert watched.most_bytes == 4 * 20
    assert watched.notes == []


def test_whole_weights_are_not_gathered(monkeypatch):
    watched = gathered_in(Sharded(), monkeypatch)
    assert (watched.most_bytes, watched.notes) == (0, [])
