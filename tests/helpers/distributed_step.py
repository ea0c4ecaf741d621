"""Training steps of a patched and of an unpatched model under engines, for test_distributed.

Run once for each process of the group, with one argument for each case ("fsdp2 --layers"). Exits
with an error unless losses and weights are eager's, and no real logits are computed, forward or
backward; or, where ``--fallback`` gives a reason, unless that is why they are.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_models import TWO_LOSSES, make_model
from engines import ACCUMULATED, ENGINES, Engine, base_of
from gloo_group import Collective, each_case, record_collectives
from tiny_models import tiny_batch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from liger_patch import apply_patch, deferred_logits, distillation_loss, patch_status
from liger_patch.deferred.record import HeadCall
from liger_patch.layers import mlp
from liger_patch.layers.checks import layers_of
from liger_patch.patch.forward import record_of

STEPS = 2
ZERO3_STEPS = 3  # it records the order of its gatherings in the first two
LOSS_ERROR, ERROR = 1e-6, 1e-5  # in float32, of the largest value
NUM_ITEMS = 25  # of labels, in the mean of each forward pass with --labels


def check(arguments: argparse.Namespace, folder: Path, _: str) -> None:
    with record_collectives() as eager_collectives:
        expected = train(make_engine(arguments, patch=False), arguments)
    with (
        record_collectives() as collectives,
        count_logits() as computed,
        warnings.catch_warnings(),
    ):
        may_warn = arguments.fallback or arguments.distrusted or arguments.model == TWO_LOSSES
        warnings.filterwarnings("ignore" if may_warn else "error", "liger_patch")
        engine = make_engine(arguments, patch=True)
        if arguments.distrusted and dist.get_rank() == 0:
            record_of(engine.model).distrusted = "this rank's tokens differ"
        with patch.object(mlp, "run_gated", wraps=mlp.run_gated) as gated:
            results = train(engine, arguments, computed)
    if arguments.layers:
        # ZeRO-3 gathers the weights of each projection at its call: no one function for all
        assert gated.called or not arguments.engine.startswith("zero3"), "no activation on a kernel"
        base = base_of(engine.model)
        names = {layers_of(m) for m in base.modules() if type(m).__name__.endswith("RMSNorm")}
        assert names <= {("rms_norm",)}  # a unit of its own too, patched after it was wrapped
    status = patch_status(engine.model)
    if arguments.distrusted:
        assert status.fused == (dist.get_rank() != 0)
        check_collectives(collectives, eager_collectives)
    elif arguments.fallback:
        assert not status.fused
        assert arguments.fallback in (status.reason or ""), status.reason
    else:
        assert status.fused, status.reason
        if engine.ranks_per_batch == 1:
            # those of DistributedDataParallel are made in C++
            assert eager_collectives or arguments.engine.startswith("ddp"), "none are seen"
            check_collectives(collectives, eager_collectives)
        else:
            assert collectives or arguments.engine == "device_map", "none are seen"
            check_collectives_meet(collectives)
    compare(results, expected, arguments)
    if arguments.alone:
        compare(results, train_alone(engine, arguments), arguments)
    if arguments.checkpoint:
        check_checkpoint(engine, arguments, folder / arguments.engine)
    if arguments.late == "step":
        check_read_after_step(engine, arguments)
    elif arguments.late:
        check_read_late(engine, arguments)


def compare(
    results: dict[str, Tensor], expected: dict[str, Tensor], arguments: argparse.Namespace
) -> None:
    """In bf16, both have errors: ours at most twice eager's, and one eps."""
    truth = None
    if arguments.engine.endswith("_mixed"):
        in_float32 = argparse.Namespace(**vars(arguments) | {"engine": "fsdp2_head"})
        truth = train(make_engine(in_float32, patch=False), arguments)
    for name, value in expected.items():
        error, largest = (results[name] - value).abs().max(), value.abs().max()
        if truth is None:
            allowed = (LOSS_ERROR if "loss" in name else ERROR) * largest
        else:
            allowed = (
                2 * (value - truth[name]).abs().max() + torch.finfo(torch.bfloat16).eps * largest
            )
            error = (results[name] - truth[name]).abs().max()
        assert error <= allowed, f"{name}: off by {error:.2e} of {largest:.2e}"


