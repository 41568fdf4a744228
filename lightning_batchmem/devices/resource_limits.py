"""What the process's own resource limits still admit, told in terms of its resident set."""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from pathlib import Path

if sys.platform != "win32":
    import resource

_SAMPLE_SECONDS = 0.001
_STACK_BYTES = 2**18

KIB = 1024  # "kB" in /proc. Source: proc_pid_status(5), proc_meminfo(5)


class ResourceLimits:
    """RLIMIT_AS and RLIMIT_DATA of this process: the kernel counts mapped memory there, the meter what is resident.

    What RLIMIT_DATA counts (private memory that can be written, so all large tensors) is not what is resident: it has
    what is mapped and never touched, as stacks of threads, and what the heap keeps mapped of freed blocks, and it has
    not the pages of files.

    Args:
        status: /proc/self/status; ``None`` where there is none.
        statm: /proc/self/statm; likewise.

    Source: getrlimit(2): RLIMIT_AS is held against VmSize, RLIMIT_DATA against VmData since Linux 4.7.
    """

    def __init__(self, status: Path | None, statm: Path | None) -> None:
        self._status, self._statm = status, statm
        self._mapped: _MappedPeak | None = None
        self._untouched_bytes: int | None = None  # mapped and not resident, where there is an RLIMIT_DATA
        self._shared_bytes: int | None = None  # pages of files, at the time when it was found to bound the process

    def rooms(self, resident_bytes: int) -> dict[str, int]:
        """By how many bytes the resident set may still grow, for each limit that is set.

        Args:
            resident_bytes: the resident set now.
        """
        if sys.platform != "linux" or self._status is None:
            return {}
        rooms = {}
        for name, limit, field in (("as", resource.RLIMIT_AS, "VmSize"), ("data", resource.RLIMIT_DATA, "VmData")):
            soft_limit_bytes = resource.getrlimit(limit)[0]
            if soft_limit_bytes == resource.RLIM_INFINITY:
                continue
            if (used_bytes := field_bytes(self._status.read_bytes(), field)) is None:
                continue
            if name == "data":
                if self._untouched_bytes is None:
                    self._untouched_bytes = used_bytes - resident_bytes
                # nobody else takes of it, and what this process maps from now on is in its peaks
                used_bytes = resident_bytes + self._untouched_bytes
            rooms[name] = soft_limit_bytes - used_bytes
        return rooms

    def data_is_least(self) -> None:
        """RLIMIT_DATA bounds this process more than all else: pages of files that come later are not counted."""
        if self._shared_bytes is None and self._status is not None:
            self._shared_bytes = _shared_bytes(self._status.read_bytes())

    def watch(self) -> None:
        """Watch for the most that is mapped until :meth:`counted_bytes`, where there is an RLIMIT_DATA."""
        if self._untouched_bytes is not None and self._statm is not None:
            self._mapped = _MappedPeak(self._statm)

    def counted_bytes(self, status: bytes, peak_resident_bytes: int) -> int:
        """A peak of the resident set, as RLIMIT_DATA counts it where there is one.

        Args:
            status: read from /proc/self/status.
            peak_resident_bytes: from the same.
        """
        if self._untouched_bytes is None:
            return peak_resident_bytes
        mapped_bytes = field_bytes(status, "VmData") or 0
        if self._mapped is not None:
            mapped_bytes, self._mapped = max(mapped_bytes, self._mapped.stop()), None
        peak_resident_bytes -= self.uncounted_bytes(_shared_bytes(status))
        return max(peak_resident_bytes, mapped_bytes - self._untouched_bytes)

    def uncounted_bytes(self, shared_bytes: int) -> int:
        """What is resident and not counted by the limit that bounds this process.

        Args:
            shared_bytes: pages of files and of shared memory that are resident now.
        """
        return 0 if self._shared_bytes is None else max(0, shared_bytes - self._shared_bytes)


class _MappedPeak:
    """The most that was mapped while it lived: sampled, since the kernel keeps no high-water mark of it.

    Libraries map buffers that they hardly touch. Source: measured by hand, torch 2.13 (CPU), two layers of an LSTM at
    140 samples: a step mapped 446 MiB more, of which 259 became resident.
    """

    def __init__(self, statm: Path) -> None:
        self._statm = statm
        self._peak_bytes = 0
        self._over = threading.Event()
        stack_bytes = threading.stack_size(_STACK_BYTES)  # the usual 8 MiB would count as mapped
        threading.Thread(target=_sample, args=[weakref.ref(self), self._over], daemon=True).start()
        threading.stack_size(stack_bytes)

    def stop(self) -> int:
        """The most that was seen, in bytes."""
        self._over.set()
        return self._peak_bytes

    def look(self) -> None:
        """Its sixth number, in pages: VmData, and the stack. Source: proc_pid_statm(5)."""
        self._peak_bytes = max(self._peak_bytes, int(self._statm.read_bytes().split()[5]) * mmap.PAGESIZE)


def _sample(peak: weakref.ref[_MappedPeak], over: threading.Event) -> None:
    while not over.wait(_SAMPLE_SECONDS) and (watched := peak()) is not None:
        watched.look()
        del watched  # or nobody else's letting go would end this


def field_bytes(lines: bytes, field: str) -> int | None:
    """A line such as ``VmRSS:  1234 kB`` of a file in /proc, in bytes; ``None`` where there is no such line."""
    _, found, rest = (b"\n" + lines).partition(b"\n" + field.encode() + b":")
    return int(rest.split(maxsplit=1)[0]) * KIB if found else None


def _shared_bytes(status: bytes) -> int:
    return (field_bytes(status, "RssFile") or 0) + (field_bytes(status, "RssShmem") or 0)
