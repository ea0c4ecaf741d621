"""Trainer on sequences that are split over the processes, for test_distributed. Run once for each
process, with one argument for each case ("context --layers").

Exits with an error unless a patched model is trained and evaluated as an unpatched one is (in one
process on whole sequences; under Ulysses, by the same engine), fused, and without real logits.

- context: accelerate's ``ParallelismConfig(cp_size=...)`` with FSDP2. PyTorch's ring attention has
  kernels for GPUs alone: on CPUs, an attention over the gathered keys takes its place. All else,
  the split of the batch among it, is PyTorch's, accelerate's and Transformers' own.
- ulysses: ``ParallelismConfig(sp_size=...)`` with DeepSpeed's UlyssesSPAttentionHF and ZeRO-2.

With --bf16 (ring attention has no kernel for grouped queries in float32), weights are no further
than twice as far from those of float32 as an unpatched model's by the same engine, by norm.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from distributed_step import count_logits
from engines import shard_on_cpus, whole
from gloo_group import compile_no_collectives, each_case
from lora_models import adapted
from tiny_models import LLAMA, tiny_batch, tiny_model
from torch import Tensor
from torch import distributed as dist
from trainers import QUIET
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_patch import apply_patch, patch_status

ATTENTION = ALL_ATTENTION_FUNCTIONS["sdpa"]  # which engines replace
LENGTH, SEQUENCES, STEPS = 16, 4, 2
DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",  # DeepSpeed's default is 1
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def check(arguments: argparse.Namespace, folder: Path, device: str) -> None:
    ulysses = arguments.engine == "ulysses"
    how = {"folder": folder, "device": device}
    trained, of_eager = {}, 0.0
    truth, evaluation = train_alone(arguments, device)
    if ulysses or arguments.bf16:  # Trainer and DeepSpeed scale gradients in a way of their own
        plain = make_model(arguments)
        plain.loss_function = plain_loss
        trainer = make_trainer(plain, arguments, **how)
        trainer.train()
        trained = weights_of(plain)
        if not ulysses:  # DeepSpeed does not split sequences in evaluation
            of_eager = abs(trainer.evaluate()["eval_loss"] - evaluation)
    model = make_model(arguments)
    first = weights_of(model)
    apply_patch(model, layers=arguments.layers)
    with count_logits() as computed:
        trainer = make_trainer(model, arguments, **how)
        trainer.train()
        found = weights_of(model)  # an evaluation leaves some unsharded, in bf16
        if not ulysses:
            eps = torch.finfo(torch.bfloat16).eps if arguments.bf16 else 1e-5
            off = abs(trainer.evaluate()["eval_loss"] - evaluation)
            assert off <= 2 * of_eager + eps * evaluation, f"{off:.3g}, eager {of_eager:.3g}"
    status = patch_status(model)
    assert status.fused, status.reason
    assert not computed, f"real logits were computed {len(computed)} times"
    if arguments.bf16:
        check_steps(first, truth, trained, found)
    else:
        for name, value in (trained or truth).items():
            torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")


def check_steps(
    first: dict[str, Tensor],
    truth: dict[str, Tensor],
    eager: dict[str, Tensor],
    ours: dict[str, Tensor],
) -> None:
    """Weights of float32, of the engine without a patch and with it."""
    eps = torch.finfo(torch.bfloat16).eps
    for name, value in truth.items():
        off, of_eager = ((each[name].float() - value).norm().item() for each in (ours, eager))
        allowed = 2 * of_eager + eps * (value - first[name]).norm().item()
        assert off <= allowed, f"{name}: off by {off:.3g}, eager by {of_eager:.3g}"


def options(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    size = dist.get_world_size()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = ATTENTION
    AcceleratorState._reset_state(reset_partial_state=True)
    if arguments.engine == "context":
        if device == "cpu":
            shard_on_cpus()
            ALL_ATTENTION_FUNCTIONS["sdpa"] = gathered_attention
        plugin = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        how = {"fsdp": True, "fsdp_config": plugin, "bf16": arguments.bf16}
        return {"parallelism_config": ParallelismConfig(cp_size=size), **how}
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp._release_sequence_parallel_groups()  # of the last case
    compile_no_collectives()
    backend = "gloo" if device == "cpu" else "nccl"
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    config = ParallelismConfig(sp_size=size, sp_backend="deepspeed", sp_handler=handler)
    return {"parallelism_config": config, "deepspeed": DEEPSPEED}


def make_model(arguments: argparse.Namespace) -> Any:
    model = tiny_model(LLAMA)
    return adapted(base=model) if arguments.lora else model


def samples(model: Any) -> list[dict[str, Tensor]]:
    """Sequences of one length. Some processes get no label of the first and of the last."""
    found = []
    for seed in range(SEQUENCES):
        batch = tiny_batch(model, batch=1, length=LENGTH, seed=seed)
        labels = batch["labels"][0].clone()
        if seed in (0, SEQUENCES - 1):
            labels[: LENGTH // 4] = -100
            labels[LENGTH // 2 + 1 :] = -100
        ids = batch["input_ids"][0]
        found.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH)})
    return found


def make_trainer(
    model: Any, arguments: argparse.Namespace, *, folder: Path, device: str
) -> Trainer:
    data: Any = samples(model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=1e9,
            optim="sgd",
            prediction_loss_only=True,
            **QUIET | {"use_cpu": device == "cpu"} | options(arguments, device),
        ),
        train_dataset=data,
        eval_dataset=data,
    )
    order: Any = torch.utils.data.SequentialSampler(data)
    trainer._get_train_sampler = lambda *_: order
    return trainer


def train_alone(arguments: argparse.Namespace, device: str) -> tuple[dict[str, Tensor], float]:
    """Weights of an unpatched model after the same steps on whole sequences, and the mean of their
    losses.
    """
    ALL_ATTENTION_FUNCTIONS["sdpa"] = ATTENTION
    model = make_model(arguments).to("cuda" if device == "cuda" else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [{name: v[None].to(model.device) for name, v in s.items()} for s in samples(model)]
    for first in range(0, SEQUENCES, 2):
        pair = data[first : first + 2]
        counts = [(sample["labels"][:, 1:] != -100).sum() for sample in pair]
        for sample, count in zip(pair, counts, strict=True):
            (model(**sample).loss * count / sum(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [model(**sample).loss.item() for sample in data]
    return weights_of(model), sum(losses) / len(losses)


def weights_of(model: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: whole(p).cpu() for name, p in model.named_parameters()}


def plain_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    shift_labels: Tensor,
    num_items_in_batch: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """PyTorch's, 0 for no label: Transformers' is nan, and so is the gradient of all ranks."""
    flat = shift_labels.flatten()
    rows = logits.reshape(-1, vocab_size).float()
    loss = torch.nn.functional.cross_entropy(rows, flat, reduction="sum")
    count = (flat != -100).sum().clamp(min=1)
    return loss / (count if num_items_in_batch is None else num_items_in_batch)


def gathered_attention(
    module: Any,
    query: Tensor,  # (B, heads, own tokens, width)
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float,
    position_ids: Tensor,  # (B, own tokens), of the whole sequence
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's tokens to those of all ranks."""
    from torch.distributed.nn.functional import all_gather

    keys, values = (torch.cat(all_gather(each.contiguous()), 2) for each in (key, value))
    places = [torch.empty_like(position_ids) for _ in range(dist.get_world_size())]
    dist.all_gather(places, position_ids.contiguous())
    ahead = torch.cat(places, 1)[:, None, None, :] > position_ids[:, None, :, None]
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
    weights = (query @ keys.mT * scaling).masked_fill(ahead, -torch.inf).softmax(-1)
    return (weights @ values).transpose(1, 2).contiguous(), None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["context", "ulysses"])
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    each_case(check, parser)
