import os
from pathlib import Path

import pytest

from lightning_batchmem.profile.columns import COLUMNS, LoggerMetrics, StepCsv, read_rows
from lightning_batchmem.profile.run_folder import RunFolder
from lightning_batchmem.profile.step import UNREAD, DeviceReading, Step
from tests.helpers.profiled import MIB, rows
from tests.helpers.steps import interval, step

PAGE = Path(__file__).parents[2] / "docs" / "reading-the-profile.md"
# The names are in tests/test_names.py too, without their order.
HEADER = (
    "step,stage,batch_size,peak_allocated_mib,peak_reserved_mib,peak_process_mib,limit_mib,"
    "samples_per_s,items_per_s,step_ms,data_wait_pct,gpu_utilization_pct,cpu_utilization_pct,"
    "peak_before_mib"
)
STEP = Step(7, "train", 8, 0.5, 0.125, 3 * MIB, 4 * MIB)


def written(directory, *steps, reading=UNREAD, **options):
    directory.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(directory)
    file = StepCsv(folder.csv, **options)
    file.take(interval(*steps, reading=reading))
    file.close()
    return folder.path


# --- the table


def test_each_name_is_that_of_one_column():
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)


def test_the_documentation_has_the_table():
    rows = []
    for column in COLUMNS:
        if column.meaning:
            rows.append(([], [], column.meaning))
        in_csv, in_loggers, _ = rows[-1]
        in_csv += [f"`{column.name}`"] * column.in_csv
        in_loggers += [f"`{column.metric}`"] * ("/" in column.metric)
    cells = [[", ".join(names), ", ".join(metrics), meaning] for names, metrics, meaning in rows]
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in cells]
    heading = "| column of the CSV | metric in the loggers | meaning |\n|---|---|---|\n"
    assert heading + "\n".join(lines) + "\n\n" in PAGE.read_text()


# --- the file


def test_units_and_columns(tmp_path):
    last = STEP._replace(items=100, before_bytes=5 * MIB)
    reading = DeviceReading(16 * MIB, 81.5)
    path = written(tmp_path, STEP, last, reading=reading, world_size=2)
    assert path.read_text().splitlines()[0] == HEADER
    first, row = rows(path)
    # The device is read at the end of the last step.
    assert (first["limit_mib"], first["gpu_utilization_pct"]) == ("", "")
    present = {name: value for name, value in row.items() if value}
    values = [float(value) if name != "stage" else value for name, value in present.items()]
    assert values == [7, "train", 8, 3, 4, 16, 32, 400, 500, 25, 81.5, 5]
    assert (row["cpu_utilization_pct"], row["peak_process_mib"]) == ("", "")


def test_unknown_values_are_empty_and_never_0(tmp_path):
    row = rows(written(tmp_path, Step(0, "train", None, 0.5, None, 0)))[0]
    present = {name: value for name, value in row.items() if value}
    assert present == {
        "step": "0",
        "stage": "train",
        "peak_process_mib": "0.000",
        "step_ms": "500.000",
    }
    without_peaks = Step(0, "train", 1, 0.0, 0.0, None)
    row = rows(written(tmp_path / "2", without_peaks))[0]
    assert row["peak_process_mib"] == ""


def test_rows_are_read_back(tmp_path):
    (row,) = read_rows(written(tmp_path, STEP, reading=DeviceReading(16 * MIB)))
    memory = {"peak_allocated_mib": 3, "peak_reserved_mib": 4, "limit_mib": 16}
    memory |= {"peak_process_mib": None, "peak_before_mib": None}
    assert row == {"step": 7, "stage": "train", **memory}
    (tmp_path / "other.csv").write_text("step,other\n1,2\n")
    message = r"must be that of a memory_per_batch\.csv, got .*'step,other'"
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "other.csv")


def test_rows_are_in_the_file_before_its_end(tmp_path):
    folder = RunFolder(tmp_path)
    file = StepCsv(folder.csv)
    file.take(interval(STEP, STEP))
    file.take(interval(STEP))
    assert len(rows(folder.path)) == 3
    file.close()
    file.close()


def test_a_full_disk_is_one_warning_and_ends_the_file(tmp_path):
    folder = RunFolder(tmp_path)
    file = StepCsv(folder.csv)
    file.take(interval(STEP))
    with open("/dev/full", "w") as full:
        for descriptor in Path("/proc/self/fd").iterdir():
            if descriptor.exists() and descriptor.samefile(folder.path):
                os.dup2(full.fileno(), int(descriptor.name))
    with pytest.warns(UserWarning, match=r"memory_per_batch\.csv gets no more rows.*No space left"):
        file.take(interval(STEP))
    # Without another warning, which would be an error.
    file.take(interval(STEP))
    file.close()
    assert len(rows(folder.path)) == 1


