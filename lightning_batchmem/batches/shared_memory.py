"""Memory that processes share: loader workers put their batches there."""

from __future__ import annotations

import math
import shutil

# Where torch puts the tensors that processes send each other.
# Source: shm_open(3); the strategies of torch.multiprocessing, 2.5.1 to 2.14
_WORKERS_SHARE = "/dev/shm"  # noqa: S108


def free_shared_bytes() -> float:
    """Bytes that are free where loader workers put their batches.

    They are ``inf`` without a limit. Docker limits this memory to 64 MiB unless ``--shm-size`` is
    passed.
    """
    try:
        usage = shutil.disk_usage(_WORKERS_SHARE)
    except OSError:
        # Not Linux, which has other limits there.
        return math.inf
    # A tmpfs without a limit has no size. Source: the option size in tmpfs(5)
    return usage.free if usage.total else math.inf
