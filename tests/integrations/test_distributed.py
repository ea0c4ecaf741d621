"""The patch under the engines of several processes: each step is eager's, and fused where it can
be, as the table in docs/distributed.md says (UPDATE_README=1 writes it). The engines are set up by
their libraries' own functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from documents import ROOT, check_section, table_of
from gloo_group import run_cases

from liger_patch.layers import checks

COLUMNS = ("LoRA", "QLoRA", "logits readable", "evaluation")
FSDP_TP = "Transformers, `DistributedConfig(fsdp_size=..., tp_size=...)`"
UNSHARD, ON_EVERY_RANK = "after `unshard()`", "on every rank"


class Row(NamedTuple):
    """An engine in the table of docs/distributed.md.

    Attributes:
        engine: of ENGINES, or of sequence_trainer.
        title: in the table.
        lora: whether adapters are tested, on all layers and the head.
        qlora: whether they are tested on layers in 4 bits.
        logits: "yes", UNSHARD, ON_EVERY_RANK, or "" for not tested.
        evaluates: whether evaluation is tested.
    """

    engine: str
    title: str
    lora: bool = True
    qlora: bool = False
    logits: str = "yes"
    evaluates: bool = True

    def cases(self) -> list[str]:
        """Return the arguments of the helper's processes."""
        first = self.engine
        if self.logits == UNSHARD:
            first += " --late evaluation"
        elif self.engine not in SEQUENCES:
            first += " --evaluate --metric"
        alone = "" if self.engine in SEQUENCES else " --alone"  # which do so without asking
        found = [first, f"{self.engine} --layers{' --lora' * self.lora}{alone}"]
        return found + [f"{self.engine} --layers --quantized --alone"] * self.qlora

    def cells(self) -> Iterator[str]:
        """Yield what the table says, as the cases have shown."""
        yield "yes" if self.lora else ""
        yield "yes" if self.qlora else ""
        yield self.logits
        yield "fused" if self.evaluates else ""


SEQUENCES = ("context", "ulysses")
ROWS = (
    Row("ddp", "DistributedDataParallel", qlora=True),
    Row("accelerate_fsdp2", "accelerate, FSDP2", qlora=True),
    Row("transformers_fsdp", "Transformers, `DistributedConfig(fsdp_size=...)`", lora=False),
    Row("fsdp2", "`fully_shard`, the head with the root"),
    Row("fsdp2_resharded", "… `reshard_after_forward=True` at the root", logits=UNSHARD),
    Row("fsdp2_head", "… of the head alone, resharded"),
    Row("fsdp2_offload", "… with CPU offload"),
    Row("hsdp_replicated_head", "… on a mesh of two dimensions (HSDP)"),
    Row("fsdp1", "FSDP1 (`FullyShardedDataParallel`), the head with the root"),
    Row("fsdp1_head", "… the head a unit of its own"),
    Row("zero1", "DeepSpeed ZeRO-1"),
    Row("zero2", "DeepSpeed ZeRO-2", qlora=True),
    Row("zero3", "DeepSpeed ZeRO-3", qlora=True),
    Row("tensor_parallel", "Tensor parallel", lora=False, logits=ON_EVERY_RANK),
    Row("transformers_fsdp_tp", FSDP_TP, lora=False, logits=ON_EVERY_RANK),
    Row("context", "Context parallel (accelerate, Trainer)", logits=""),
    Row("ulysses", "Ulysses (DeepSpeed, Trainer)", logits="", evaluates=False),
    Row("device_map", "`device_map` over several GPUs", lora=False),
)


def cases_of(*engines: str) -> list[str]:
    """Return the cases of the table's rows for these engines."""
    return [case for row in ROWS if row.engine in engines for case in row.cases()]


def table() -> str:
    """Return the table: a row an engine, a column a feature."""
    return table_of([["engine", *COLUMNS], *([row.title, *row.cells()] for row in ROWS)])


def test_the_document_has_the_table_of_the_cases() -> None:
    check_section(ROOT / "docs" / "distributed.md", "engines", table())


STEP, TENSOR_PARALLEL = "distributed_step.py", "tensor_parallel_step.py"
SEQUENCE, LAYERS, DEEPSPEED = "sequence_trainer.py", "layer_steps.py", "deepspeed_trainer.py"
DEEPSPEEDS = ("zero1", "zero2", "zero3")  # replaces torch's linear for the rest of the process
GRID = ("transformers_fsdp_tp",)  # of two times two processes
OTHERS = [r.engine for r in ROWS if r.engine not in (*SEQUENCES, *DEEPSPEEDS, *GRID)]
DOCUMENTED = ("accelerate>=1.15", "bitsandbytes", "deepspeed", "peft")
slow, gpu = pytest.mark.slow, pytest.mark.gpu