def check_collectives(ours: list[Collective], eager: list[Collective]) -> None:
    """Ours are some of eager's, of the same kinds and sizes, and the same on all ranks.

    But for the list of called modules that ZeRO-3 compares: activations on kernels are not in it.
    """
    more = Counter(ours) - Counter(eager)
    more = {each: n for each, n in more.items() if each[::2] != ("broadcast", torch.int64)}
    assert not more, (
        f"collectives that eager does not have: {more}, not {Counter(eager) - Counter(ours)}"
    )
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, ours)
    assert all(each == ours for each in others)


def check_collectives_meet(ours: list[Collective]) -> None:
    """Where ranks share a batch, ours are others than eager's (sharded_head has them): of the same
    kinds and dtypes on all ranks, whose batches and shards may differ in size.
    """
    found = [(name, dtype) for name, _, dtype in ours]
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, found)
    assert all(each == found for each in others)


def device() -> torch.device:
    """Of this rank."""
    is_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if is_cuda else torch.device("cpu")


def make_engine(arguments: argparse.Namespace, *, patch: bool, is_teacher: bool = False) -> Engine:
    model = make_model(device(), arguments)
    if is_teacher:
        for values in model.parameters():
            values.data.mul_(-0.5)
    if patch:
        apply_patch(model, layers=arguments.layers)
    engine = ENGINES[arguments.engine](model)
    if arguments.distil and not is_teacher:
        engine.teacher = make_engine(arguments, patch=patch, is_teacher=True)
    if arguments.compiled:
        engine.module = torch.compile(engine.module, backend="eager")  # pyright: ignore[reportAttributeAccessIssue]
    return engine


@contextmanager
def count_logits() -> Iterator[list[HeadCall]]:
    """The products that are computed within this context, for a reader or in a backward pass."""
    computed: list[HeadCall] = []
    compute = HeadCall.compute

    def counted(self: HeadCall, *tensors: Any) -> Tensor:
        computed.append(self)
        return compute(self, *tensors)

    HeadCall.compute = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield computed
    finally:
        HeadCall.compute = compute


