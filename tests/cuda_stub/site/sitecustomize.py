"""Switch cuDNN off when torch is imported.

cuDNN needs a driver, so convolutions and recurrent layers use PyTorch's own kernels on the stub.
Python imports this module at its start, before torch.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Loaded by its path, because the package would import torch.
PATH = ROOT / "lightning_batchmem" / "simulated_gpu" / "child.py"

spec = importlib.util.spec_from_file_location("simulated_gpu_child", PATH)
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
sys.meta_path.insert(0, child.ChangedModules({"torch": child.switch_off_cudnn}))