class Run(NamedTuple):
    """Cases that share a group of processes.

    Attributes:
        script: of tests/helpers, which says what the cases mean and what holds of them.
        needs: packages, with the oldest version, and names of SKIPS.
        mark: slow, or gpu for a run on two GPUs.
        more: cases that are slow.
    """

    script: str
    cases: tuple[str, ...]
    needs: tuple[str, ...] = ()
    mark: Any = None
    processes: int = 2
    more: tuple[str, ...] = ()


RUNS = {
    "DDP": Run(
        STEP,
        ("ddp_static", "ddp_unused --layers", "ddp --no-sync --alone"),
        more=("ddp_static --layers",),
    ),
    # where the whole model is a unit that frees the head, logits can be read once it is gathered
    # again
    "FSDP2": Run(
        STEP,
        (
            "fsdp2 --layers",
            "fsdp2_resharded --late evaluation",
            "fsdp2_resharded --layers --late backward",
            "tensor_parallel --layers",
        ),
        ("fully_shard",),
    ),
    # the weight stays from the head's call to its backward pass
    "FSDP2 units that free the head": Run(
        STEP,
        (
            "fsdp2_head --no-sync --alone --late backward",
            "fsdp2_norm_head --layers --labels uneven",
            "fsdp2_tied_head --tied --evaluate --labels none --metric",
            "fsdp2_head --lora --evaluate",
        ),
        ("fully_shard", "peft"),
        more=(
            "fsdp2_mixed",
            "fsdp2_head --leftover",
            "fsdp2_offload --layers",
            "hsdp_head --layers",
            "fsdp2_head --distrusted",
            "fsdp2_head --model t5gemma --evaluate --metric",  # lm_head is around the head
        ),
    ),
    "distillation": Run(
        STEP,
        (
            "fsdp2_head --distil --layers --evaluate",
            'tensor_parallel --distil --fallback "the vocabulary is distributed over ranks"',
        ),
        ("fully_shard",),
        more=(
            "ddp --distil",
            'ddp_unused --distil --fallback "another autograd function has returned them"',
            "fsdp2 --distil",
            "fsdp1_head --distil",
        ),
    ),
    "FSDP2, compiled": Run(
        STEP, ('fsdp2_head --compiled --fallback "torch.compile traces"',), ("fully_shard",), slow
    ),
    # a copy of the weight stays where the head is a unit
    "FSDP1": Run(
        STEP,
        ("fsdp1_head --layers --lora --evaluate --labels none --metric",),
        ("peft",),
        more=(
            "fsdp1_head --no-sync --leftover --late evaluation",
            "fsdp1 --layers --no-sync --alone",
            "fsdp1_lm_head --model t5gemma --evaluate",  # lm_head is around the head
        ),
    ),
    "accelerate's FSDP2": Run(
        STEP,
        ("accelerate_fsdp2 --tied --no-sync --alone", "accelerate_fsdp2_linear --lora --layers"),
        ("fully_shard", "accelerate", "a unit of the last norm", "peft"),
        more=(
            "accelerate_fsdp2_mixed --layers",
            "accelerate_fsdp2 --labels none",
            "accelerate_fsdp2_linear --layers --evaluate",
        ),
    ),
    "sharded checkpoints": Run(
        STEP,
        ("fsdp2_head --checkpoint",),
        ("fully_shard", "accelerate>=1.15"),
        more=("hsdp_replicated_head --checkpoint", "accelerate_fsdp2 --checkpoint"),
    ),
    "Transformers' own FSDP2": Run(
        STEP, ("transformers_fsdp --layers",), ("fully_shard", "DistributedConfig")
    ),
    "ZeRO": Run(
        STEP,
        (
            "zero1 --late step",
            "zero3 --lora --evaluate --late step",
            "zero3 --tied --layers --labels uneven --alone",
            "zero3 --model two_losses",
        ),
        ("deepspeed", "peft"),
        more=(
            "zero3_plain --layers --late backward",
            """zero3 --distil --fallback "another autograd function has returned them\"""",
            "zero3 --distrusted",
            "zero3 --model two_losses --lora --evaluate",
            "zero3 --model two_losses --distrusted",
            "zero3_regathered --model two_losses",
            "zero3_offload --model two_losses --layers",
            "zero3 --layers --labels none --metric",
            "zero3_plain --tied --evaluate --metric",
            "zero3_plain --lora --layers --labels none",
        ),
    ),
    "Trainer, ZeRO-3": Run(
        DEEPSPEED,
        ("transformers 3",),
        ("deepspeed", "trl"),
        more=("transformers 1", "transformers 2", "trl 3"),
    ),
    # of both kinds of checkpoints, with and without adapters
    "feed-forward layers in slices": Run(
        LAYERS,
        ("sliced ddp",),
        ("hooks at the top", "peft"),
        more=("sliced fsdp1", "sliced ddp_static"),
    ),
    "feed-forward layers in slices, FSDP2": Run(LAYERS, ("sliced fsdp2",), ("fully_shard", "peft")),
    "a base in FP8": Run(LAYERS, ("fp8 fsdp2",), ("fully_shard", "peft"), more=("fp8 ddp",)),
    "plans of torch": Run(
        TENSOR_PARALLEL,
        ("gathered --layers", "sharded --model gemma2 --layers", "sequence"),
        more=("gathered --model gemma2 --tied", "sharded", "sharded --model cohere --tied"),
    ),
    "plans of Transformers": Run(
        TENSOR_PARALLEL,
        ("transformers --layers --checkpoints", "transformers --packed --layers"),
        more=("transformers --tied", "transformers --model gemma2 --layers"),
    ),
    # their layers have hooks of PEFT and Transformers, and run their own code
    "adapters on shards": Run(
        TENSOR_PARALLEL, ("transformers --lora --layers",), ("peft>=0.21", "transformers>=5.17")
    ),
    "shards, compiled": Run(
        TENSOR_PARALLEL,
        (
            "transformers --compiled --layers --fallback "
            '"torch.compile traces a head whose weight is a DTensor"',
        ),
        ("torch>=2.11",),  # older ones trace no such model
        slow,
    ),
    "three ranks with fewer rows on the last": Run(TENSOR_PARALLEL, ("head_alone",), processes=3),
    # also where a process has no label
    "split sequences": Run(SEQUENCE, tuple(cases_of(*SEQUENCES)), DOCUMENTED),
    "split sequences, bf16": Run(SEQUENCE, ("context --layers --bf16",), DOCUMENTED, slow),
    # what the table in docs/distributed.md says
    "documented engines": Run(STEP, tuple(cases_of(*OTHERS[:6])), DOCUMENTED, slow),
    "documented engines, others": Run(STEP, tuple(cases_of(*OTHERS[6:])), DOCUMENTED, slow),
    "documented ZeRO": Run(STEP, tuple(cases_of(*DEEPSPEEDS)), DOCUMENTED, slow),
    "documented grid": Run(
        STEP, tuple(cases_of(*GRID)), (*DOCUMENTED, "DistributedConfig"), slow, processes=4
    ),
    "engines on GPUs": Run(
        STEP,
        (
            "ddp_static",
            "ddp_unused --layers",
            "accelerate_fsdp2 --layers",
            "accelerate_fsdp2 --tied",
            "fsdp2_resharded --late backward",
            "fsdp1_head --layers",
            "tensor_parallel --layers",
        ),
        mark=gpu,
    ),
    "QLoRA on GPUs": Run(
        STEP,
        tuple(f"{e} --quantized --layers --alone" for e in ("ddp", "accelerate_fsdp2", "zero3")),
        ("bitsandbytes",),
        gpu,
    ),
    "shards on GPUs": Run(
        TENSOR_PARALLEL,
        # Transformers 5.17 has no shards of two sizes
        ("gathered --layers", "sharded --model gemma2", "transformers --even --layers"),
        mark=gpu,
    ),
    # with PyTorch's ring attention, which has kernels for GPUs alone, and stays in its process
    "ring attention on GPUs": Run(SEQUENCE, ("context --layers --bf16",), DOCUMENTED, gpu),
    "Ulysses on GPUs": Run(SEQUENCE, ("ulysses --layers",), DOCUMENTED, gpu),
}


