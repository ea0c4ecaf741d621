"""Compare steps whose feed-forward layers run in slices with steps at once, in each process of a
group, under wrappers of torch.

    sliced_step.py FILE ENGINE...       FILE: where the group meets
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
from exactness import assert_no_worse
from gloo_group import join, leave
from lora_models import ROWS, adapted
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from liger_patch import apply_patch
from liger_patch.kernels import gated_mlp, sliced

LONG_BYTES, SLICE_BYTES = 2**31, 5 * 8 * 64 * 7  # 7 tokens of 64 float64 features


def wrapped(model: Any, base: Any, engine: str) -> Any:
    if engine.startswith("ddp"):
        return DistributedDataParallel(model, static_graph=engine == "ddp_static")
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in base.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(base.model.layers[0])}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def step(engine: str, kind: str, reentrant: bool, rank: int, long_bytes: int) -> dict[str, Tensor]:
    """The loss, and the gradients that this rank holds, by name; in float64."""
    sliced.LONG_BYTES, sliced.SLICE_BYTES = long_bytes, SLICE_BYTES
    model = (adapted() if kind == "lora" else tiny_model(ROWS["llama"])).double()
    base = model.get_base_model() if kind == "lora" else model
    if kind == "lora":
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    apply_patch(model.train())
    engined = wrapped(model, base, engine)
    loss = engined(**tiny_batch(base, seed=rank, length=31)).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is not None:
            full = getattr(gradient, "full_tensor", None)
            found[name] = gradient if full is None else full()
    return found


def main(file: str, *engines: str) -> None:
    rank = int(os.environ["RANK"])
    join(file, rank, int(os.environ["WORLD_SIZE"]))
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*")
    runs: list[int] = []
    result = gated_mlp._result_of_slices

    def counted(x: Tensor, layer: Any, slices: Any, *others: Any) -> Tensor:
        runs.append(len(slices))
        return result(x, layer, slices, *others)

    gated_mlp._result_of_slices = counted
    for engine in engines:
        for kind in ("full", "lora"):
            for reentrant in (False, True):
                case = engine, kind, reentrant, rank
                at_once = step(*case, LONG_BYTES)
                assert not runs, case
                in_slices = step(*case, 0)
                assert len(runs) == (4 if reentrant else 2), (case, runs)
                assert len(at_once) > 10, case
                assert_no_worse(in_slices, at_once, at_once, torch.float32)
                runs.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
