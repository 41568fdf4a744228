from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, Line, MemoryModel, Trial
from lightning_batchmem.report.alerts import Alerts

GIB = 1024 * MIB
RESOLUTION = 2 * MIB

settings.register_profile("alarms", deadline=None, max_examples=50)
FEW = settings.get_profile("alarms")


def alerts(**arguments: Any) -> Alerts:
    return Alerts(**{"resolution_bytes": RESOLUTION, **arguments})


# The leak


def watch(told: Alerts, steps: int, use: Callable[[int], float], limit_bytes: int = 80 * GIB) -> list[str]:
    """What is said of a run whose floor at each step is ``use(step)``."""
    floors = ((n, int(use(n))) for n in range(steps) if n >= told.next_floor)
    issued = [told.floor(n, floor_bytes, limit_bytes=limit_bytes) for n, floor_bytes in floors]
    return [sentence for sentence in issued if sentence is not None]


def bursts(n: int) -> float:
    return 400 * MIB * (random.Random(n).random() < 0.2)


QUIET: dict[str, Callable[[int], float]] = {
    "constant": lambda n: GIB,
    "falling": lambda n: 10 * GIB - n * MIB,
    "one jump": lambda n: GIB + (n > 40) * GIB,
    "a jump in every epoch, given back": lambda n: GIB + (n % 100 > 50) * GIB,
    "two jumps": lambda n: GIB + (n > 20) * GIB + (n > 1000) * GIB,
    "noise": lambda n: GIB + random.Random(n).uniform(0, GIB),
    "bursts": lambda n: GIB + bursts(n),
    "fills up": lambda n: GIB + GIB * (1 - math.exp(-n / 15)),
    "fills up slowly": lambda n: GIB + 60 * MIB * (1 - math.exp(-n / 1000)),
    "slows down as a root": lambda n: GIB + 100 * MIB * math.sqrt(n),
    "slows down as a logarithm": lambda n: GIB + GIB * math.log1p(n),
    "warm-up": lambda n: GIB + 50 * MIB * min(n, 12),
    "short epochs": lambda n: GIB + 50 * MIB * (n % 40),
    "accumulation": lambda n: GIB + (n % 8 != 0) * GIB,
    # sampled at every 128th step this would rise, from its end to its begin
    "epochs that fall, nearly a power of two long": lambda n: 2 * GIB - 5 * MIB * (n % 129),
}


@pytest.mark.parametrize("use", QUIET.values(), ids=QUIET)
def test_no_leak_where_the_floor_does_not_rise_steadily(use: Callable[[int], float]) -> None:
    assert watch(alerts(), 20_000, use) == []


LOUD: dict[str, Callable[[int], float]] = {
    "from the start": lambda n: GIB + n * MIB,
    "after a warm-up": lambda n: GIB + min(n, 12) * GIB + n * MIB,
    "from a later step": lambda n: GIB + max(0, n - 3000) * MIB,
    "under noise": lambda n: GIB + n * MIB + random.Random(n).uniform(0, 100 * MIB),
    "under bursts": lambda n: GIB + n * MIB + bursts(n),
    "under epochs": lambda n: GIB + n * MIB + 3 * MIB * (n % 40),
    "in steps": lambda n: GIB + n // 100 * 100 * MIB,
    "ever faster": lambda n: GIB + n * n * MIB / 100,
    "in a long epoch": lambda n: GIB + n % 15_000 * MIB,
}


@pytest.mark.parametrize("use", LOUD.values(), ids=LOUD)
def test_leak_that_rises_steadily_is_said_once(use: Callable[[int], float]) -> None:
    told = alerts()
    issued = watch(told, 13_000, use)
    assert issued == [told.issued["leak"]]
    assert "loss.item()" in issued[0]
    assert told.next_floor == math.inf
    assert [told.floor(n, n * MIB, limit_bytes=80 * GIB) for n in range(20_000, 20_200)] == [None] * 200


