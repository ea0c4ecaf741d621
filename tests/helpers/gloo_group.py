"""Groups of processes that compute together, on the CPU or on a GPU each; single ones; and the
collectives that a process starts, with their kinds and sizes.
"""

import gc
import multiprocessing
import os
import runpy
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

Collective = tuple[str, int, torch.dtype]  # its name, the numbers in its tensors, their dtype
KINDS = ("gather", "scatter", "reduce", "broadcast", "alltoall")
HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
SECONDS = 600  # of one run, beside others
# Imports are most of what a process on the CPU costs, so all are forked from one that has done
# these. CUDA does not outlive a fork.
_processes = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_processes.set_forkserver_preload(["torch", "transformers.modeling_utils", "transformers.trainer"])


# huggingface_hub and OpenMP read theirs when they are imported
COMMON = {
    "PYTHONPATH": os.pathsep.join([str(HELPERS), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def run(script: str, *arguments: str, processes: int = 2) -> None:
    """Run a script of tests/helpers with these arguments in each of the processes."""
    group = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # accelerate wants one; the group has met already
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    _run_each(HELPERS / script, arguments, ROOT, [group | rank for rank in ranks])


def run_cases(
    script: str, folder: Path, *cases: str, device: str = "cpu", processes: int = 2
) -> None:
    """Run a script that ends in ``each_case``."""
    run(script, str(folder), device, *cases, processes=processes)


def each_case(
    check: Callable[[Any, Path, str], object], parser: ArgumentParser | None = None
) -> NoReturn:
    """Be a process of ``run_cases``: enter the group, and check each case, which the parser reads
    where there is one, in the folder, on the device.
    """
    folder, device, *cases = sys.argv[1:]
    join(f"{folder}/group", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)
    for case in cases:
        print(f"case {case}", flush=True)
        check(parser.parse_args(shlex.split(case)) if parser else case, Path(folder), device)
    leave()


def run_alone(script: Path, *arguments: str, folder: Path) -> str:
    """Run a script in a process without a GPU that works in this folder, and return what it
    prints.
    """
    (printed,) = _run_each(script, arguments, folder, [{"CUDA_VISIBLE_DEVICES": ""}])
    return printed


def _run_each(
    script: Path, arguments: tuple[str, ...], folder: Path, variables: list[dict[str, str]]
) -> list[str]:
    """Run a script in one process for each of these environments; return what they print."""
    with TemporaryDirectory() as place, ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, COMMON))
        started, outputs = [], [Path(place) / str(i) for i in range(len(variables))]
        for own, output in zip(variables, outputs, strict=True):
            given = (str(script), arguments, {**os.environ, **own}, str(folder), str(output))
            started.append(_processes.Process(target=_run_script, args=given))
            started[-1].start()
            stack.callback(started[-1].kill)
        for process in started:
            process.join(SECONDS)
            if process.exitcode != 0:  # maybe as another process had failed
                raise AssertionError("\n\n".join(map(_text, outputs)))
        return [_text(output) for output in outputs]


def _text(output: Path) -> str:
    return output.read_text(encoding="utf-8") if output.exists() else ""


def _run_script(
    script: str, arguments: tuple[str, ...], variables: dict, folder: str, output: str
) -> None:
    """Be a process that was started in this folder with these environment variables and prints to
    a file.
    """
    gc.freeze()  # else each collection goes over all that the imports have made
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    sys.argv[1:] = arguments
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def join(file: str, rank: int, processes: int, device: str = "cpu") -> None:
    """Enter the group that meets over this file, which does not exist yet."""
    # a peer that failed is not waited for until gloo's own half hour is over
    how = {"rank": rank, "world_size": processes, "timeout": timedelta(minutes=2)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", **how)
    # layers run as on a GPU; imported here, as a test of imports starts in this module
    import_module("liger_patch.layers.checks").DEVICES = (device, "meta")


def compile_no_collectives() -> None:
    """Leave out DeepSpeed's collectives in shared memory, which gloo does without: DeepSpeed would
    compile them, for a minute, or wait for another process that was killed while it did.
    """
    # the attribute deepspeed.comm.torch is torch itself
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def leave() -> NoReturn:
    """End this process as it is, without a destructor.

    A thread of gloo waits for the GIL, to drop the context that torch's backward pass has given it.
    Whoever destroys the group holds the GIL and waits for that thread; and at the interpreter's
    exit, such a thread aborts the process (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """The collectives of all process groups within this context, in their order."""
    recorded: list[Collective] = []
    group: Any = dist.ProcessGroup
    own = {
        name: function
        for name, function in vars(group).items()
        if any(kind in name for kind in KINDS) and not name.startswith("__")
    }
    try:
        for name in own:
            setattr(group, name, _recording(getattr(group, name), name, recorded))
        yield recorded
    finally:
        for name, function in own.items():
            setattr(group, name, function)


def _recording(collective: Callable[..., Any], name: str, recorded: list) -> Callable[..., Any]:
    def start(*arguments: Any, **options: Any) -> Any:
        tensors = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
        recorded.append((name, sum(each.numel() for each in tensors), tensors[0].dtype))
        return collective(*arguments, **options)

    return start