def has(module: str, name: str) -> bool:
    return hasattr(pytest.importorskip(module), name)


SKIPS = {  # which of this machine's versions have it
    "fully_shard": lambda: not torch.__version__.startswith("2.6"),  # needs an accelerator there
    "hooks at the top": lambda: checks.TOP_HOOKS is not None,  # torch 2.6 does not tell them
    "a unit of the last norm": lambda: has("accelerate.utils.fsdp_utils", "_find_final_norm"),
    "DistributedConfig": lambda: has("transformers.distributed", "DistributedConfig"),
}


def runs() -> Iterator[Any]:
    for name, each in RUNS.items():
        yield pytest.param(each, id=name, marks=[each.mark] if each.mark else [])
        if each.more:
            yield pytest.param(each._replace(cases=each.more), id=f"{name}, more", marks=slow)


@pytest.mark.parametrize("each", [*runs()])
def test_steps_are_eagers(each: Run, tmp_path: Path) -> None:
    for need in each.needs:
        package, _, version = need.partition(">=")
        if need not in SKIPS:
            pytest.importorskip(package, minversion=version or None)
        elif not SKIPS[need]():
            pytest.skip(f"no {need} here")
    if each.mark is gpu and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    device = "cuda" if each.mark is gpu else "cpu"
    run_cases(each.script, tmp_path, *each.cases, device=device, processes=each.processes)
