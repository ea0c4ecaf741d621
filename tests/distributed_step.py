"""One training step of a patched model in a process group of one, for test_distributed.

Exits with an error unless loss and gradients are eager's and no logits are computed.
"""

import sys

import torch
from gloo_group import join, leave
from tiny_models import tiny_batch, tiny_model
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from liger_patch import apply_patch, patch_status
from liger_patch.head_call import HeadCall
from liger_patch.registry import available


def main(wrapper: str, file: str, layers: str) -> None:
    join(file, rank=0, processes=1)
    (row,) = (row for row in available() if row.model_type == "llama")
    model, expected = tiny_model(row), tiny_model(row)
    batch = tiny_batch(model)
    loss = expected(**batch).loss
    loss.backward()

    apply_patch(model, layers=layers == "layers")
    wrapped = wrap(model, wrapper)
    reads = []
    compute = HeadCall.logits
    HeadCall.logits = lambda call: reads.append(call) or compute(call)
    for _ in range(2):
        model.zero_grad()
        outputs = wrapped(**batch)
        outputs.loss.backward()
    assert not reads, "the logits were computed"
    assert patch_status(model).fused
    torch.testing.assert_close(outputs.loss, loss)
    for (name, ours), eager in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradient = ours.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(gradient, eager.grad, msg=name)
    assert outputs.logits.shape == (*batch["input_ids"].shape, model.config.vocab_size)
    leave()


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh) or model
    unused = wrapper == "ddp_unused"
    return DistributedDataParallel(model, find_unused_parameters=unused)


if __name__ == "__main__":
    main(*sys.argv[1:])