def test_leak_names_its_pace_and_the_step_at_which_the_limit_is_reached() -> None:
    told = alerts()
    told.step(number=0, batch_size=None, peak_bytes=1500 * MIB)
    (issued,) = watch(told, 100, lambda n: GIB + n * MIB, limit_bytes=2000 * MIB)
    # seen at step 47, from the first of the 32 that are judged to the first of the last four
    assert "by 1.0 MiB a step (1,040.0 MiB at step 16, 1,068.0 MiB at step 44)" in issued
    assert "limit of 2,000.0 MiB is reached at about step 547," in issued  # by the peak of 1,500 MiB


def test_leak_beyond_the_limit_is_reached_now() -> None:
    (issued,) = watch(alerts(), 100, lambda n: GIB + n * MIB, limit_bytes=GIB)
    assert "at about step 47," in issued


def test_leak_in_small_steps_is_told_in_a_unit_that_shows_it() -> None:
    (issued,) = watch(alerts(resolution_bytes=0), 100_000, lambda n: 100 * MIB + n * MIB / 1024)
    assert "by 0.977 MiB in 1,000 steps" in issued


@pytest.mark.parametrize(("rise", "raised"), [(2.005, True), (1.995, False)])
def test_leak_has_to_be_two_percent_of_the_floor(rise: float, raised: bool) -> None:
    # 28 steps lie between the lowest of the first and of the last group that are judged at step 47
    assert bool(watch(alerts(), 48, lambda n: 10 * GIB * (1 + rise / 100 * (n - 16) / 28))) is raised


@pytest.mark.parametrize(("rise_bytes", "raised"), [(16 * MIB + 28, True), (16 * MIB - 28, False)])
def test_leak_has_to_be_16_mib(rise_bytes: int, raised: bool) -> None:
    assert bool(watch(alerts(resolution_bytes=0), 48, lambda n: 100 * MIB + n * rise_bytes / 28)) is raised


