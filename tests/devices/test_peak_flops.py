import pytest
import torch

from lightning_batchmem.devices.peak_flops import peak_flops, uses_tf32

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tflops"),
    [
        (H100, "bf16-mixed", False, 989.5),
        (H100, "16-true", False, 989.5),
        (H100, "32-true", True, 494.5),
        (H100, "32-true", False, 67),
        ("NVIDIA H100 NVL", "bf16-true", False, 835.5),
        ("NVIDIA H200", "bf16-mixed", False, 989.5),
        ("NVIDIA GH200 480GB", "bf16-mixed", False, 989.5),
        ("NVIDIA GB200", "bf16-mixed", False, 2500),
        ("NVIDIA L40S", "bf16-mixed", False, 362),
        ("NVIDIA L40", "bf16-mixed", False, 181),
        ("NVIDIA L4", "bf16-mixed", False, 121),
        ("NVIDIA A100-SXM4-80GB", "16-mixed", False, 312),
        ("NVIDIA A100 80GB PCIe", "32-true", True, 156),
        # These have no TF32.
        ("Tesla T4", "32-true", True, 8.1),
        ("Tesla V100-SXM2-16GB", "16-mixed", False, 125),
    ],
)
def test_the_peak_of_a_device(name, precision, tf32, tflops):
    assert peak_flops(name, precision, uses_tf32=tf32) == pytest.approx(1e12 * tflops)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("host", "32-true"),
        (f"{H100} MIG 1g.10gb", "bf16-mixed"),
        ("NVIDIA RTX A4000", "bf16-mixed"),
        ("NVIDIA A10G", "bf16-mixed"),
        ("NVIDIA A40-12Q", "bf16-mixed"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16-mixed"),
        # Its tensor cores have no bfloat16.
        ("Tesla T4", "bf16-mixed"),
        (H100, "64-true"),
        (H100, "transformer-engine"),
    ],
)
def test_an_unknown_peak(name, precision):
    assert peak_flops(name, precision, uses_tf32=True) is None


def test_tf32_is_that_of_the_settings():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert not uses_tf32(has_convolutions=False)
        # torch allows it to convolutions by default.
        assert uses_tf32(has_convolutions=True)
        torch.set_float32_matmul_precision("high")
        assert uses_tf32(has_convolutions=False)
    finally:
        torch.set_float32_matmul_precision(before)
