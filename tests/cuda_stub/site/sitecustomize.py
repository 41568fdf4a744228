"""Switch cuDNN off when torch is imported, unless CUDA_STUB_CUDNN is 1.

Python imports this module at its start, before torch.
"""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Loaded by its path, because the package would import torch.
PATH = ROOT / "lightning_batchmem" / "simulated_gpu" / "child.py"

spec = importlib.util.spec_from_file_location("simulated_gpu_child", PATH)
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
os.environ.setdefault("CUDA_STUB_CUDNN", "0")
sys.meta_path.insert(0, child.ChangedModules({"torch": child.limit_cudnn}))
