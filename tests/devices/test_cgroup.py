from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil
import pytest

from lightning_batchmem.devices import cgroup
from lightning_batchmem.devices.kept_open import KeptOpen

MIB = 1 << 20


def group(directory: Path, **files: object) -> None:
    """Write a group's files: ``memory_max=1`` makes ``memory.max``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("_", ".", 1)).write_text(f"{content}\n")


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "self_cgroup"


def headroom(root: Path, membership: Path) -> int | None:
    return cgroup.memory_headroom_bytes(root=root, membership=membership)


def test_version_2_leaves_page_cache_out_of_the_use(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/app\n")
    stat = f"anon {50 * MIB}\ninactive_file {30 * MIB}\nactive_file {5 * MIB}"
    group(tmp_path / "app", memory_max=100 * MIB, memory_current=90 * MIB, memory_stat=stat)
    assert headroom(tmp_path, membership) == 40 * MIB


def test_version_2_tightest_ancestor_counts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/a/b/c\n")
    group(tmp_path / "a", memory_max=100 * MIB, memory_current=80 * MIB)
    group(tmp_path / "a/b", memory_max="max", memory_current=60 * MIB)
    group(tmp_path / "a/b/c", memory_max=90 * MIB, memory_current=10 * MIB)
    assert headroom(tmp_path, membership) == 20 * MIB


def test_version_2_throttling_limit_counts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/app\n")
    group(tmp_path / "app", memory_max=100 * MIB, memory_high=70 * MIB, memory_current=10 * MIB)
    assert headroom(tmp_path, membership) == 60 * MIB


def test_version_1_tightest_ancestor_counts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("9:name=systemd:/x\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n")
    docker = tmp_path / "memory/docker"
    unlimited = 0x7FFFFFFFFFFFF000
    group(tmp_path / "memory", memory_limit_in_bytes=unlimited, memory_usage_in_bytes=500 * MIB)
    group(docker, memory_limit_in_bytes=300 * MIB, memory_usage_in_bytes=290 * MIB)
    # The group's own pages alone would be the wrong number: its children's cache counts too.
    stat = f"inactive_file 1\ntotal_inactive_file {40 * MIB}"
    group(docker / "abc", memory_limit_in_bytes=200 * MIB, memory_usage_in_bytes=235 * MIB, memory_stat=stat)
    assert headroom(tmp_path, membership) == 5 * MIB


def test_container_without_namespace_finds_its_limit_at_the_mount(tmp_path: Path, membership: Path) -> None:
    membership.write_text("4:memory:/docker/abc\n")
    group(tmp_path / "memory", memory_limit_in_bytes=200 * MIB, memory_usage_in_bytes=150 * MIB)
    assert headroom(tmp_path, membership) == 50 * MIB


def test_path_outside_the_namespace_counts_the_mount_only(tmp_path: Path, membership: Path) -> None:
    root = tmp_path / "root"
    membership.write_text("0::/../other\n")
    group(tmp_path / "other", memory_max=1, memory_current=1)
    group(root, memory_max=200 * MIB, memory_current=150 * MIB)
    assert headroom(root, membership) == 50 * MIB


def test_hybrid_mount_is_seen(tmp_path: Path, membership: Path) -> None:
    membership.write_text("1:name=systemd:/x\n0::/app\n")
    group(tmp_path / "unified/app", memory_max=100 * MIB, memory_current=90 * MIB)
    assert headroom(tmp_path, membership) == 10 * MIB


def test_use_beyond_the_limit_is_no_negative_room(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/app\n")
    group(tmp_path / "app", memory_max=100 * MIB, memory_current=120 * MIB)
    assert headroom(tmp_path, membership) == 0


@pytest.mark.parametrize("limit", ["max", None])
def test_no_limit_is_none(tmp_path: Path, membership: Path, limit: str | None) -> None:
    membership.write_text("0::/app\n")
    group(tmp_path / "app", memory_current=120 * MIB)
    if limit is not None:
        group(tmp_path / "app", memory_max=limit)
    assert headroom(tmp_path, membership) is None


def test_unlimited_version_1_is_none(tmp_path: Path, membership: Path) -> None:
    membership.write_text("4:memory:/\n")
    group(tmp_path / "memory", memory_limit_in_bytes=0x7FFFFFFFFFFFF000, memory_usage_in_bytes=5)
    assert headroom(tmp_path, membership) is None


def test_limits_and_use_are_those_of_the_moment(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/app\n")
    group(tmp_path / "app", memory_max="max", memory_current=10 * MIB, memory_stat="anon 5\ninactive_file 0")
    assert headroom(tmp_path, membership) is None
    group(tmp_path / "app", memory_max=100 * MIB)
    assert headroom(tmp_path, membership) == 90 * MIB
    group(tmp_path / "app", memory_current=20 * MIB)
    assert headroom(tmp_path, membership) == 80 * MIB
    group(tmp_path / "app", memory_stat=f"anon 5\ninactive_file {15 * MIB}")
    assert headroom(tmp_path, membership) == 95 * MIB
    group(tmp_path / "app", memory_max=60 * MIB)
    assert headroom(tmp_path, membership) == 55 * MIB


def test_files_are_opened_once_and_again_after_a_move(
    tmp_path: Path, membership: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership.write_text("0::/a\n")
    group(tmp_path / "a", memory_max=100 * MIB, memory_current=10 * MIB)
    group(tmp_path / "b", memory_max=30 * MIB, memory_current=10 * MIB)
    opened: list[str] = []
    really_open = os.open

    def open_and_note(path: str, *rest: int) -> int:
        opened.append(str(path))
        return really_open(path, *rest)

    monkeypatch.setattr(os, "open", open_and_note)
    assert headroom(tmp_path, membership) == 90 * MIB
    assert str(tmp_path / "a/memory.max") in opened
    opened.clear()
    assert headroom(tmp_path, membership) == 90 * MIB
    assert opened == []
    membership.write_text("0::/b\n")
    assert headroom(tmp_path, membership) == 20 * MIB
    assert str(tmp_path / "b/memory.max") in opened


def test_no_file_stays_open_for_a_group_that_was_left(tmp_path: Path, membership: Path) -> None:
    counts = []
    for name in ("a", "b", "c"):
        membership.write_text(f"0::/{name}\n")
        group(tmp_path / name, memory_max=100 * MIB, memory_current=10 * MIB, memory_stat="inactive_file 0")
        assert headroom(tmp_path, membership) == 90 * MIB
        counts.append(psutil.Process().num_fds())
    assert len(set(counts)) == 1


def test_a_group_that_is_gone_bounds_nothing(tmp_path: Path, membership: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    membership.write_text("0::/a/b\n")
    group(tmp_path / "a", memory_max=100 * MIB, memory_current=10 * MIB)
    group(tmp_path / "a/b", memory_max=50 * MIB, memory_current=10 * MIB)
    assert headroom(tmp_path, membership) == 40 * MIB
    really_read = KeptOpen.read

    def read(file: KeptOpen) -> bytes:
        if "/b/" in str(file._path):
            raise OSError(errno.ENODEV, "No such device")  # kernfs, once the group was removed
        return really_read(file)

    monkeypatch.setattr(KeptOpen, "read", read)
    assert headroom(tmp_path, membership) == 90 * MIB


def test_too_many_open_files_do_not_hide_a_limit_for_good(
    tmp_path: Path, membership: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership.write_text("0::/app\n")
    group(tmp_path / "app", memory_max=100 * MIB, memory_current=10 * MIB)

    def refuse(path: str, *rest: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            headroom(tmp_path, membership)
    assert headroom(tmp_path, membership) == 90 * MIB


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="no control groups")
def test_the_real_groups_are_read_the_same_way_twice() -> None:
    first, second = cgroup.memory_headroom_bytes(), cgroup.memory_headroom_bytes()
    assert (first is None) == (second is None)
    if first is not None:
        assert second == pytest.approx(first, rel=0.2)


def test_without_control_groups_nothing_is_known(tmp_path: Path, membership: Path) -> None:
    assert headroom(tmp_path, membership) is None
    assert cgroup.cpu_quota_cores(root=tmp_path, membership=membership) is None


def test_cpu_quota_version_2_tightest_ancestor_counts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/a/b/c\n")
    group(tmp_path / "a", cpu_max="150000 100000")
    group(tmp_path / "a/b", cpu_max="400000 100000")
    group(tmp_path / "a/b/c", cpu_max="max 100000")
    assert cgroup.cpu_quota_cores(root=tmp_path, membership=membership) == 1.5


@pytest.mark.parametrize(("quota_us", "cores"), [(50000, 0.5), (-1, None)])
def test_cpu_quota_version_1(tmp_path: Path, membership: Path, quota_us: int, cores: float | None) -> None:
    membership.write_text("1:cpu,cpuacct:/app\n")
    group(tmp_path / "cpu,cpuacct/app", cpu_cfs_quota_us=quota_us, cpu_cfs_period_us=100000)
    assert cgroup.cpu_quota_cores(root=tmp_path, membership=membership) == cores