def test_on_a_device_each_row_has_the_mean_time(tmp_path):
    steps = (STEP._replace(seconds=0.1), STEP._replace(seconds=0.3))
    found = rows(written(tmp_path, *steps, has_exact_times=False))
    assert [row["step_ms"] for row in found] == ["200.000", "200.000"]


# --- the metrics


def metrics_of(*steps, world_size=1, limit_bytes=None):
    loggers = LoggerMetrics([], world_size)
    return loggers.metrics(interval(*steps, reading=DeviceReading(limit_bytes)))


def test_metrics_are_maxima_of_bytes_and_means_of_times():
    first = step(0, 5, reserved=8 * MIB)
    second = step(1, 9, seconds=4.0, reserved=7 * MIB, items=100)
    steps = (first, second, step(2, 3, size=1, reserved=6 * MIB))
    found = metrics_of(*steps, limit_bytes=64 * MIB, world_size=2)
    assert found == {
        "memory/peak_allocated_mib": 9.0,
        "memory/peak_reserved_mib": 8.0,
        "memory/used_pct": 12.5,
        "memory/limit_mib": 64.0,
        "speed/samples_per_s": 2 * 9 / 8.0,
        "speed/items_per_s": 2 * 100 / 4.0,
        "speed/step_ms": pytest.approx(8000 / 3),
        "speed/data_wait_pct": pytest.approx(100 * 1.5 / 8),
        "speed/batch_size": 4.0,
    }


def test_without_an_allocator_the_peak_is_that_of_the_process():
    metrics = metrics_of(step(0, 5), step(1, 9))
    assert metrics["memory/peak_process_mib"] == 9.0
    assert {"memory/peak_allocated_mib", "memory/used_pct"} & set(metrics) == set()


def test_the_used_share_is_of_the_limit_that_was_read_last():
    loggers = LoggerMetrics([], 1)
    limits = [64, None, 32]
    readings = [DeviceReading(None if limit is None else limit * MIB) for limit in limits]
    found = [loggers.metrics(interval(step(0, 8), reading=reading)) for reading in readings]
    assert [metrics["memory/used_pct"] for metrics in found] == [12.5, 12.5, 25.0]


def test_the_size_of_a_batch_is_logged_where_it_changes():
    loggers = LoggerMetrics([], 1)
    steps = [step(0, 8), step(1, 8), step(2, 8, size=6), step(3, 8, size=6)]
    steps.insert(1, step(0, 8, size=2)._replace(stage="validate"))
    found = [loggers.metrics(interval(one)) for one in steps]
    sizes = [metrics.get("speed/batch_size") for metrics in found]
    assert sizes == [4.0, None, None, 6.0, None]
    assert found[1]["speed/batch_size_validate"] == 2.0


def test_an_evaluation_has_the_names_of_a_training_and_its_stage():
    reading = DeviceReading(64 * MIB, 50.0, None, 1, 1)
    one = step(0, 5, reserved=8 * MIB, items=100)
    training, test = (
        LoggerMetrics([], 1).metrics(interval(one._replace(stage=stage), reading=reading))
        for stage in ("train", "test")
    )
    # What is counted in the whole run is logged once.
    of_run = {"memory/limit_mib", "memory/num_alloc_retries", "memory/num_ooms"}
    assert set(test) == {f"{name}_test" for name in set(training) - of_run}
    assert {name.partition("/")[0] for name in (*training, *test)} == {"memory", "speed"}


def test_a_step_that_a_measurement_slowed_down_has_no_throughput():
    slowed = step(1, 3, seconds=20.0, items=50)._replace(is_slowed=True)
    metrics = metrics_of(step(0, 5, items=100), slowed)
    assert metrics["speed/samples_per_s"] == 2.0
    assert metrics["speed/items_per_s"] == 50.0
    assert metrics["speed/step_ms"] == 2000.0
    assert set(metrics_of(slowed)) == {"memory/peak_process_mib", "speed/batch_size"}


def test_the_first_step_is_no_part_of_a_mean_and_has_no_speed_alone():
    first = step(0, 3, seconds=20.0)._replace(is_first=True)
    assert metrics_of(first, step(1, 3))["speed/samples_per_s"] == 2.0
    assert metrics_of(first) == {"memory/peak_process_mib": 3.0, "speed/batch_size": 4.0}


def test_unknown_sizes_items_and_waits_are_left_out_of_the_means():
    unknown = step(1, 3, size=None, seconds=6.0, wait=None)
    metrics = metrics_of(step(0, 5, items=100), unknown)
    names = ("samples_per_s", "items_per_s", "data_wait_pct", "step_ms")
    assert [metrics[f"speed/{name}"] for name in names] == [2.0, 50.0, 25.0, 4000.0]
    assert metrics["speed/batch_size"] == 4.0
    assert "speed/batch_size" not in metrics_of(step(1, 3, size=None))
