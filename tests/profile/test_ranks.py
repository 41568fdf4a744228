import json

from lightning_batchmem.profile.ranks import HostGroup, RankTotals, rank_metrics
from tests.helpers.profiled import rows
from tests.helpers.profiled_ranks import profile, profile_after_bar
from tests.helpers.rank_processes import run_ranks

MIB = 2**20


def test_one_rank():
    totals = RankTotals(2**40 + 1, 4.0)
    assert HostGroup().exchange(totals) == [totals]


def test_a_value_that_is_unknown_on_one_rank_is_left_out():
    ranks = [RankTotals(MIB, 4.0), RankTotals(3 * MIB, None)]
    assert rank_metrics(ranks) == {
        "ranks/highest_peak_mib": 3.0,
        "ranks/lowest_peak_mib": 1.0,
        "ranks/highest_rank": 1.0,
    }
    assert rank_metrics([RankTotals(None, 4.0), RankTotals(MIB, 5.0)]) == {
        "ranks/samples_per_s": 9.0
    }


def test_two_processes_are_joined_at_the_end_of_each_epoch(tmp_path):
    codes, outputs = run_ranks(profile, tmp_path)
    assert codes == [0, 0], outputs
    ddp, fsdp2 = json.loads((tmp_path / "0.json").read_text())
    zero, one = ddp["peaks"]
    assert zero == ddp["own"]
    assert one - zero > 40 * MIB
    assert [output.count("Peaks of 2 ranks") for output in outputs] == [2, 0]
    (path,) = (tmp_path / "ddp").rglob("metrics.csv")
    joined = [row for row in rows(path) if row["ranks/highest_rank"]]
    assert [row["step"] for row in joined] == ["2", "5"]
    for row in joined:
        assert row["ranks/highest_rank"] == "1.0"
        lowest_mib = float(row["ranks/lowest_peak_mib"])
        assert float(row["ranks/highest_peak_mib"]) > lowest_mib + 40
        assert float(row["ranks/samples_per_s"]) > 0
    assert len(list((tmp_path / "ddp").rglob("memory_per_batch*.csv"))) == 1
    # Each rank has half of the model.
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert fsdp2["breakdown"][name] == (64 * 32 + 32 * 2) * 4 // 2, name


def test_ranks_exchange_after_lightning_has_reduced_the_metrics_of_an_epoch(tmp_path):
    codes, outputs = run_ranks(profile_after_bar, tmp_path)
    assert codes == [0, 0], outputs
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    # An epoch has three steps.
    steps = {
        "whole": [2, 5, 8],
        "max_steps": [2, 3],
        "should_stop": [0],
        "unlogged": [],
        "error": [2],
    }
    assert {name: found["steps"] for name, found in zero.items()} == steps
    for name in steps:
        # After an error, ranks exchange nothing.
        ranks = 0 if name == "error" else 2
        assert (zero[name]["ranks"], one[name]["ranks"]) == (ranks, ranks), name
