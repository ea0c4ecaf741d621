"""Measure one contender in each of the processes that ``distributed_step.py`` starts.

Every rank makes the same calls in the same order, so that their collectives meet.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_patch import apply_patch, linear_cross_entropy, patch_status

from .measure import MIB, Failure, attempt, measure, release_memory
from .models import Model

Step = Callable[[], Tensor]  # forward and backward -> the loss of this rank
PATCHES: dict[str, Callable[[Any], object]] = {
    "eager": lambda model: model,
    "liger_patch, layers=False": lambda model: apply_patch(model, layers=False),
    "liger_patch": apply_patch,
}
CONTENDERS = tuple(PATCHES)
TENSOR_PARALLEL = "tensor parallel"
ONE_SHARD = "liger_patch, one shard alone"  # without communication
SMALL_CHUNKS = "liger_patch, chunk_mib=192"
HEADS = ("loss_parallel", "liger_patch", SMALL_CHUNKS, ONE_SHARD)


@dataclass(frozen=True)
class Request:
    """A contender of a model under an engine."""

    model: Model
    engine: str
    name: str
    rounds: int
    device: str


@dataclass(frozen=True)
class Head:
    """The shape of a head, its vocabulary over all ranks."""

    name: str
    tokens: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class HeadRequest:
    """A contender of a head."""

    head: Head
    name: str
    rounds: int
    device: str


class Collectives(TorchDispatchMode):
    """Count collectives by kind and size within this context.

    Attributes:
        found: (kind, MiB of the tensors that it is given) to the number of calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, float]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = func.name().partition("::")[2].partition(".")[0].strip("_")
        counts = func.namespace in ("c10d", "_c10d_functional")
        if counts and kind.partition("_")[0] not in ("wait", "wrap"):
            size = sum(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))
            self.found[kind, round(size / MIB, 3)] += 1
        return func(*args, **(kwargs or {}))

    def rows(self) -> list[dict]:
        """Return the counts, the largest first."""
        ordered = sorted(self.found.items(), key=lambda each: -each[0][1])
        return [{"kind": k, "mib": mib, "calls": calls} for (k, mib), calls in ordered]


def run_rank(
    rank: int, function: Callable[..., object], request: Any, ranks: int, folder: str
) -> None:
    """Call the function in one of the processes. If it fails, write why, and end the process at
    once: the others may wait for it in a collective, and are ended then.
    """
    done = attempt(partial(function, rank, request, ranks, folder))
    if isinstance(done, Failure):
        text = json.dumps(asdict(done))
        (Path(folder) / f"failure{rank}.json").write_text(text, encoding="utf-8")
        os._exit(1)


def measure_step(rank: int, request: Request, ranks: int, folder: str) -> Failure:
    """Measure one contender; the first rank writes the row."""
    device = join(rank, ranks, folder, request.device)
    model = _model(request, device, folder)
    step = ENGINES[request.engine](model, request, device)
    with Collectives() as counted:
        loss = step().detach().float()
    distributed.all_reduce(loss)
    row = {"loss": loss.item() / ranks, "collectives": counted.rows()}
    if request.name != "eager":
        status = patch_status(model)
        row |= {"fused": status.fused, "reason": status.reason}
    return _written(row, _measured(step, request.rounds, device), rank, folder)


def measure_head(rank: int, request: HeadRequest, ranks: int, folder: str) -> Failure:
    """Measure one contender of a head; the first rank writes the row."""
    device = join(rank, ranks, folder, request.device)
    head, generator = request.head, torch.Generator(device).manual_seed(0)
    how = {"device": device, "generator": generator}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(head.tokens, head.hidden_size, **how).to(dtype).requires_grad_()
    labels = torch.randint(head.vocab_size, (head.tokens,), **how)
    largest = -(-head.vocab_size // ranks)
    start = min(rank * largest, head.vocab_size)
    rows = min(largest, head.vocab_size - start)
    weight = torch.randn(rows, head.hidden_size, **how).to(dtype) / head.hidden_size**0.5
    weight.requires_grad_()
    loss_of = _head_loss(request.name, x, weight, labels, start, head.vocab_size, ranks)

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        x.grad = weight.grad = None
        return loss

    with Collectives() as counted:
        loss = step().detach()
    row = {} if request.name == ONE_SHARD else {"loss": loss.item()}
    row["collectives"] = counted.rows()
    return _written(row, _measured(step, request.rounds, device), rank, folder)


def _head_loss(
    name: str, x: Tensor, weight: Tensor, labels: Tensor, start: int, vocab_size: int, ranks: int
) -> Step:
    if name == ONE_SHARD:
        own = labels % len(weight)
        return lambda: linear_cross_entropy(x, weight, own)
    if name in ("liger_patch", SMALL_CHUNKS):
        from liger_patch.kernels.head.inputs import VocabShard

        shard = VocabShard(distributed.group.WORLD, vocab_size)
        how = {"vocab_shard": shard, "chunk_mib": 192 if name == SMALL_CHUNKS else None}
        return lambda: linear_cross_entropy(x, weight, labels, **how)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh(x.device.type, (ranks,))
    shape = vocab_size, x.shape[1]

    def loss_of() -> Tensor:
        sharded = DTensor.from_local(weight, mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        logits = nn.functional.linear(whole, sharded)
        targets = DTensor.from_local(labels, mesh, [Replicate()], run_check=False)
        return nn.functional.cross_entropy(logits.float(), targets)

    class Parallel:
        """The backward pass runs within ``loss_parallel`` too."""

        def __init__(self, loss: Any) -> None:
            self.loss = loss

        def backward(self) -> None:
            with loss_parallel():
                self.loss.backward()

        def detach(self) -> Tensor:
            return self.loss.detach().full_tensor()

    def step() -> Any:
        with loss_parallel():
            return Parallel(loss_of())

    return step


def leave() -> NoReturn:
    """End this process of a group as it is, when all have come here.

    A thread of gloo may wait for the lock that whoever destroys the group holds (torch 2.13).
    """
    distributed.barrier()
    os._exit(0)


def join(
    rank: int, ranks: int, folder: str, device: str, *, local_rank: int | None = None
) -> torch.device:
    """Join the group of all processes; ``local_rank``: of the GPU, by default ``rank``."""
    local_rank = rank if local_rank is None else local_rank
    local = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in local.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # which libraries ask for
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        cores = sorted(os.sched_getaffinity(0))  # each rank has a part: times vary less
        os.sched_setaffinity(
            0, cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
        )
    else:
        torch.set_num_threads(1)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=10),
    )
    return torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")


