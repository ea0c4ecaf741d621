"""Real shapes on a GPU: exactness, memory, reads of the device, more than one device."""

import gc
import warnings
from functools import partial

import pytest
import torch
from exactness import assert_no_worse
from three_ways import eager_cross_entropy, linear_inputs, results_and_gradients
from torch.nn.functional import linear

from liger_patch.kernels import reference
from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.head.inputs import MIB, TRAINED_CHUNK_MIB
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.options import LossOptions

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LLAMA = (4096, 4096, 128256)  # N, H, V: the head of Llama 3 8B
GEMMA = (2048, 2304, 256000)  # of Gemma 2 2B
TRUTH_ROWS = 512  # of float64 logits at a time


@pytest.fixture(autouse=True)
def free_memory():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def gpu_inputs(dtype, tokens, hidden_size, vocab_size, *, ignored=0.0):
    """Like `linear_inputs`, but random numbers are drawn on the GPU."""
    generator = torch.Generator(CUDA).manual_seed(0)

    def normal(*size):
        return torch.randn(size, generator=generator, device=CUDA, dtype=dtype)

    weight = normal(vocab_size, hidden_size) / hidden_size**0.5
    hidden_states = normal(tokens, hidden_size)
    labels = torch.randint(vocab_size, (tokens,), generator=generator, device=CUDA)
    rows = weight[labels[::3]].float()
    hidden_states[::3] = (20 * rows / rows.square().sum(1, keepdim=True)).to(dtype)
    dropped = torch.rand(tokens, generator=generator, device=CUDA) < ignored
    return {"hidden_states": hidden_states, "weight": weight}, labels.masked_fill(dropped, -100)


def truth_in_parts(inputs, labels, **options):
    """Mean loss and gradients in float64, a few rows of logits at a time."""
    exact = {name: value.double().requires_grad_() for name, value in inputs.items()}
    items = int((labels != -100).sum())
    total = torch.zeros((), dtype=torch.float64, device=labels.device)
    for start in range(0, len(labels), TRUTH_ROWS):
        rows = slice(start, start + TRUTH_ROWS)
        loss = reference.linear_cross_entropy(
            exact["hidden_states"][rows],
            exact["weight"],
            labels[rows],
            num_items_in_batch=items,
            options=LossOptions(**options),
        )
        loss.backward()
        total += loss.detach()
    return {"loss": total} | {name: value.grad for name, value in exact.items()}


def ours_of(inputs, labels, *, autocast=None, **options):
    call = partial(linear_cross_entropy, labels=labels, **options)
    return results_and_gradients(call, inputs, autocast=autocast)


def eager_of(inputs, labels, *, autocast=None, **options):
    def call(hidden_states, weight):
        return eager_cross_entropy(linear(hidden_states, weight), labels, **options)

    return results_and_gradients(call, inputs, autocast=autocast)


@pytest.mark.parametrize(
    ("shape", "ignored", "options"),
    [
        pytest.param(LLAMA, 0.0, {}, id="llama"),
        pytest.param(LLAMA, 0.7, {}, id="llama-70%-ignored"),
        pytest.param(GEMMA, 0.1, {"softcap": 30.0}, id="gemma2"),
    ],
)
def test_real_shapes(shape, ignored, options):
    inputs, labels = gpu_inputs(torch.bfloat16, *shape, ignored=ignored)
    ours, again = (ours_of(inputs, labels, **options) for _ in range(2))
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    del again
    eager = eager_of(inputs, labels, **options)
    torch.cuda.empty_cache()
    assert_no_worse(ours, eager, truth_in_parts(inputs, labels, **options), torch.bfloat16)


@pytest.mark.parametrize("chunk_mib", [TRAINED_CHUNK_MIB, 16 * 1024])  # many, and all in one
def test_more_logits_than_32_bits_count(chunk_mib):
    tokens, vocab_size = 20_000, 128_256
    assert tokens * vocab_size > 2**31
    inputs, labels = gpu_inputs(torch.bfloat16, tokens, 128, vocab_size)
    ours = ours_of(inputs, labels, chunk_mib=chunk_mib)
    truth = truth_in_parts(inputs, labels)
    last = slice(-64, None)
    rows = inputs | {"hidden_states": inputs["hidden_states"][last]}
    eager = eager_of(rows, labels[last], num_items_in_batch=tokens)["hidden_states"]
    our_rows, true_rows = ({"dx": each["hidden_states"][last]} for each in (ours, truth))
    assert_no_worse(our_rows, {"dx": eager}, true_rows, torch.bfloat16)
    dweight, exact = ours["weight"].double(), truth["weight"]
    # a row of logits at the wrong offset would be another vector altogether
    assert (dweight - exact).norm() < 0.1 * exact.norm()
    assert abs(ours["loss"] - truth["loss"]) < torch.finfo(torch.bfloat16).eps * truth["loss"]


