"""A process of a group that trains together on the CPU, for the scripts of such processes."""

import os
import sys
from datetime import timedelta
from typing import NoReturn

from torch import distributed as dist


def join(file: str, rank: int, processes: int) -> None:
    """Enter the group that meets over this file, which does not exist yet."""
    # a peer that failed is not waited for until gloo's own half hour is over
    how = {"rank": rank, "world_size": processes, "timeout": timedelta(minutes=2)}
    dist.init_process_group("gloo", init_method=f"file://{file}", **how)


def leave() -> NoReturn:
    """End this process as it is, without a destructor.

    A thread of gloo waits for the GIL, to drop the context that torch's backward pass has given it.
    Whoever destroys the group holds the GIL and waits for that thread; and at the interpreter's
    exit, such a thread aborts the process (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
