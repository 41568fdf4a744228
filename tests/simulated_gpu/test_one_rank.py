"""One rank of many, where torch has the parts for it; collectives are in ``tests/gpu``."""

import pytest
import torch
from torch.distributed import Backend

from lightning_batchmem.simulated_gpu.one_rank import meet_nobody


@pytest.mark.skipif(
    hasattr(Backend, "_ensure_backend_registered"), reason="this version of torch has the parts"
)
def test_an_older_torch_is_refused_with_a_sentence():
    refused = []
    meet_nobody(4, refused.append)
    text = f"several GPUs are simulated with torch 2.14 or later, got {torch.__version__}"
    assert refused == [text]
