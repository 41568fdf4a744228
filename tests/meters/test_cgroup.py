from __future__ import annotations

from pathlib import Path

import pytest

from lightning_batchmem.meters import cgroup

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
