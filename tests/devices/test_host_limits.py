import math
import os
from functools import partial
from types import SimpleNamespace

import pytest

from lightning_batchmem.devices import host
from lightning_batchmem.devices.host import (
    HostMemory,
    cpu_quota_cores,
    free_shared_bytes,
    memory_headroom_bytes,
)

MIB = 1 << 20
UNLIMITED_V1 = str(0x7FFFFFFFFFFFF000)


def write_files(root, files):
    """Write files of groups; integers are in MiB."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content * MIB if isinstance(content, int) else content}\n")


@pytest.fixture
def membership(tmp_path):
    return tmp_path / "self_cgroup"


def headroom_mib(root, membership):
    headroom_bytes = memory_headroom_bytes(root=root, membership=membership)
    return None if headroom_bytes is None else headroom_bytes / MIB


STATISTICS = f"anon {50 * MIB}\ninactive_file {30 * MIB}\nactive_file {5 * MIB}"
STATISTICS_V1 = f"inactive_file 1\ntotal_inactive_file {40 * MIB}"
PARENTS_V1 = {"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/memory.usage_in_bytes": 500}
GROUP_V1 = {"memory/abc/memory.limit_in_bytes": 200, "memory/abc/memory.usage_in_bytes": 235}
ANCESTORS = {
    "a/memory.max": 100,
    "a/memory.current": 80,
    "a/b/memory.max": "max",
    "a/b/memory.current": 60,
}


GROUPS = {
    "no page cache": (
        "0::/app",
        {"app/memory.max": 100, "app/memory.current": 90, "app/memory.stat": STATISTICS},
        40,
    ),
    "ancestor": (
        "0::/a/b/c",
        {**ANCESTORS, "a/b/c/memory.max": 90, "a/b/c/memory.current": 10},
        20,
    ),
    "throttled": (
        "0::/app",
        {"app/memory.max": 100, "app/memory.high": 70, "app/memory.current": 10},
        60,
    ),
    "version 1, with the cache of the children": (
        "9:name=systemd:/x\n4:memory:/abc\n1:cpu,cpuacct:/abc\n0::/",
        {**PARENTS_V1, **GROUP_V1, "memory/abc/memory.stat": STATISTICS_V1},
        5,
    ),
    "container without a namespace: the mount": (
        "4:memory:/docker/abc",
        {"memory/memory.limit_in_bytes": 200, "memory/memory.usage_in_bytes": 150},
        50,
    ),
    "outside the namespace: the mount only": (
        "0::/../other",
        {
            "../other/memory.max": 1,
            "../other/memory.current": 1,
            "memory.max": 200,
            "memory.current": 150,
        },
        50,
    ),
    "hybrid": (
        "1:name=systemd:/x\n0::/app",
        {"unified/app/memory.max": 9, "unified/app/memory.current": 8},
        1,
    ),
    "use above the limit": ("0::/app", {"app/memory.max": 100, "app/memory.current": 120}, 0),
    "no limit": ("0::/app", {"app/memory.max": "max", "app/memory.current": 120}, None),
    "no limit file": ("0::/app", {"app/memory.current": 120}, None),
    "no limit in version 1": ("4:memory:/", PARENTS_V1, int(UNLIMITED_V1) / MIB - 500),
}


@pytest.mark.parametrize("name", GROUPS)
def test_headroom(tmp_path, membership, name):
    line, files, expected_mib = GROUPS[name]
    membership.write_text(f"{line}\n")
    write_files(tmp_path / "root", files)
    assert headroom_mib(tmp_path / "root", membership) == expected_mib


def test_without_control_groups_there_is_no_limit(tmp_path, membership):
    assert headroom_mib(tmp_path, membership) is None
    assert cpu_quota_cores(root=tmp_path, membership=membership) is None


def test_a_change_of_limit_use_or_group_is_seen(tmp_path, membership):
    membership.write_text("0::/a\n")
    write_files(
        tmp_path,
        {"b/memory.max": 30, "b/memory.current": 10, "a/memory.max": "max", "a/memory.current": 10},
    )
    assert headroom_mib(tmp_path, membership) is None
    changes = [("max", 100, 90), ("current", 20, 80), ("stat", STATISTICS, 100), ("max", 60, 60)]
    for name, content, expected_mib in changes:
        write_files(tmp_path, {f"a/memory.{name}": content})
        assert headroom_mib(tmp_path, membership) == expected_mib
    membership.write_text("0::/b\n")
    assert headroom_mib(tmp_path, membership) == 20


def test_files_that_cannot_be_parsed_are_a_warning_and_no_limit(tmp_path, membership, monkeypatch):
    membership.write_text("0::/app\n")
    root = tmp_path / "root"
    write_files(root, {"app/memory.max": "\u00b2", "app/memory.current": 90})
    headroom = partial(memory_headroom_bytes, root=root, membership=membership)
    monkeypatch.setattr(host, "memory_headroom_bytes", headroom)
    with pytest.warns(UserWarning, match="The memory limit of a control group cannot be read"):
        assert HostMemory().available_bytes() > 100 * MIB


def test_a_group_whose_name_is_in_another_encoding(tmp_path, membership):
    name = b"caf\xe9"
    membership.write_bytes(b"0::/" + name + b"\n")
    group = tmp_path / "root" / os.fsdecode(name)
    write_files(group, {"memory.max": 100, "memory.current": 90})
    assert headroom_mib(tmp_path / "root", membership) == 10


QUOTAS = {
    "a/cpu.max": "150000 100000",
    "a/b/cpu.max": "400000 100000",
    "a/b/c/cpu.max": "max 100000",
}
PERIOD_V1 = {"cpu,cpuacct/x/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/a/b/c", QUOTAS, 1.5),
        ("1:cpu,cpuacct:/x", {**PERIOD_V1, "cpu,cpuacct/x/cpu.cfs_quota_us": "50000"}, 0.5),
        ("1:cpu,cpuacct:/x", {**PERIOD_V1, "cpu,cpuacct/x/cpu.cfs_quota_us": "-1"}, None),
    ],
)
def test_cpu_quota(tmp_path, membership, line, files, cores):
    membership.write_text(f"{line}\n")
    write_files(tmp_path, files)
    assert cpu_quota_cores(root=tmp_path, membership=membership) == cores


def test_shared_memory_without_a_limit_has_no_bound(monkeypatch):
    assert free_shared_bytes() > 0
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(total=0))
    assert free_shared_bytes() == math.inf
    monkeypatch.undo()
    # Not Linux.
    monkeypatch.setattr(host, "_SHARED_MEMORY", "/nowhere")
    assert free_shared_bytes() == math.inf
