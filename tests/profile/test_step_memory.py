import json

from lightning_batchmem.profile.step_memory import peaks_of_ranks
from tests.helpers.profiled_ranks import profile, profile_after_bar
from tests.helpers.rank_processes import run_ranks

MIB = 2**20


def test_one_process_has_no_ranks():
    assert peaks_of_ranks(2**40 + 1) == ()


def test_two_processes_are_joined_at_the_end(tmp_path):
    codes, outputs = run_ranks(profile, tmp_path)
    assert codes == [0, 0], outputs
    ddp, fsdp2 = json.loads((tmp_path / "0.json").read_text())
    zero, one = ddp["peaks"]
    assert zero == ddp["own"]
    assert one - zero > 40 * MIB
    assert [output.count("Peaks of 2 ranks") for output in outputs] == [2, 0]
    assert len(list((tmp_path / "ddp").rglob("memory_per_batch*.csv"))) == 1
    # Each rank has half of the model.
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert fsdp2["breakdown"][name] == (64 * 32 + 32 * 2) * 4 // 2, name


def test_ranks_exchange_once_a_training_has_ended(tmp_path):
    codes, outputs = run_ranks(profile_after_bar, tmp_path)
    assert codes == [0, 0], outputs
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert zero.keys() == one.keys()
    for name in zero:
        # After an error, ranks exchange nothing.
        ranks = 0 if name == "error" else 2
        assert (zero[name], one[name]) == (ranks, ranks), name
