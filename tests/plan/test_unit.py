"""How sizes are written, as samples and as budgets."""

from lightning_batchmem.plan.unit import Unit


def test_sizes_in_samples():
    unit = Unit()
    assert (unit.name, unit.items, unit.one) == ("batch size", "samples", "a sample")
    assert unit.size(4096) == "4,096 samples"
    assert unit.size(1) == "1 sample"


def test_sizes_of_a_budget():
    unit = Unit("max_tokens")
    assert (unit.name, unit.items, unit.one) == ("max_tokens", "items", "for each of max_tokens")
    assert unit.size(4096) == "max_tokens 4,096"
