"""A process of a group that trains together, on the CPU or on a GPU each."""

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
from torch import distributed as dist


def join(file: str, rank: int, processes: int, device: str = "cpu") -> None:
    """Enter the group that meets over this file, which does not exist yet."""
    # a peer that failed is not waited for until gloo's own half hour is over
    how = {"rank": rank, "world_size": processes, "timeout": timedelta(minutes=2)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", **how)


def leave() -> NoReturn:
    """End this process as it is, without a destructor.

    A thread of gloo waits for the GIL, to drop the context that torch's backward pass has given it.
    Whoever destroys the group holds the GIL and waits for that thread; and at the interpreter's
    exit, such a thread aborts the process (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