def batch_of(engine: Engine, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of this rank; tensor parallel ranks share one."""
    return numbered_batch(engine, seed, batch_index(engine), arguments)


def batch_index(engine: Engine) -> int:
    """Return which of the batches of a forward pass this rank is given."""
    return dist.get_rank() // engine.ranks_per_batch


def batch_count(engine: Engine) -> int:
    return dist.get_world_size() // engine.ranks_per_batch


def numbered_batch(
    engine: Engine, seed: int, number: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    seed = batch_count(engine) * seed + number
    batch: dict[str, Any] = tiny_batch(base_of(engine.model), seed=seed)
    if arguments.labels and number == batch_count(engine) - 1:
        if arguments.labels == "none":
            batch["labels"].fill_(-100)
        else:  # fewer tokens, and of those fewer that count
            batch = {name: value[:, :-3].clone() for name, value in batch.items()}
            batch["labels"][:, :4] = -100
    batch = {name: value.to(device()) for name, value in batch.items()}
    return batch | ({"num_items_in_batch": NUM_ITEMS} if arguments.labels else {})


def train(
    engine: Engine, arguments: argparse.Namespace, computed: Collection[HeadCall] = ()
) -> dict[str, Tensor]:
    """Losses, gradients of the first step, and the weights after some steps.

    Args:
        computed: must be empty, but for what is read here.
    """
    results = {}
    for step in range(steps_of(arguments)):
        for i in range(ACCUMULATED):
            if arguments.no_sync:
                engine.synchronize(i + 1 == ACCUMULATED)
            outputs = forward(engine, batch_of(engine, step * ACCUMULATED + i, arguments))
            if arguments.metric and reads_logits(engine):
                results[f"logits {step} {i}"] = outputs.logits.detach().cpu()
            engine.backward(outputs.loss)
            results[f"loss {step} {i}"] = outputs.loss.detach().cpu()
            if i + 1 < ACCUMULATED:
                engine.end_batch()
        if step == 0:
            results |= named(engine.gradients())
        if arguments.evaluate:  # between backward pass and step, where stale weights would show
            results |= evaluate(engine, step, arguments, computed)
        if arguments.leftover:
            engine.module(**batch_of(engine, 70 + step, arguments))
        engine.step()
        if arguments.leftover:
            batch = batch_of(engine, 80 + step, arguments)
            with torch.no_grad():
                logits = engine.module(input_ids=batch["input_ids"]).logits
            results[f"logits after step {step}"] = logits.detach().cpu()
    reads = arguments.metric or arguments.evaluate or arguments.distrusted
    assert arguments.fallback or reads or not computed, (
        f"real logits were computed {len(computed)} times"
    )
    return results | engine.weights()


def forward(engine: Engine, batch: dict[str, Any]) -> Any:
    """Return what a model does of a batch with labels; the loss may be that of distillation."""
    if engine.teacher is None:
        return engine.module(**batch)
    labels, num_items = batch.pop("labels"), batch.pop("num_items_in_batch", None)
    with deferred_logits():
        outputs = engine.module(**batch)
        with torch.no_grad():
            others = engine.teacher.module(**batch)
    how: dict[str, Any] = {"divergence": "jsd", "num_items_in_batch": num_items}
    outputs.loss = distillation_loss(outputs, others, labels, **how)
    return outputs


def reads_logits(engine: Engine) -> bool:
    """Return whether this rank reads them: one, or all where reading is a collective."""
    return dist.get_rank() == 0 or engine.ranks_per_batch > 1


def evaluate(
    engine: Engine, step: int, arguments: argparse.Namespace, computed: Collection[HeadCall]
) -> dict[str, Tensor]:
    """Loss and logits without gradients."""
    before = len(computed)
    with torch.no_grad():
        outputs = forward(engine, batch_of(engine, 50 + step, arguments))
    assert len(computed) == before, "real logits were computed for the loss of an evaluation"
    results = {f"evaluation loss {step}": outputs.loss.detach().cpu()}
    if reads_logits(engine):
        results[f"evaluation {step} logits"] = outputs.logits.detach().cpu()
    return results


def train_alone(engine: Engine, arguments: argparse.Namespace) -> dict[str, Tensor]:
    """What ``train`` gives of an unpatched model after the batches of all ranks, without an engine:
    the losses are those of this rank.
    """
    model = make_model(device(), arguments)
    alone = Engine(model, model)
    batches = batch_count(engine)
    results = {}
    for step in range(steps_of(arguments)):
        for i in range(ACCUMULATED):
            for number in range(batches):
                batch = numbered_batch(engine, step * ACCUMULATED + i, number, arguments)
                loss = model(**batch).loss
                (loss * engine.loss_scale / batches).backward()
                if number == batch_index(engine):
                    results[f"loss {step} {i}"] = loss.detach().cpu()
        if step == 0:
            results |= named(alone.gradients())
        alone.step()
    return results | alone.weights()


def steps_of(arguments: argparse.Namespace) -> int:
    return ZERO3_STEPS if arguments.engine.startswith("zero3") else STEPS


def named(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"gradient of {name}": each for name, each in gradients.items()}


def check_checkpoint(engine: Engine, arguments: argparse.Namespace, folder: Path) -> None:
    """A sharded one, through PyTorch's own functions (DCP) or accelerate's, has an unpatched
    model's keys, and gives its weights to an unpatched and to a patched model.
    """
    batch, expected = batch_of(engine, 9, arguments), engine.weights()
    loss = engine.module(**batch).loss.detach()
    state = get_model_state_dict(engine.module)
    assert state.keys() == get_model_state_dict(make_engine(arguments, patch=False).module).keys()
    if engine.accelerator is not None:
        engine.accelerator.save_state(str(folder))
    else:
        checkpoint.save(state, checkpoint_id=folder)
    for patched in (False, True):
        loaded = make_engine(arguments, patch=patched)
        assert any(not w.equal(expected[n]) for n, w in loaded.weights().items())
        if loaded.accelerator is not None:
            loaded.accelerator.load_state(str(folder))
        else:
            state = get_model_state_dict(loaded.module)
            checkpoint.load(state, checkpoint_id=folder)
            set_model_state_dict(loaded.module, state)
        for name, weight in loaded.weights().items():
            assert weight.equal(expected[name]), f"{name}, patched: {patched}"
        torch.testing.assert_close(loaded.module(**batch).loss.detach(), loss)


def check_read_after_step(engine: Engine, arguments: argparse.Namespace) -> None:
    engine.backward(engine.module(**batch_of(engine, 8, arguments)).loss)
    engine.end_batch()
    outputs = engine.module(**batch_of(engine, 9, arguments))
    engine.backward(outputs.loss)
    engine.step()
    with pytest.raises(RuntimeError, match="the head's weight changed"):
        outputs.logits.sum()


def check_read_late(engine: Engine, arguments: argparse.Namespace) -> None:
    """Where the weight was freed, an error says what to do to read logits, and that works; where
    its values stay, reading does.
    """
    module: Any = engine.module
    batch = batch_of(engine, 9, arguments)
    evaluates = arguments.late == "evaluation"
    with torch.set_grad_enabled(not evaluates):
        outputs = module(**batch)
    with torch.no_grad():
        expected = module(**{name: v for name, v in batch.items() if name != "labels"}).logits
    if not evaluates:
        engine.backward(outputs.loss)
    if arguments.engine.startswith(("zero3", "fsdp1")):
        torch.testing.assert_close(outputs.logits.detach(), expected)
        return
    head = base_of(engine.model).get_output_embeddings()
    unit = head if hasattr(head, "unshard") else module
    with pytest.raises(RuntimeError, match=r"unshard\(\)"):
        outputs.logits.sum()
    unit.unshard()
    torch.testing.assert_close(outputs.logits.detach(), expected)
    unit.reshard()
    if not evaluates:
        outputs = module(**batch)
        outputs.loss.backward()
        engine.step()
        unit.unshard()
        with pytest.raises(RuntimeError, match="the head's weight changed"):
            outputs.logits.sum()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", default="llama", help="of a row, or two_losses")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--tied", action="store_true", help="the head to the embedding")
    parser.add_argument("--lora", action="store_true", help="on all layers and the head")
    parser.add_argument("--quantized", action="store_true", help="such adapters on 4 bits")
    parser.add_argument("--compiled", action="store_true", help="the whole model")
    parser.add_argument("--labels", choices=["uneven", "none"], help="of the last batch")
    parser.add_argument("--no-sync", action="store_true", help="between steps")
    parser.add_argument("--metric", action="store_true", help="reads logits before backward")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--distil", action="store_true", help="from another such model")
    parser.add_argument("--alone", action="store_true", help="compares with one process")
    parser.add_argument("--checkpoint", action="store_true", help="is saved and loaded")
    parser.add_argument("--leftover", action="store_true", help="a forward without a backward pass")
    parser.add_argument("--distrusted", action="store_true", help="on one rank, the model is")
    parser.add_argument("--fallback", default="")
    parser.add_argument("--late", choices=["evaluation", "backward", "step"])
    each_case(check, parser)
