from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.caps import _used_bytes, kills, own_group, room_bytes
from benchmarks.workloads import WORKLOADS

MIB = 2**20
IN_A_GROUP = """
import json, torch
from benchmarks.caps import Cap
from lightning_batchmem.devices.cgroup import memory_headroom_bytes
Cap("cgroup", 100 * 2**20).close(torch.device("cpu"))
print(json.dumps(memory_headroom_bytes()), flush=True)
held = b"x" * (200 * 2**20)
"""


def test_every_room_on_the_host_is_a_few_hundred_mib() -> None:
    assert all(300 * MIB <= room_bytes(name) <= 700 * MIB for name in WORKLOADS)


def test_no_group_for_another_kind_of_cap() -> None:
    with own_group("rlimit") as group:
        assert group is None
    assert kills(None) == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [("memory.events", "high 2\noom 3\noom_kill 1\n"), ("memory.oom_control", "under_oom 0\noom_kill 1\n")],
)
def test_kills_are_read_in_both_versions(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert kills(tmp_path) == 1


@pytest.mark.parametrize(
    ("use", "statistics"),
    [("memory.current", "inactive_file 30\n"), ("memory.usage_in_bytes", "inactive_file 1\ntotal_inactive_file 30\n")],
)
def test_page_cache_is_no_use_in_both_versions(tmp_path: Path, use: str, statistics: str) -> None:
    (tmp_path / use).write_text("100\n")
    (tmp_path / "memory.stat").write_text(statistics)
    assert _used_bytes(tmp_path) == 70


def test_a_process_in_its_own_group_sees_the_room_and_is_killed_beyond_it() -> None:
    try:
        with own_group("cgroup") as group:
            enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
            command = ["/bin/sh", "-c", enter, str(group), sys.executable, "-P", "-c", IN_A_GROUP]
            variables = {**common.environment(), common.GROUP_VARIABLE: str(group)}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
            assert kills(group) == 1, done.stderr
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    assert group is not None
    assert not group.exists()
    assert done.returncode == -9
    assert json.loads(done.stdout) == pytest.approx(100 * MIB, abs=2 * MIB)  # as this package's finder reads it