@pytest.mark.parametrize(("pace", "raised"), [(RESOLUTION // 4 + 1, True), (RESOLUTION // 4, False)])
def test_leak_has_to_rise_above_the_resolution_from_group_to_group(pace: int, raised: bool) -> None:
    assert bool(watch(alerts(resolution_bytes=RESOLUTION * 2), 48, lambda n: 100 * MIB + n * pace * 2)) is raised


EARLY: dict[str, tuple[Callable[[int], float], bool]] = {
    "a spread of a quarter": (lambda n: n + (n % 4 > 0) * 4.0, True),  # 7 MiB inside each group, 28 from first to last
    "a spread of more": (lambda n: n + (n % 4 > 0) * 4.1, False),
    "one burst": (lambda n: n + (n == 20) * 1000, True),
    "after a fall": (lambda n: n + max(0, 16 - n) * 50, True),
}


@pytest.mark.parametrize(("use_mib", "raised"), EARLY.values(), ids=EARLY)
def test_leak_at_the_first_judgement(use_mib: Callable[[int], float], raised: bool) -> None:
    assert bool(watch(alerts(), 48, lambda n: GIB + use_mib(n) * MIB)) is raised


def test_a_resumed_run_begins_at_any_step() -> None:
    floors = [(n, GIB + (n - 50_000) * MIB) for n in range(50_000, 50_048)]
    told = alerts()
    issued = [told.floor(n, used, limit_bytes=80 * GIB) for n, used in floors if n >= told.next_floor]
    assert [bool(sentence) for sentence in issued] == [False] * 47 + [True]


def test_of_two_floors_the_lower_is_kept() -> None:
    told = alerts()
    watch(told, 65, lambda n: GIB + (n % 4 in (0, 3)) * GIB)
    assert told._floors._floors[:4] == [(1, GIB), (2, GIB), (5, GIB), (6, GIB)]


@FEW
@given(st.integers(0, 100 * GIB), st.lists(st.integers(0, 16 * MIB - 1), min_size=64, max_size=600))
def test_no_leak_whatever_happens_within_16_mib(base_bytes: int, noise: list[int]) -> None:
    assert watch(alerts(resolution_bytes=0), len(noise), lambda n: base_bytes + noise[n]) == []


@FEW
@given(st.integers(0, 100 * GIB), st.integers(0, 100 * GIB), st.integers(0, 2**32))
def test_no_leak_in_noise_around_a_constant(base_bytes: int, noise_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    assert watch(alerts(resolution_bytes=0), 5000, lambda n: base_bytes + rng.randint(0, noise_bytes)) == []


@FEW
@given(st.integers(0, 100 * GIB), st.floats(0.1, 50))
def test_any_steady_growth_is_found_once_it_is_large_enough(base_bytes: int, stride: float) -> None:
    # What a floor at every so manyth step needs as a pace, by each of the three rules: the resolution between two
    # groups (three strides apart at least), 16 MiB over the judged floors (27 strides), and 2% of the floor by then.
    pace = 1.01 * max(RESOLUTION / 3, 16 * MIB / 27, 0.02 * base_bytes / (27 - 0.02 * 64)) / stride
    steps = math.ceil(128 * max(1.0, stride))  # as strides are powers of two
    assert len(watch(alerts(), steps, lambda n: base_bytes + n * pace)) == 1


@pytest.mark.parametrize("start", [0, 50_000])
def test_floors_take_constant_memory_over_a_million_steps(start: int) -> None:
    told, asked = alerts(), 0
    for n in range(start, start + 1_000_000):
        if n >= told.next_floor:
            asked += 1
            assert told.floor(n, GIB, limit_bytes=80 * GIB) is None
            assert len(told._floors._floors) <= 64
    assert 64 < asked <= 64 + 32 * math.log2(1_000_000 / 64)


# A step against the plan

LINE = Line(100 * MIB, MIB, 0.0, 10, 100)  # 200 MiB at 100 samples


def plan(*, device: str = "cuda", worker_bytes: Callable[[int], int] = lambda size: 0, **lines: Line) -> Plan:
    trials = [Trial(size, "ok", {}, worker_bytes=worker_bytes(size)) for size in (10, 20, 100)]
    memory = MemoryModel(lines or {"backward": LINE}, reserved_ratio=1.5)
    trials.append(Trial(400, "out_of_memory", {}))
    return Plan(100, "memory", True, GIB, None, None, None, tuple(trials), memory, None, device=device)


def raised(told: Alerts, batch_size: int | None, peak_bytes: int) -> bool:
    """Whether the second step at a size is too much; the first is not judged."""
    assert told.step(number=0, batch_size=batch_size, peak_bytes=10**15) is None
    return told.step(number=60, batch_size=batch_size, peak_bytes=peak_bytes) is not None


def test_step_above_the_plan_is_said_once_with_the_numbers() -> None:
    told = alerts(plan=plan())
    assert raised(told, 100, 210 * MIB + 1)
    assert (
        "step 60 (100 samples), 210.0 MiB, is above what BatchFinder's plan allows for, 210.0"
        in told.issued["prediction"]
    )
    assert "worst_case" in told.issued["prediction"]
    assert told.step(number=61, batch_size=100, peak_bytes=10**15) is None


@pytest.mark.parametrize(
    ("resolution", "size", "most_mib"),
    [
        (RESOLUTION, 100, 210),  # 5% above the line
        (20 * MIB, 100, 220),
        (RESOLUTION, 10, 115.5),
        (RESOLUTION, 3, 115.5),  # below the sizes that the line was fitted to it may lie too low
        (RESOLUTION, 150, 262.5),
    ],
)
def test_step_is_held_against_the_upper_bound_in_allocated_bytes(resolution: int, size: int, most_mib: float) -> None:
    most_bytes = int(most_mib * MIB)
    assert not raised(alerts(resolution_bytes=resolution, plan=plan()), size, most_bytes)
    assert raised(alerts(resolution_bytes=resolution, plan=plan()), size, most_bytes + 1)


@pytest.mark.parametrize(("device", "is_much"), [("cuda", True), ("host", False)])
def test_a_small_batch_after_a_large_one_is_not_judged_by_its_size_where_the_heap_keeps(
    device: str, is_much: bool
) -> None:
    told = alerts(plan=plan(device=device))
    for number, size in enumerate((100, 10, 100)):
        assert told.step(number=number, batch_size=size, peak_bytes=200 * MIB) is None
    assert (told.step(number=4, batch_size=10, peak_bytes=200 * MIB) is not None) == is_much


@pytest.mark.parametrize("size", [None, 151, 400])
def test_step_of_a_size_of_which_the_plan_says_nothing_is_not_judged(size: int | None) -> None:
    told = alerts(plan=plan())
    assert not raised(told, size, 10**15)
    assert told.predicted_bytes(size) is None


@pytest.mark.parametrize("of_no_lines", [None, Plan(2, "memory", True, GIB, None, None, None, (), None, None)])
def test_step_is_not_judged_without_lines(of_no_lines: Plan | None) -> None:
    told = alerts(plan=of_no_lines)
    assert not raised(told, 2, 10**15)
    assert told.predicted_bytes(2) is None


def test_prediction_is_the_highest_line_of_training() -> None:
    higher, evaluation = Line(150 * MIB, MIB / 4, 0.0, 10, 100), Line(MIB, 4 * MIB, 0.0, 10, 100)
    told = alerts(plan=plan(backward=LINE, forward=higher, evaluation=evaluation))
    assert told.predicted_bytes(100) == 200 * MIB
    assert told.predicted_bytes(20) == 155 * MIB
    assert alerts(plan=plan(evaluation=evaluation)).predicted_bytes(20) is None
    assert not raised(told, 100, 401 * MIB)  # a heap keeps what evaluation has freed


def test_loader_workers_are_no_part_of_this_process() -> None:
    def worker_bytes(size: int) -> int:
        return 10 * MIB + size * MIB // 2

    on_host = alerts(plan=plan(device="host", worker_bytes=worker_bytes))
    assert on_host.predicted_bytes(100) == 140 * MIB
    assert on_host.predicted_bytes(50) == 115 * MIB
    assert not raised(on_host, 100, 147 * MIB)
    assert on_host.step(number=61, batch_size=100, peak_bytes=147 * MIB + 1) is not None  # 5% above
    on_device = alerts(plan=plan(device="NVIDIA H100 80GB HBM3", worker_bytes=worker_bytes))
    assert on_device.predicted_bytes(100) == 200 * MIB


# Evaluation


@pytest.mark.parametrize(
    ("peak_bytes", "train_peak_bytes", "issued"),
    [
        (52 * MIB, 50 * MIB, False),
        (52 * MIB + 1, 50 * MIB, True),  # the resolution is 2 MiB
        (1020 * MIB, 1000 * MIB, False),
        (1020 * MIB + 1, 1000 * MIB, True),
        (1020 * MIB, None, False),
    ],
)
def test_evaluation_above_training(peak_bytes: int, train_peak_bytes: int | None, issued: bool) -> None:
    told = alerts()
    sentence = told.evaluation(stage="validate", peak_bytes=peak_bytes, train_peak_bytes=train_peak_bytes)
    assert (sentence is not None) is issued
    assert told.issued == ({"validation": sentence} if issued else {})


def test_evaluation_is_said_once_with_what_to_do() -> None:
    told = alerts()
    sentence = told.evaluation(stage="validate", peak_bytes=2 * GIB, train_peak_bytes=GIB)
    assert sentence is not None
    assert "evaluation (validate), 2,048.0 MiB, is above the 1,024.0 MiB of training" in sentence
    assert "eval_batch_arg_name" in sentence
    assert told.evaluation(stage="validate", peak_bytes=3 * GIB, train_peak_bytes=GIB) is None


# What an interval tells

NOTHING = {
    "steps": 50,
    "seconds": 5.0,
    "data_wait_share": 0.0,
    "peak_bytes": 100 * MIB,
    "limit_bytes": 1000 * MIB,
    "counters": {},
    "busy_percent": None,
}


def interval(told: Alerts, **seen: Any) -> list[str]:
    return told.interval(**{**NOTHING, **seen})


def test_allocator_retries_since_the_first_interval_are_said_once() -> None:
    told = alerts()
    assert interval(told, counters={"num_alloc_retries": 7, "num_ooms": 3}) == []  # a search may have tried
    assert interval(told, counters={"num_alloc_retries": 7, "num_ooms": 9}) == []
    (issued,) = interval(told, counters={"num_alloc_retries": 10})
    assert "In the last 50 steps" in issued
    assert "num_alloc_retries rose by 3" in issued
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in issued
    assert interval(told, counters={"num_alloc_retries": 20}) == []
    assert told.issued == {"allocator retries": issued}


def test_counters_that_are_missing_are_no_zero() -> None:
    told = alerts()
    assert interval(told, counters={}) == []
    assert interval(told, counters={"num_alloc_retries": 5}) == []
    assert len(interval(told, counters={"num_alloc_retries": 6})) == 1


def test_a_limit_that_a_plan_filled_on_purpose_is_not_said_to_be_near() -> None:
    told = alerts(plan=plan())
    assert interval(told, peak_bytes=GIB, limit_bytes=GIB) == []
    assert len(interval(told, peak_bytes=GIB + 1, limit_bytes=GIB)) == 1


def test_nearly_full_is_said_once() -> None:
    told = alerts()
    assert interval(told, peak_bytes=950 * MIB) == []
    (issued,) = interval(told, peak_bytes=950 * MIB + 1, steps=1)
    assert issued.startswith("The peak in the last step, 950.0 MiB, is above 95% of the 1,000.0 MiB")
    assert interval(told, peak_bytes=999 * MIB) == []
    assert told.issued == {"nearly full": issued}


@pytest.mark.parametrize(
    ("seen", "issued"),
    [
        ({"data_wait_share": 0.51}, True),
        ({"data_wait_share": 0.5}, False),
        ({"data_wait_share": None}, False),
        ({"data_wait_share": 0.9, "busy_percent": 49.0}, True),
        ({"data_wait_share": 0.9, "busy_percent": 50.0}, False),  # launched ahead: the device is at work
        ({"data_wait_share": 0.9, "steps": 19}, False),
        ({"data_wait_share": 0.9, "steps": 20}, True),
        ({"data_wait_share": 0.9, "seconds": 9.9}, False),
    ],
)
def test_waiting_for_data(seen: dict[str, Any], issued: bool) -> None:
    assert bool(interval(alerts(), **{"seconds": 10.0, **seen})) is issued


def test_waiting_for_data_is_gathered_over_intervals_and_said_once() -> None:
    told = alerts()
    slow = {"steps": 5, "seconds": 3.0, "data_wait_share": 0.8}
    assert interval(told, **slow, busy_percent=10.0) == []
    assert interval(told, **slow, busy_percent=40.0) == []
    assert interval(told, **slow) == []
    (issued,) = interval(told, **slow)
    assert "80% of the last 12.0 s (20 steps)" in issued
    assert "and the device was busy for 25% of it" in issued
    assert "num_workers" in issued
    assert interval(told, **{**slow, "steps": 100, "seconds": 100.0}) == []
    assert told.issued == {"data": issued}


def test_waiting_for_data_begins_anew_after_each_judgement() -> None:
    told = alerts()
    assert interval(told, seconds=1000.0, data_wait_share=0.1) == []
    assert len(interval(told, seconds=10.0, data_wait_share=0.9)) == 1


def test_an_interval_may_raise_several_in_one_order() -> None:
    told = alerts()
    interval(told, counters={"num_alloc_retries": 0})
    issued = interval(told, counters={"num_alloc_retries": 1}, peak_bytes=GIB, data_wait_share=1.0, seconds=60.0)
    assert list(told.issued) == ["allocator retries", "nearly full", "data"]
    assert issued == list(told.issued.values())


def test_what_is_no_peak_is_not_called_one() -> None:
    told = alerts(has_peak=False, plan=plan())
    raised(told, 100, GIB)
    told.evaluation(stage="validate", peak_bytes=2 * GIB, train_peak_bytes=GIB)
    interval(told, peak_bytes=GIB + 1)
    assert list(told.issued) == ["prediction", "validation", "nearly full"]
    for sentence in told.issued.values():
        assert sentence.startswith("The highest value seen in ")
        assert "peak" not in sentence
