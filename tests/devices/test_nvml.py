from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest
import torch

from lightning_batchmem.devices.nvml import nvml_utilization
from lightning_batchmem.devices.select import utilization_for

DEVICE = torch.device("cuda", 0)
UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER = "00000000-0000-0000-0000-000000000000"


def sample(time_us: int, percent: float, field: str = "uiVal") -> pynvml.c_nvmlSample_t:
    entry = pynvml.c_nvmlSample_t()
    entry.timeStamp = time_us
    setattr(entry.sampleValue, field, percent)
    return entry


class Driver:
    """Behind the patched pynvml functions: two GPUs, of which torch's device 0 is NVML's second."""

    def __init__(self) -> None:
        self.kind = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        self.buffer: list[pynvml.c_nvmlSample_t] = []
        self.samples_error: int | None = None
        self.rate: int | None = 42
        self.mig_mode: int | None = None
        self.asked_since_us: list[int] = []

    def handle(self, uuid: str) -> str:
        if uuid not in (f"GPU-{OTHER}", f"GPU-{UUID}"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def samples(self, handle: str, kind: int, since_us: int) -> tuple[int, list[pynvml.c_nvmlSample_t]]:
        assert handle == f"GPU-{UUID}"
        assert kind == pynvml.NVML_GPU_UTILIZATION_SAMPLES
        self.asked_since_us.append(since_us)
        if self.samples_error is not None:
            raise pynvml.NVMLError(self.samples_error)
        new = [entry for entry in self.buffer if entry.timeStamp > since_us or entry.timeStamp == 0]
        if not new:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.kind, new

    def rates(self, handle: str) -> pynvml.c_nvmlUtilization_t:
        assert handle == f"GPU-{UUID}"
        if self.rate is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return pynvml.c_nvmlUtilization_t(gpu=self.rate, memory=99)

    def mig(self, handle: str) -> list[int]:
        if self.mig_mode is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [self.mig_mode, self.mig_mode]


@pytest.fixture
def uuid(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    def set_uuid(uuid: object) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))

    set_uuid(UUID)
    return set_uuid


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, uuid: Callable[[object], None]) -> Driver:
    driver = Driver()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", driver.handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetSamples", driver.samples)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", driver.rates)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", driver.mig)
    return driver


def test_mean_of_the_samples_since_the_last_call(driver: Driver) -> None:
    driver.buffer = [sample(1_000_000, 100)]
    utilization = utilization_for(DEVICE)
    assert utilization is not None
    assert utilization.key == "gpu_pct"
    driver.buffer += [sample(2_000_000, 10), sample(3_000_000, 30)]
    assert utilization.percent_since_last_call() == pytest.approx(20)
    driver.buffer += [sample(4_000_000, 60)]
    assert utilization.percent_since_last_call() == pytest.approx(60)
    assert driver.asked_since_us == [0, 1_000_000, 3_000_000]


def test_idle_is_zero_and_no_new_sample_is_missing(driver: Driver) -> None:
    driver.buffer = [sample(1_000_000, 100)]
    utilization = nvml_utilization(DEVICE)
    assert utilization is not None
    assert utilization.percent_since_last_call() is None
    driver.buffer += [sample(2_000_000, 0)]
    assert utilization.percent_since_last_call() == 0


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (pynvml.NVML_VALUE_TYPE_DOUBLE, "dVal"),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal"),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, "ulVal"),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, "ullVal"),
        (pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, "sllVal"),
        (5, "siVal"),
    ],
)
def test_samples_are_read_by_their_value_type(driver: Driver, kind: int, field: str) -> None:
    driver.kind = kind
    driver.buffer = [sample(1, 0, field)]
    utilization = nvml_utilization(DEVICE)
    assert utilization is not None
    driver.buffer += [sample(2, 73, field)]
    assert utilization.percent_since_last_call() == pytest.approx(73)


def test_empty_slots_and_impossible_values_are_left_out(driver: Driver) -> None:
    driver.buffer = [sample(1, 50)]
    utilization = nvml_utilization(DEVICE)
    assert utilization is not None
    driver.buffer += [sample(0, 0), sample(2, 80), sample(3, 4_000_000_000)]
    assert utilization.percent_since_last_call() == pytest.approx(80)


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, None])
def test_without_samples_the_rate_at_the_moment(driver: Driver, error: int | None) -> None:
    driver.samples_error = error  # None: supported, but the buffer is empty
    utilization = nvml_utilization(DEVICE)
    assert utilization is not None
    assert utilization.percent_since_last_call() == 42


def test_unknown_value_type_falls_back_to_the_rate(driver: Driver) -> None:
    driver.kind, driver.buffer = 99, [sample(1, 7)]
    utilization = nvml_utilization(DEVICE)
    assert utilization is not None
    assert utilization.percent_since_last_call() == 42


@pytest.mark.parametrize("told", [UUID, f"GPU-{UUID}"])
def test_device_is_found_by_uuid_not_by_position(driver: Driver, uuid: Callable[[object], None], told: str) -> None:
    class Uuid:  # torch gives an object, not a string
        def __str__(self) -> str:
            return told

    uuid(Uuid())
    assert nvml_utilization(DEVICE) is not None  # the driver's functions check the handle


def none_with_one_warning(match: str) -> None:
    with pytest.warns(UserWarning, match=match) as caught:
        assert nvml_utilization(DEVICE) is None
    assert len(caught) == 1


def test_nothing_supported_is_none(driver: Driver) -> None:
    driver.samples_error, driver.rate = pynvml.NVML_ERROR_NOT_SUPPORTED, None
    none_with_one_warning("Not Supported")


def test_mig_slice_is_none(driver: Driver, uuid: Callable[[object], None]) -> None:
    uuid("11111111-1111-1111-1111-111111111111")
    none_with_one_warning("MIG slice")


def test_split_gpu_is_none(driver: Driver) -> None:
    driver.mig_mode, driver.rate = pynvml.NVML_DEVICE_MIG_ENABLE, 0
    none_with_one_warning("split by MIG")


def test_gpu_that_could_be_split_but_is_not(driver: Driver) -> None:
    driver.mig_mode = pynvml.NVML_DEVICE_MIG_DISABLE
    assert nvml_utilization(DEVICE) is not None


def test_torch_without_uuid_is_none(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    none_with_one_warning("UUID")


def test_missing_library_is_none(uuid: Callable[[object], None]) -> None:
    # The real nvmlInit, on a machine without a driver.
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        none_with_one_warning("NVML says")
    else:
        pytest.skip("this machine has NVML")


def test_missing_package_is_none(uuid: Callable[[object], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    none_with_one_warning("nvidia-ml-py is not installed")


def test_gpu_lost_while_training_warns_once_and_is_missing(driver: Driver) -> None:
    driver.buffer = [sample(1, 50)]
    utilization = nvml_utilization(DEVICE)
    assert utilization is not None
    driver.samples_error = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.warns(UserWarning, match="missing from here on"):
        assert utilization.percent_since_last_call() is None
    assert utilization.percent_since_last_call() is None  # a second warning would be an error
