"""The cases that test_distributed runs for each engine, and the table of docs/distributed.md that
they say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from documents import table_of

COLUMNS = ("LoRA", "QLoRA", "logits readable", "evaluation")
FSDP_TP = "Transformers, `DistributedConfig(fsdp_size=..., tp_size=...)`"
UNSHARD, ON_EVERY_RANK = "after `unshard()`", "on every rank"


class Row(NamedTuple):
    """An engine in the table.

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
