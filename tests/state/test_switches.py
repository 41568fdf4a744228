"""Switches of torch, as a search finds and leaves them."""

import pytest
import torch
from torch import nn

from lightning_batchmem.state.snapshot import Snapshot


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
        (torch.get_default_device, lambda: torch.set_default_device("meta")),
        (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
        (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("high")),
        (
            torch.is_deterministic_algorithms_warn_only_enabled,
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        ),
        (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True, False)),
        (
            torch.is_anomaly_check_nan_enabled,
            lambda: torch.autograd.set_detect_anomaly(True, False),
        ),
        (
            lambda: torch.is_autocast_enabled("cpu"),
            lambda: torch.set_autocast_enabled("cpu", True),
        ),
        (
            lambda: torch.get_autocast_dtype("cpu"),
            lambda: torch.set_autocast_dtype("cpu", torch.float16),
        ),
        (
            lambda: torch.backends.cudnn.benchmark,
            lambda: setattr(torch.backends.cudnn, "benchmark", True),
        ),
        (
            torch.backends.cuda.flash_sdp_enabled,
            lambda: torch.backends.cuda.enable_flash_sdp(False),
        ),
        (
            lambda: torch.backends.mkldnn.enabled,
            lambda: setattr(torch.backends.mkldnn, "enabled", False),
        ),
        (
            torch.backends.mha.get_fastpath_enabled,
            lambda: torch.backends.mha.set_fastpath_enabled(False),
        ),
        (
            torch.sparse.check_sparse_tensor_invariants.is_enabled,
            torch.sparse.check_sparse_tensor_invariants.enable,
        ),
        (
            torch.__future__.get_swap_module_params_on_conversion,
            lambda: torch.__future__.set_swap_module_params_on_conversion(True),
        ),
        (
            torch.multiprocessing.get_sharing_strategy,
            lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_switch_is_set_again(read, change):
    before = read()
    snapshot = Snapshot([nn.Linear(1, 1)])
    change()
    changed = read()
    assert snapshot.restore() == []
    assert changed != before
    assert read() == before


def test_both_ways_to_set_a_precision_are_restored():
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch has this switch since 2.9")
    before = torch.get_float32_matmul_precision()
    snapshot = Snapshot([nn.Linear(1, 1)])
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert snapshot.restore() == []
    assert torch.get_float32_matmul_precision() == before
    assert not torch.backends.cuda.matmul.allow_tf32