def _measured(step: Step, rounds: int, device: torch.device) -> dict | Failure:
    """Return time, memory and the weights' share of the slowest and the fullest rank."""
    held = torch.cuda.memory_allocated() / MIB if device.type == "cuda" else 0.0
    (found,) = measure({"step": step}, rounds=rounds, device=device).values()
    if isinstance(found, Failure):
        return found
    everywhere: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, asdict(found) | {"held_mib": held})
    return {name: max(each[name] for each in everywhere) for name in everywhere[0]}


def _written(row: dict, found: dict | Failure, rank: int, folder: str) -> Failure:
    """Write what the first rank has found and end the process, or return why there is nothing."""
    if isinstance(found, Failure):
        return found
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row | found), encoding="utf-8")
    leave()


def _model(request: Request, device: torch.device, folder: str) -> Any:
    """Return the model, patched as the contender's name says."""
    is_distributed = request.engine == TENSOR_PARALLEL
    model = _distributed(request, folder) if is_distributed else request.model.build(device)
    PATCHES[request.name](model)
    return model


def _distributed(request: Request, folder: str) -> Any:
    """Return the model as ``from_pretrained`` distributes it by Transformers' own plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    place = Path(folder) / "model"
    if distributed.get_rank() == 0:
        request.model.build(request.device).save_pretrained(place)
        release_memory()
    distributed.barrier()
    config = DistributedConfig(tp_size=distributed.get_world_size())
    model: Any = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.bfloat16, distributed_config=config
    )
    return model.train()


def _batch(request: Request, device: torch.device, *, shared: bool = False) -> dict[str, Tensor]:
    batch = request.model.batch(device)
    if not shared:  # tokens in another order on each rank
        batch = {name: value.roll(distributed.get_rank(), 1) for name, value in batch.items()}
    return batch


def _step_of(module: nn.Module, batch: dict[str, Tensor]) -> Step:
    def step() -> Tensor:
        loss = module(**batch).loss
        loss.backward()
        module.zero_grad()
        return loss

    return step


def _ddp(model: Any, request: Request, device: torch.device) -> Step:
    module = nn.parallel.DistributedDataParallel(model)
    return _step_of(module, _batch(request, device))


def _fsdp2(model: Any, request: Request, device: torch.device) -> Step:
    """As ``Accelerator.prepare`` sets it up: the unit that has the head keeps its weights from the
    forward pass to the backward pass.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    if device.type == "cpu":  # which accelerate does not shard over
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    prepared, _ = accelerator.prepare(model, optimizer)
    return _step_of(prepared, _batch(request, device))


def compile_no_collectives() -> None:
    """Leave out DeepSpeed's collectives in shared memory, which gloo does without: no compiler."""
    # the attribute deepspeed.comm.torch is torch itself
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def _zero3(model: Any, request: Request, device: torch.device, *, keeps_head: bool = False) -> Step:
    """``keeps_head``: as DeepSpeed keeps small parameters, to compare."""
    import deepspeed

    if device.type == "cpu":
        compile_no_collectives()
    config = {
        "train_micro_batch_size_per_gpu": request.model.sequences,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.0),
        config=config,
        dist_init_required=False,
    )
    if keeps_head:
        weight = model.get_output_embeddings().weight
        weight.ds_persist = True
        engine.optimizer.persistent_parameters.append(weight)
        weight.all_gather()
    batch = _batch(request, device)

    def step() -> Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _tensor_parallel(model: Any, request: Request, device: torch.device) -> Step:
    return _step_of(model, _batch(request, device, shared=True))


ENGINES: dict[str, Callable[[Any, Request, torch.device], Step]] = {
    "DDP": _ddp,
    "FSDP2": _fsdp2,
    "ZeRO-3": _zero3,
    "ZeRO-3, head kept": partial(_zero3, keeps_head=True),
    TENSOR_PARALLEL: _tensor_parallel,
}
