"""Heads of more than one product: an adapter's beside the plain one."""

import pytest
import torch
from three_ways import (
    LOW_DTYPES,
    OPTIONS,
    check_linear,
    chunk_mib,
    filled,
    linear_inputs,
    results_and_gradients,
)

from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
def test_adapter_with_every_option(options, dtype, device):
    inputs, labels = linear_inputs(dtype, device, bias=True, rank=4)
    options = filled(options, len(labels), 131, device)
    check_linear(inputs, labels, chunk_mib=chunk_mib(5, 131, dtype), **options)


def test_adapter_in_float32_beside_a_bf16_head(device):
    """As PEFT keeps it: each gradient comes in its input's own dtype."""
    inputs, labels = linear_inputs(torch.bfloat16, device, 64, rank=8)
    inputs |= {name: inputs[name].float() for name in ("low_rank", "low_rank_weight")}

    def ours(hidden_states, weight, low_rank, low_rank_weight):
        pair = (low_rank, low_rank_weight)
        return linear_cross_entropy(hidden_states, weight, labels, low_rank=pair)

    def eager(hidden_states, weight, low_rank, low_rank_weight):
        logits = hidden_states @ weight.t() + low_rank @ low_rank_weight.t()
        return torch.nn.functional.cross_entropy(logits.to(hidden_states.dtype).float(), labels)

    wide = {name: value.double() for name, value in inputs.items()}
    truth = results_and_gradients(eager, wide)
    plain, fused = (
        results_and_gradients(loss, inputs, frozen=("weight",)) for loss in (eager, ours)
    )
    for name, value in fused.items():
        if value is None or truth[name] is None:
            assert name == "weight"
            continue
        assert value.dtype == plain[name].dtype
        off, eagers = ((v.double() - truth[name]).norm() for v in (value, plain[name]))
        assert off <= 2 * eagers + torch.finfo(torch.bfloat16).eps * truth[name].norm() / 4
