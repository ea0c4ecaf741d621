"""Peak memory of a stretch of code: allocated on the GPU, or resident memory of this process."""

import gc
import re
import sys
from pathlib import Path

import psutil
import torch

MIB = 2**20


class PeakMemory:
    """Watches from the moment it is made.

    On the CPU the operating system's high-water mark counts from the start of the process, so a
    process measures one stretch, its most expensive one.
    """

    def __init__(self, device: str):
        gc.collect()
        self.device = device
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        else:
            self.start = psutil.Process().memory_info().rss

    def over_start_mib(self) -> float:
        """The highest memory so far over what was held at the start, in MiB."""
        if self.device == "cuda":
            return (torch.cuda.max_memory_allocated() - self.start) / MIB
        return (_peak_resident_bytes() - self.start) / MIB


def _peak_resident_bytes() -> int:
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "linux":
        # ru_maxrss, below, also counts the process that this one was started from.
        status = Path("/proc/self/status").read_text()
        if found := re.search(r"VmHWM:\s+(\d+) kB", status):
            return int(found[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
