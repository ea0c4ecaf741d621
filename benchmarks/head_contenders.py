"""Compute the loss of a head in several ways: plain PyTorch, peers, ours at several budgets.

Peers take part where their packages are installed. Each imports its package in the call: a package
that does not import here is then a contender that does not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from liger_patch import linear_cross_entropy
from liger_patch.kernels.head.odds import SMALL_BATCH

from .heads import IGNORE_INDEX, Head
from .measure import Unsupported
from .names import OF_HOPPER, OTHER_GPUS, OURS, PYTORCH, QUACK, UNSLOTH

# hidden states (N, H), weight (V, H), labels (N,) -> ()
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

BUDGETS_MIB = (1024, 768, 128)  # beside the default
BUDGETS_OF_OTHERS_MIB = (1024,)  # beside the default
PACKAGES = {  # of peers -> the module that is imported, and what is installed for it
    "Liger-Kernel": ("liger_kernel", "liger-kernel"),
    "CCE": ("cut_cross_entropy", "cut-cross-entropy"),
    "TRL": ("trl", "trl"),
    QUACK: ("quack", "quack-kernels"),
    UNSLOTH: ("unsloth", "unsloth"),
}
QUACK_CHUNK = 4096  # tokens: the default of chunked_linear_cross_entropy


def contenders(head: Head, *, compiled: bool = True) -> dict[str, Loss]:
    """Return losses by name, eager first."""
    losses = {"eager": eager(head)}
    if compiled:
        # Each head has its own graph, and at most eight are kept of one function; static shapes,
        # because the check on fewer tokens would otherwise make the measured graph a general one.
        torch.compiler.reset()
        losses["torch.compile"] = torch.compile(eager(head), dynamic=False)
    return {
        **losses,
        **peers(head),
        OURS: ours(head),
        **{f"{OURS} {budget} MiB": ours(head, chunk_mib=budget) for budget in BUDGETS_MIB},
        OTHER_GPUS: ours(head, hopper_kernels=False),
        **{
            f"{OTHER_GPUS}, {budget} MiB": ours(head, hopper_kernels=False, chunk_mib=budget)
            for budget in BUDGETS_OF_OTHERS_MIB
        },
        **({OF_HOPPER: ours(head, hopper_kernels=True)} if head.tokens <= SMALL_BATCH else {}),
    }


def sweep_contenders(head: Head) -> dict[str, Loss]:
    """Return a few of them, without torch.compile: it compiles again for each number of tokens."""
    kept = ("eager", "Liger-Kernel", OURS, OF_HOPPER)
    return {name: f for name, f in contenders(head, compiled=False).items() if name in kept}


def eager(head: Head) -> Loss:
    """Return what Transformers' models do: logits, then cross entropy in at least float32."""

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden_states, weight)
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)

    return loss


def ours(head: Head, **options: Any) -> Loss:
    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden_states,
            weight,
            labels,
            ignore_index=IGNORE_INDEX,
            softcap=head.softcap,
            **options,
        )

    return loss


def step(loss: Loss, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward; return the loss and the gradients."""
    value = loss(hidden_states, weight, labels)
    return value, *torch.autograd.grad(
        value, [t for t in (hidden_states, weight) if t.requires_grad]
    )


def peers(head: Head) -> dict[str, Loss]:
    """Return the losses of the installed packages by name."""
    losses = {
        "Liger-Kernel": _liger(head),
        "CCE": _cut_cross_entropy(head),
        "CCE, unfiltered": _cut_cross_entropy(head, filter_eps=None),
        "TRL": _trl(head),
        UNSLOTH: _unsloth(head),
        PYTORCH: _pytorch(head),
        QUACK: _quack(head),
        f"{QUACK}, base": _quack(head, use_scaled_exp=False),
    }
    missing = left_out()
    return {name: loss for name, loss in losses.items() if name.split(",")[0] not in missing}


def left_out() -> dict[str, str]:
    """Return why peers take no part here, by name."""
    missing = {
        name: f"the package {package} is not installed"
        for name, (module, package) in PACKAGES.items()
        if not find_spec(module)
    }
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        missing[PYTORCH] = (
            f"linear_cross_entropy is in torch 2.13 and later, got {torch.__version__}"
        )
    return missing


def _liger(head: Head) -> Loss:
    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        module = import_module("liger_kernel.transformers")
        liger = module.LigerFusedLinearCrossEntropyLoss(softcap=head.softcap)
        return liger(weight, hidden_states, labels)

    return loss


def _cut_cross_entropy(head: Head, **options: Any) -> Loss:
    """Return its loss; by default its gradient filter is on, which is not exact."""

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        cce = import_module("cut_cross_entropy").linear_cross_entropy
        return cce(hidden_states, weight, labels, softcap=head.softcap, **options)

    return loss


def _trl(head: Head) -> Loss:
    """Return the loss of SFTTrainer's own head, with the outputs that it asks for."""

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        per_token = trl_log_probs(head, hidden_states, weight, labels)
        return -per_token.sum() / (labels != IGNORE_INDEX).sum().clamp(min=1)

    return loss


def trl_log_probs(head: Head, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return (N,) log-probabilities, 0 where ignored; entropy and accuracy are computed too."""
    utils = import_module("trl.trainer.utils")
    supervised = labels != IGNORE_INDEX
    log_probs, *_ = utils._ChunkedLogProbFunction.apply(
        hidden_states[supervised],
        weight,
        None,  # bias
        labels[supervised],
        1.0,  # temperature
        utils._CHUNKED_LOGPROB_CHUNK_SIZE,
        head.softcap,
        1.0,  # logit_scale
        ("log_probs", "entropy", "is_top1"),
    )
    return log_probs.new_zeros(labels.shape).masked_scatter(supervised, log_probs)


def _unsloth(head: Head) -> Loss:
    """Return the loss that its patched models call.

    It comes from ``unsloth_zoo``, which wants a variable that ``import unsloth`` sets. That import
    is left out, as it patches Transformers and TRL for all contenders.
    """

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        os.environ.setdefault("UNSLOTH_IS_PRESENT", "1")
        return import_module("unsloth_zoo.fused_losses").unsloth_fused_ce_loss(
            trainer=None,
            hidden_states=hidden_states[None],
            lm_head_weight=weight,
            lm_head_bias=None,
            labels=labels[None],
            shift_labels=False,  # labels[i] is that of hidden_states[i]
            logit_softcapping=head.softcap or 0.0,
        )

    return loss


def _pytorch(head: Head) -> Loss:
    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        refuse_softcap(head)
        fused: Any = vars(torch.nn.functional)["linear_cross_entropy"]
        options = vars(torch.nn)["LinearCrossEntropyOptions"]()
        return fused(hidden_states, weight, labels, ignore_index=IGNORE_INDEX, options=options)

    return loss


def _quack(head: Head, **options: Any) -> Loss:
    """Return its loss with its own choice of pipeline, or with the one of the options.

    QuACK 0.6.5's default on Hopper raises where H equals the chunk: then the chunk is half as long.
    """
    is_square = not options and head.hidden_size == QUACK_CHUNK

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        refuse_softcap(head)
        fused = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        return fused(
            hidden_states,
            weight,
            labels,
            chunk_size=QUACK_CHUNK // 2 if is_square else QUACK_CHUNK,
            ignore_index=IGNORE_INDEX,
            **options,
        )

    return loss


def refuse_softcap(head: Head) -> None:
    if head.softcap is not None:
        raise Unsupported("no softcap")
