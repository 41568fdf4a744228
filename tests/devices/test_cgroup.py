from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lightning_batchmem.devices import cgroup

MIB = 1 << 20
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


def write_group(directory: Path, files: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(f"{content * MIB if isinstance(content, int) else content}\n")


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "self_cgroup"


# membership, files of each group (integers in MiB), headroom in MiB
CASES: dict[str, tuple[str, dict[str, dict[str, object]], int | None]] = {
    "page cache is not use": (
        "0::/app",
        {
            "app": {
                "memory.max": 100,
                "memory.current": 90,
                "memory.stat": f"anon {50 * MIB}\ninactive_file {30 * MIB}\nactive_file {5 * MIB}",
            }
        },
        40,
    ),
    "the tightest ancestor": (
        "0::/a/b/c",
        {
            "a": {"memory.max": 100, "memory.current": 80},
            "a/b": {"memory.max": "max", "memory.current": 60},
            "a/b/c": {"memory.max": 90, "memory.current": 10},
        },
        20,
    ),
    "the throttling limit": (
        "0::/app",
        {"app": {"memory.max": 100, "memory.high": 70, "memory.current": 10}},
        60,
    ),
    "version 1, with the cache of the children": (
        "9:name=systemd:/x\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/",
        {
            "memory": {"memory.limit_in_bytes": str(UNLIMITED_V1), "memory.usage_in_bytes": 500},
            "memory/docker": {"memory.limit_in_bytes": 300, "memory.usage_in_bytes": 290},
            "memory/docker/abc": {
                "memory.limit_in_bytes": 200,
                "memory.usage_in_bytes": 235,
                "memory.stat": f"inactive_file 1\ntotal_inactive_file {40 * MIB}",
            },
        },
        5,
    ),
    "a container without a namespace: its limit is at the mount": (
        "4:memory:/docker/abc",
        {"memory": {"memory.limit_in_bytes": 200, "memory.usage_in_bytes": 150}},
        50,
    ),
    "outside the namespace: the mount only": (
        "0::/../other",
        {"../other": {"memory.max": 1, "memory.current": 1}, ".": {"memory.max": 200, "memory.current": 150}},
        50,
    ),
    "a hybrid mount": (
        "1:name=systemd:/x\n0::/app",
        {"unified/app": {"memory.max": 100, "memory.current": 90}},
        10,
    ),
    "use above the limit": ("0::/app", {"app": {"memory.max": 100, "memory.current": 120}}, 0),
    "no limit": ("0::/app", {"app": {"memory.max": "max", "memory.current": 120}}, None),
    "no limit file": ("0::/app", {"app": {"memory.current": 120}}, None),
    "no limit in version 1": (
        "4:memory:/",
        {"memory": {"memory.limit_in_bytes": str(UNLIMITED_V1), "memory.usage_in_bytes": 5}},
        None,
    ),
    "no control groups": ("", {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_headroom(tmp_path: Path, membership: Path, case: str) -> None:
    line, groups, headroom_mib = CASES[case]
    root = tmp_path / "root"
    root.mkdir()
    membership.write_text(f"{line}\n" if line else "")
    for name, files in groups.items():
        write_group(root / name, files)
    headroom_bytes = cgroup.memory_headroom_bytes(root=root, membership=membership)
    assert headroom_bytes == (None if headroom_mib is None else headroom_mib * MIB)


def test_a_change_of_limit_use_or_group_is_seen(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/a\n")
    write_group(tmp_path / "b", {"memory.max": 30, "memory.current": 10})
    for files, headroom_mib in (
        ({"memory.max": "max", "memory.current": 10}, None),
        ({"memory.max": 100}, 90),
        ({"memory.current": 20}, 80),
        ({"memory.stat": f"inactive_file {15 * MIB}"}, 95),
    ):
        write_group(tmp_path / "a", files)
        headroom_bytes = cgroup.memory_headroom_bytes(root=tmp_path, membership=membership)
        assert headroom_bytes == (None if headroom_mib is None else headroom_mib * MIB)
    membership.write_text("0::/b\n")
    assert cgroup.memory_headroom_bytes(root=tmp_path, membership=membership) == 20 * MIB


@pytest.mark.parametrize(("number", "is_raised"), [(errno.ENODEV, False), (errno.ENOENT, False), (errno.EMFILE, True)])
def test_a_group_removed_while_it_is_read_has_no_limit_but_too_many_open_files_are_an_error(
    tmp_path: Path, membership: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_raised: bool
) -> None:
    membership.write_text("0::/a/b\n")
    write_group(tmp_path / "a", {"memory.max": 100, "memory.current": 10})
    write_group(tmp_path / "a/b", {"memory.max": 50, "memory.current": 10})
    read_text = Path.read_text

    def read(path: Path) -> str:
        if path.parent.name == "b":
            raise OSError(number, "cannot be read")
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", read)
    if is_raised:
        with pytest.raises(OSError, match="cannot be read"):
            cgroup.memory_headroom_bytes(root=tmp_path, membership=membership)
    else:
        assert cgroup.memory_headroom_bytes(root=tmp_path, membership=membership) == 90 * MIB


@pytest.mark.parametrize(
    ("line", "groups", "cores"),
    [
        (
            "0::/a/b/c",
            {
                "a": {"cpu.max": "150000 100000"},
                "a/b": {"cpu.max": "400000 100000"},
                "a/b/c": {"cpu.max": "max 100000"},
            },
            1.5,
        ),
        ("1:cpu,cpuacct:/x", {"cpu,cpuacct/x": {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}}, 0.5),
        ("1:cpu,cpuacct:/x", {"cpu,cpuacct/x": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}}, None),
        ("0::/", {}, None),
    ],
)
def test_cpu_quota(
    tmp_path: Path, membership: Path, line: str, groups: dict[str, dict[str, object]], cores: float | None
) -> None:
    membership.write_text(f"{line}\n")
    for name, files in groups.items():
        write_group(tmp_path / name, files)
    assert cgroup.cpu_quota_cores(root=tmp_path, membership=membership) == cores
