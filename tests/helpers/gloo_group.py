"""Groups of processes that compute together, on the CPU or on a GPU each."""

import os
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

import torch
from torch import distributed as dist

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]


def run(script: str, *arguments: str, processes: int = 2) -> None:
    """Run a script of tests/helpers with these arguments in each of the processes."""
    folders = [str(HELPERS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(folders),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # accelerate wants one; the group has met already
    }
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) for _ in range(processes)]
        started = [
            subprocess.Popen(
                [sys.executable, str(HELPERS / script), *arguments],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]
        for process in started:
            stack.callback(process.kill)
        codes = [process.wait(timeout=300) for process in started]
        for code, file in zip(codes, files, strict=True):
            file.seek(0)
            assert code == 0, file.read()


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
