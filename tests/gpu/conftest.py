from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda() -> None:
    """Everything in this folder needs a real device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
