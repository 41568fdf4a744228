"""Switch cuDNN off when torch is imported.

cuDNN needs a driver, so convolutions and recurrent layers use PyTorch's own kernels on the stub.
Python imports this module at its start, before torch.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


class TorchWithoutCudnn(MetaPathFinder):
    """Finds torch as usual, and changes two settings after it was loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def load_and_switch_off(module):
            load(module)
            module.backends.cudnn.enabled = False
            # The attention of cuDNN has a switch of its own, and is preferred on Hopper.
            module.backends.cuda.enable_cudnn_sdp(False)

        spec.loader.exec_module = load_and_switch_off
        return spec


sys.meta_path.insert(0, TorchWithoutCudnn())
