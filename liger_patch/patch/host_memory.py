"""How much host memory this process may still take, as Linux reports it.

Sources: proc_meminfo(5) for ``MemAvailable``; the kernel's documents of control groups, v1 and v2,
for the limits of a container or a batch job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

RESERVED = 16  # one part in so many is left free, for data, state_dicts and other processes
# by version of control groups: the files of limit and use; the entry of cached files in memory.stat
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take, None on systems that do not report it.

    This is the least of what the machine and each control group above this process have left,
    divided by the number of processes that one launcher has started here (LOCAL_WORLD_SIZE,
    DeepSpeed: LOCAL_SIZE).
    """
    left = [left - whole // RESERVED for whole, left in (*_machine(root), *_groups(root))]
    return max(0, min(left)) // _processes() if left else None


def _processes() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    return max(1, int(text)) if text.isdecimal() else 1


def _machine(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the bytes of the machine, and those that are left."""
    kib = _numbers(root / "proc/meminfo")
    if "MemTotal" in kib and "MemAvailable" in kib:
        yield kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group, and what is left of it: cached files count as free."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, use, cached = _NAMES[1 if controllers else 2]
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        group = top / path.strip("/")  # in a container, some of its parents may not be there
        for folder in (group, *group.parents):
            whole, used = (_text(folder / name).strip() for name in (limit, use))
            if whole.isdecimal() and used.isdecimal():  # else "max", or no file
                files = _numbers(folder / "memory.stat").get(cached, 0)
                yield int(whole), int(whole) - int(used) + files
            if folder == top:
                break


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name and a number, and perhaps a unit."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # another system, or a file that others must not read
        return ""
