"""The host memory that a process may still take, of systems made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from liger_patch.patch.host_memory import available_bytes

GIB = 2**30
MACHINE = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {2**25} kB\n"}
AVAILABLE = 32 * GIB - 4 * GIB  # a sixteenth of the whole is left to others


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)


def found(root: Path, *groups: dict[str, str]) -> int | None:
    for files in groups:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return available_bytes(root)


def group(folder: str, limit: str, used: int, files: int, *, version: int = 2) -> dict[str, str]:
    """The files of a control group, in bytes."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    place = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{place}/{names[0]}": f"{limit}\n",
        f"{place}/{names[1]}": f"{used}\n",
        f"{place}/memory.stat": f"anon 7\n{names[2]} {files}\n",
    }


def test_the_machine_alone(tmp_path: Path) -> None:
    assert found(tmp_path, MACHINE) == AVAILABLE


def test_another_system_says_nothing(tmp_path: Path) -> None:
    assert found(tmp_path) is None


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
@pytest.mark.parametrize(("text", "processes"), [("8", 8), ("0", 1), ("", 1), ("all", 1)])
def test_processes_share_it(
    name: str, text: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    assert found(tmp_path, MACHINE) == AVAILABLE // processes


@pytest.mark.parametrize("inside", ["", "job/step"])
def test_a_container_has_less_and_its_cached_files_can_go(inside: str, tmp_path: Path) -> None:
    own = {"proc/self/cgroup": f"0::/{inside}\n"}
    limits = group(inside, str(16 * GIB), 10 * GIB, 3 * GIB)
    assert found(tmp_path, MACHINE, own, limits) == 9 * GIB - GIB


def test_a_limit_of_a_parent(tmp_path: Path) -> None:
    own = {"proc/self/cgroup": "0::/job/step\n"}
    parent = group("job", str(16 * GIB), 2 * GIB, 0)
    child = group("job/step", "max", 2 * GIB, 0)
    assert found(tmp_path, MACHINE, own, parent, child) == 14 * GIB - GIB


def test_a_container_that_does_not_see_its_own_path(tmp_path: Path) -> None:
    own = {"proc/self/cgroup": "0::/docker/1234\n"}
    assert found(tmp_path, MACHINE, own, group("", str(16 * GIB), GIB, 0)) == 15 * GIB - GIB


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    own = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"}
    machine_wide = group("memory", str(2**63 - 4096), GIB, 0, version=1)
    limits = group("memory/job", str(16 * GIB), 4 * GIB, 0, version=1)
    assert found(tmp_path, MACHINE, own, machine_wide, limits) == 12 * GIB - GIB


def test_no_memory_is_left(tmp_path: Path) -> None:
    own = {"proc/self/cgroup": "0::/\n"}
    assert found(tmp_path, MACHINE, own, group("", str(16 * GIB), 16 * GIB, 0)) == 0
