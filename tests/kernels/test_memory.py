"""What is held at once on the CPU: never N * V elements, and in all no more than is promised."""

import pytest
import torch
from slow_cases import slow_but
from three_ways import OPTIONS, chunk_mib, filled, linear_inputs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.head import row_sums
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy

CPU = torch.device("cpu")
TOKENS, HIDDEN, VOCAB = 512, 24, 1000
ROWS, PADDED_V = 128, 1024  # a chunk
SCRATCH_BYTES = 2**16


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor that was made, and bytes of those that lived together."""

    def __init__(self, existing):
        super().__init__()
        self.largest = self.peak = 0
        self.existing = {StorageWeakRef(x.untyped_storage()).cdata for x in existing}
        self.living = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self.existing:
                    self.largest = max(self.largest, storage.nbytes() // value.itemsize)
                    self.living[reference.cdata] = reference, storage.nbytes()
        self.living = {k: v for k, v in self.living.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.living.values()))
        return result


@pytest.fixture(autouse=True)
def small_scratch(monkeypatch):
    monkeypatch.setattr(row_sums, "SCRATCH_BYTES", SCRATCH_BYTES)


@pytest.mark.parametrize(
    "dtype",
    slow_but([torch.bfloat16, torch.float32], [torch.bfloat16, torch.float16, torch.float32]),
    ids=str,
)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=["", "frozen head"])
@pytest.mark.parametrize("ignored", slow_but([0.4], [0.0, 0.4]))
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_linear_cross_entropy_holds_gradients_and_one_chunk(
    dtype, reduction, frozen, ignored, options
):
    inputs, labels = linear_inputs(dtype, CPU, TOKENS, HIDDEN, VOCAB, bias=True, ignored=ignored)
    leaves = {k: v.requires_grad_(k not in frozen) for k, v in inputs.items()}
    options = filled(OPTIONS[options], TOKENS, VOCAB, CPU) | {"reduction": reduction}
    given = [*leaves.values(), labels, *(v for v in options.values() if torch.is_tensor(v))]
    with Allocations(given) as seen:
        loss = linear_cross_entropy(
            **leaves, labels=labels, chunk_mib=chunk_mib(ROWS, VOCAB, dtype), **options
        )
        loss.backward(torch.ones_like(loss))
    assert seen.largest <= max(ROWS * PADDED_V, VOCAB * HIDDEN, TOKENS * HIDDEN)
    gradients = sum(leaf.nbytes for leaf in leaves.values() if leaf.requires_grad)
    chunk = ROWS * PADDED_V * dtype.itemsize
    gathered = 3 * ROWS * HIDDEN * dtype.itemsize  # rows of this chunk and the last, and their dX
    vectors = 8 * (8 * TOKENS + 2 * VOCAB)  # labels, losses, factors, sorting; bias in float32
    assert seen.peak <= gradients + chunk + SCRATCH_BYTES + gathered + vectors


@pytest.mark.parametrize("mode", ["no_grad", "nothing wants gradients"])
def test_loss_alone_holds_one_chunk(mode):
    inputs, labels = linear_inputs(torch.bfloat16, CPU, TOKENS, HIDDEN, VOCAB, bias=True)
    for value in inputs.values():
        value.requires_grad_(mode == "no_grad")
    budget = chunk_mib(ROWS, VOCAB, torch.bfloat16)
    with torch.set_grad_enabled(mode != "no_grad"), Allocations([*inputs.values(), labels]) as seen:
        linear_cross_entropy(**inputs, labels=labels, chunk_mib=budget)
    chunk = ROWS * PADDED_V * 2
    gathered = 2 * ROWS * HIDDEN * 2
    assert seen.peak <= chunk + SCRATCH_BYTES + gathered + 8 * 8 * TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cross_entropy_makes_no_float32_copy_of_the_logits(dtype):
    logits = torch.randn(TOKENS, VOCAB).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (TOKENS,))
    with Allocations([logits, labels]) as seen:
        cross_entropy(logits, labels, softcap=5.0, label_smoothing=0.1).backward()
    assert seen.peak <= logits.nbytes + SCRATCH_BYTES + 8 * 8 * TOKENS
