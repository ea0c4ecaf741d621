"""Test this machine: which versions and kernels it has, and whether loss and gradients are right.

What it prints is meant for a bug report: no names of users, machines or folders.
"""

from __future__ import annotations

import copy
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import liger_patch
from liger_patch.kernels import reference
from liger_patch.kernels.backend import HAS_TRITON, serves_triton_device
from liger_patch.patch import flags

PACKAGES = {  # with the newest version that is tested: that of constraints.txt
    "torch": "2.13.0",
    "triton": "3.7.1",
    "transformers": "5.24.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
    "trl": "1.16.0",
    "deepspeed": "0.19.8",
    "torchao": "0.18.0",
}
VARIABLES = (  # and those of liger_patch
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_COMPILE_DISABLE",
    "TRITON_INTERPRET",
)
TOKENS, HIDDEN, VOCABULARY = 200, 64, 1000
Result = Sequence[Tensor]  # a loss and gradients


def doctor() -> int:
    """Print the report, and return the exit status: 0 where all tests pass, else 1."""
    print(f"liger_patch  {liger_patch.__version__}")
    print(f"python       {platform.python_version()}, {platform.system()} {platform.machine()}")
    for package, tested in PACKAGES.items():
        print(f"{package:<12} {_version(package, tested)}")
    for name, value in sorted(os.environ.items()):
        if name.startswith("LIGER_PATCH_") or name in VARIABLES:
            print(f"{name}={_without_paths(value)}")
    os.environ.pop(flags.RETURN_LOGITS, None)  # printed; what runs without it is tested
    passed = True
    for device in _devices():
        print(f"\n{_name(device)}\n  kernels    {_kernels(device)}")
        for dtype in _dtypes(device):
            for test in (_operator, _model):
                start = time.perf_counter()
                failure = _attempt(test, device, dtype)
                words = f"{test.__name__.strip('_')}, {str(dtype).removeprefix('torch.')}"
                seconds = time.perf_counter() - start
                print(f"  {words:<20} {failure or 'right'} ({seconds:.1f} s)")
                passed &= failure is None
    print(f"\n{'all tests passed' if passed else 'FAILED: please report the above'}")
    return 0 if passed else 1


def _version(package: str, tested: str) -> str:
    """Return the installed version, and whether it is newer than the one that is tested."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
    is_newer = Version(found).release > Version(tested).release
    return f"{found}, newer than the tested {tested}" if is_newer else found


def _without_paths(text: str) -> str:
    return re.sub(r"(~|\b[A-Za-z]:)?[/\\][^\s'\",:]+", "<path>", text)


def _devices() -> list[torch.device]:
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    found = [torch.device("cuda", i) for i in gpus]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return [*found, torch.device("cpu")]


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    memory = properties.total_memory / 2**30
    return f"{device}: {properties.name}, capability {capability}, {memory:.0f} GiB"


def _kernels(device: torch.device) -> str:
    """Return what runs kernels on a device."""
    if not serves_triton_device(torch.empty(0, device=device)):
        reason = "" if HAS_TRITON else ": Triton is not installed"
        return f"PyTorch operations, no Triton{reason}"
    if device.type == "cpu":
        return "Triton's interpreter (TRITON_INTERPRET=1)"
    return "Triton"


def _dtypes(device: torch.device) -> list[torch.dtype]:
    # Triton's interpreter multiplies the bits of bfloat16 as whole numbers
    is_interpreted = device.type == "cpu" and serves_triton_device(torch.empty(0))
    return [torch.float32] if is_interpreted else [torch.float32, torch.bfloat16]


def _attempt(test: Callable[..., float], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what is wrong, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            worst = test(device, dtype)
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        return f"WRONG: {type(error).__name__}: {_without_paths(first)}"
    return None if worst <= 1 else f"WRONG: {worst:.3g} times the error that is allowed"


def _operator(device: torch.device, dtype: torch.dtype) -> float:
    """Return the worst error of ``linear_cross_entropy`` over what is allowed, with the kernels of
    Hopper GPUs, where they serve, and with those of others.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, HIDDEN, generator=generator) for n in (TOKENS, VOCABULARY)]
    inputs[1] /= HIDDEN**0.5
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[::3] = -100
    low = [each.to(device, dtype) for each in inputs]

    def run(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Result:
        leaves = [each.detach().requires_grad_() for each in tensors]
        loss = function(*leaves, labels.to(leaves[0].device))
        return loss, *torch.autograd.grad(loss, leaves)

    truth = run(reference.linear_cross_entropy, [each.cpu().double() for each in low])
    plain = run(reference.linear_cross_entropy, low)
    forms = (partial(liger_patch.linear_cross_entropy, hopper_kernels=k) for k in (True, False))
    return max(_worst(run(each, low), plain, truth, 0.0) for each in forms)


def _model(device: torch.device, dtype: torch.dtype) -> float:
    """Return the worst error of a patched model's loss and gradients over what is allowed."""
    config: Any = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = LlamaForCausalLM(config)
        model = made.to(dtype)
        ids = torch.randint(VOCABULARY, (2, TOKENS // 2))

    def run(model: Any) -> Result:
        where = model.get_input_embeddings().weight.device
        loss = model(input_ids=ids.to(where), labels=ids.to(where)).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return loss, torch.cat([each.flatten() for each in gradients])

    truth = run(copy.deepcopy(model).double())
    model = model.to(device)
    plain = run(model)
    liger_patch.apply_patch(model)
    found = run(model)
    status = liger_patch.patch_status(model)
    if not status.fused:
        raise RuntimeError("the loss of the patched model was not fused")
    # layers round each token's hidden states to the dtype; the loss is the mean of the tokens' own
    return _worst(found, plain, truth, torch.finfo(dtype).eps / TOKENS**0.5)


def _worst(found: Result, plain: Result, truth: Result, eps_of_loss: float) -> float:
    """Return the largest error, as a share of what is allowed: twice PyTorch's own and one eps. For
    the loss, which PyTorch may hit by luck: four eps, or ``eps_of_loss`` if that is more.
    """
    shares = []
    for ours, eager, true in zip(found, plain, truth, strict=True):
        errors = [(each.detach().cpu().double() - true).abs().max() for each in (ours, eager)]
        eps = torch.finfo(eager.dtype).eps
        if true.dim() == 0:
            eps = max(4 * eps, eps_of_loss)
        allowed = 2 * errors[1] + eps * true.abs().max()
        shares.append((errors[0] / allowed).item())
    return max(float("inf") if share != share else share for share in shares)
