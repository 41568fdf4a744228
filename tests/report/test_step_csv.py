from __future__ import annotations

import csv

import pytest

from lightning_batchmem.measure.phases import StepPeaks
from lightning_batchmem.measure.step_record import StepRecord
from lightning_batchmem.report.step_csv import BatchCsv, columns

MIB = 2**20
HEADER = (
    "step,stage,batch_size,peak_allocated_mib,peak_reserved_mib,limit_mib,samples_per_s,items_per_s,step_ms,data_wait_pct,"
    "gpu_pct,cpu_pct,forward_peak_mib,backward_peak_mib,optimizer_step_peak_mib,evaluation_peak_mib"
)
PEAKS = StepPeaks({"forward": 3 * MIB, "backward": 2 * MIB + MIB // 2, "optimizer_step": MIB}, 4 * MIB)
STEP = StepRecord(7, 8, PEAKS, 0.5, 0.125)


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def written(directory, *steps, **options):
    file = BatchCsv(directory, **options)
    for step in steps:
        file.write(step)
    file.close()
    return file.path


def test_units_and_columns(tmp_path):
    file = BatchCsv(tmp_path / "made" / "on the way")
    step = STEP._replace(items=100, limit_bytes=16 * MIB, utilization=("gpu_pct", 81.5))
    file.write(step, world_size=2)
    file.close()
    assert file.path.read_text().splitlines()[0] == HEADER == ",".join(columns())
    assert [float(value) if name != "stage" else value for name, value in rows(file.path)[0].items() if value] == [
        7, "train", 8, 3, 4, 16, 32, 400, 500, 25, 81.5, 3, 2.5, 1,
    ]  # fmt: skip
    assert rows(file.path)[0]["cpu_pct"] == ""


def test_the_devices_own_time_is_the_steps_and_the_wait_is_a_share_of_the_walls(tmp_path):
    row = rows(written(tmp_path, STEP._replace(device_seconds=0.25)))[0]
    assert (row["step_ms"], row["samples_per_s"], row["data_wait_pct"]) == ("250.0", "32.0", "25.0")


def test_a_step_of_an_evaluation(tmp_path):
    row = rows(written(tmp_path, StepRecord(0, 4, StepPeaks({"evaluation": 3 * MIB}), 0.5, 0.1, "validate")))[0]
    assert (row["stage"], row["peak_allocated_mib"], row["evaluation_peak_mib"]) == ("validate", "3.0", "3.0")
    assert row["forward_peak_mib"] == ""


def test_what_is_not_known_is_empty_and_never_0(tmp_path):
    row = rows(written(tmp_path, StepRecord(0, None, StepPeaks({"forward": 0}), 0.5, None)))[0]
    present = {name: value for name, value in row.items() if value}
    assert present == {
        "step": "0", "stage": "train", "peak_allocated_mib": "0.0", "step_ms": "500.0", "forward_peak_mib": "0.0",
    }  # fmt: skip
    assert rows(written(tmp_path / "2", StepRecord(0, 1, StepPeaks({}), 0.0, 0.0)))[0]["peak_allocated_mib"] == ""


def test_without_a_peak_counter_no_column_is_called_peak():
    assert not [name for name in columns(has_peak=False) if "peak" in name]
    assert len(set(columns(has_peak=False))) == len(columns())


def test_a_run_that_goes_on_appends_below_one_header(tmp_path):
    first = written(tmp_path, STEP)
    again = written(tmp_path, STEP, resume=True)
    assert again == first
    assert first.read_text().count("step,stage") == 1
    assert len(rows(first)) == 2


def test_a_new_run_leaves_the_old_file_alone(tmp_path):
    old = written(tmp_path, STEP).read_bytes()
    assert [written(tmp_path, STEP).name for _ in range(2)] == ["memory_per_batch_1.csv", "memory_per_batch_2.csv"]
    assert (tmp_path / "memory_per_batch.csv").read_bytes() == old
    assert written(tmp_path, STEP, resume=True).name == "memory_per_batch_2.csv"
    assert len(rows(tmp_path / "memory_per_batch_2.csv")) == 2


def test_another_header_is_never_mixed_in(tmp_path):
    (tmp_path / "memory_per_batch.csv").write_text("step,other\n1,2\n")
    assert written(tmp_path, STEP, resume=True).name == "memory_per_batch_1.csv"
    assert (tmp_path / "memory_per_batch.csv").read_text() == "step,other\n1,2\n"


def test_a_row_that_was_cut_short_does_not_swallow_the_next(tmp_path):
    path = written(tmp_path, STEP)
    path.write_bytes(path.read_bytes()[:-20])
    written(tmp_path, STEP, resume=True)
    assert [row["step"] for row in rows(path)] == ["7", "7"]
    assert rows(path)[1]["samples_per_s"] == "16.0"


def test_flushed_rows_are_in_the_file(tmp_path):
    file = BatchCsv(tmp_path)
    file.write(STEP)
    assert rows(file.path) == []
    file.flush()
    assert len(rows(file.path)) == 1
    file.close()
    file.close()


def test_a_place_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        BatchCsv(tmp_path / "file")