def test_more_ready_made_logits_than_32_bits_count():
    tokens, vocab_size = 20_000, 128_256
    logits = torch.randn(tokens, vocab_size, device=CUDA, dtype=torch.bfloat16)
    labels = torch.randint(vocab_size, (tokens,), device=CUDA)
    last = slice(-64, None)

    def losses_of(function, logits, labels):
        call = partial(function, labels=labels, reduction="none")
        return results_and_gradients(call, {"logits": logits})

    ours = losses_of(cross_entropy, logits, labels)
    ours = {name: value[last] for name, value in ours.items()}
    eager = losses_of(eager_cross_entropy, logits[last], labels[last])
    truth = losses_of(reference.cross_entropy, logits[last].double(), labels[last])
    assert_no_worse(ours, eager, truth, torch.bfloat16)


@pytest.mark.parametrize("ignored", [0.0, 0.7])
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["", "frozen head"])
@pytest.mark.parametrize("chunk_mib", [TRAINED_CHUNK_MIB, 128])
def test_peak_memory_is_gradients_and_one_chunk(chunk_mib, frozen, ignored):
    inputs, labels = gpu_inputs(torch.bfloat16, 8192, *LLAMA[1:], ignored=ignored)
    leaves = {name: value.requires_grad_(name not in frozen) for name, value in inputs.items()}

    def step():
        linear_cross_entropy(**leaves, labels=labels, chunk_mib=chunk_mib).backward()
        for leaf in leaves.values():
            leaf.grad = None

    step()  # the workspaces of the matrix products are allocated once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    gradients = sum(leaf.nbytes for leaf in leaves.values() if leaf.requires_grad)
    over = torch.cuda.max_memory_allocated() - before
    assert over <= gradients + (chunk_mib + 32) * MIB


@pytest.mark.parametrize("options", [{}, {"class_weight": True}, {"token_weight": True}], ids=str)
@pytest.mark.parametrize("items", [None, 100, torch.tensor(100)], ids=str)
def test_host_waits_for_the_counts_alone(options, items, record):
    inputs, labels = gpu_inputs(torch.bfloat16, 512, 64, 1000, ignored=0.5)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    sizes = {"class_weight": 1000, "token_weight": 512}
    options = {name: torch.ones(sizes[name], device=CUDA) for name in options}
    if torch.is_tensor(items):
        items = items.to(CUDA)

    def step():
        loss = linear_cross_entropy(**leaves, labels=labels, num_items_in_batch=items, **options)
        (3 * loss).backward()

    step()
    torch.cuda.synchronize()
    waits = record(torch.cuda.Event, "synchronize")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    reads = [w for w in caught if "called a synchronizing CUDA operation" in str(w.message)]
    assert not reads, [f"{w.filename}:{w.lineno}" for w in reads]
    assert len(waits) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_tensors_of_a_device_that_is_not_the_current_one(reduction):
    results = []
    for index in (0, 1):
        inputs, labels = linear_inputs(torch.bfloat16, torch.device("cuda", index), bias=True)
        assert torch.cuda.current_device() == 0
        call = partial(linear_cross_entropy, labels=labels, reduction=reduction)
        upstream = torch.full_like(call(**inputs), 3.0)
        ours = results_and_gradients(call, inputs, upstream)
        logits = linear(*inputs.values())
        ours["ready-made"] = cross_entropy(logits, labels)
        assert all(value.device.index == index for value in ours.values())
        results.append({name: value.cpu() for name, value in ours.items()})
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk_mib", [TRAINED_CHUNK_MIB, 0.25])
def test_autocast_over_float32_weights(dtype, chunk_mib):
    inputs, labels = gpu_inputs(torch.float32, 500, 256, 1021, ignored=0.2)
    ours = ours_of(inputs, labels, chunk_mib=chunk_mib, autocast=dtype)
    eager = eager_of(inputs, labels, autocast=dtype)
    assert_no_worse(ours, eager, truth_in_parts(inputs, labels), dtype)
    assert ours["weight"].dtype == torch.float32
    if hasattr(torch.ops.aten.mm, "dtype_out"):  # torch 2.8
        # written in float32 by the product itself, not rounded to 16 bits on the way
        assert not torch.equal(ours["weight"].to(dtype).float(), ours["weight"])
