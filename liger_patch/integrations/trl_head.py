"""TRL's fused head as a model is called with it, ``model(..., fused_lm_head=True)``: what TRL has
made of the model's ``forward``, and the same output on the kernels of this package.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import trl
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from liger_patch.deferred.fuse import (
    Decision,
    HeadProduct,
    fused_log_probs,
    mean_of_all_logits,
)
from liger_patch.deferred.tensor import DeferredLogits, prepare_backward
from liger_patch.kernels.linear_log_probs import LogProbs
from liger_patch.layers.masked_attention import UsedTokens
from liger_patch.patch import flags
from liger_patch.patch.fallback import why_transformed
from liger_patch.patch.forward import (
    defer_logits,
    leads_to_patch,
    one_at_a_time,
    patched_class,
    record_of,
)
from liger_patch.patch.labels import LOSS_WEIGHTS, used_tokens
from liger_patch.patch.packing import IGNORE_INDEX, has_other_layers, next_labels
from liger_patch.patch.settings import LossSettings, PatchRecord

SUPPORTED = "trl 1.15 and 1.16"
LEFT_TO_TRL = "leaves the head to TRL"  # what a warning says of a head that is not fused
FLAG_READ = "_liger_patch_read"  # attribute of a configuration that a trainer here was given
OF_HEAD = ("labels", "shift_labels", "num_items_in_batch")  # arguments of a call of TRL's head
HEAD_OPTIONS = ("temperature", "cast_lm_head_to_fp32", "outputs")  # of trl's add_fused_lm_head

try:
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    raise ImportError(
        f"liger_patch.integrations.trl supports {SUPPORTED}, whose trainers have a fused head; "
        f"got trl {trl.__version__}"
    ) from error


@dataclass
class Flag:
    """The option that a configuration of TRL's has in this package.

    Args:
        use_liger_patch: whether the trainer of this package runs on its kernels.
    """

    use_liger_patch: bool = field(
        default=False, metadata={"help": "Compute log-probabilities with liger_patch's kernels."}
    )

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return TRL's number of steps, as each trainer asks when it makes its scheduler. Warn of
        one that does not know the flag.
        """
        if self.use_liger_patch and not vars(self).get(FLAG_READ):
            message = (
                f"{type(self).__name__}(use_liger_patch=True) was given to a trainer that does not "
                "know the flag: take that of liger_patch.integrations.trl or trl_trainers"
            )
            if flags.return_logits() is False:
                raise RuntimeError(f"LIGER_PATCH_RETURN_LOGITS=0 demands the fused loss: {message}")
            warnings.warn(f"liger_patch: {message}", stacklevel=2)
        trls: Any = super()
        return trls.get_warmup_steps(num_training_steps)


def is_flagged(args: Any) -> bool:
    """Return ``use_liger_patch`` of a trainer's arguments; False for those that lack it.

    Raises:
        ValueError: it is no bool.
    """
    flag = getattr(args, "use_liger_patch", False)
    if not isinstance(flag, bool):
        raise ValueError(f"use_liger_patch must be True or False, got {flag!r}")
    if isinstance(args, Flag):
        vars(args)[FLAG_READ] = True
    return flag


def trls_head(model: PreTrainedModel) -> tuple[dict[str, Any], bool] | None:
    """Return what TRL has made of a model's own ``forward``, by its variables, or None.

    Returns:
        the options of TRL's ``add_fused_lm_head``, by name; and whether other calls may leave out
        TRL's wrapper. What it calls may be wrong: the forward of the model that it was made for,
        which may have been copied since, or wrappers of an earlier patch.
    """
    forward: Any = vars(model).get("forward")
    outermost = True
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        code = getattr(function, "__code__", None)
        if code is not None and {*HEAD_OPTIONS, "original_forward"} <= {*code.co_freevars}:
            free = inspect.getclosurevars(function).nonlocals
            inner = free["original_forward"]
            is_own = getattr(inner, "__func__", None) is type(model).forward
            is_earlier = leads_to_patch(inner, patched_class(type(model)))
            options = {name: free[name] for name in HEAD_OPTIONS}
            return options, outermost and (is_own or is_earlier)
        forward, outermost = getattr(function, "__wrapped__", None), False
    return None


def check_loss_is_trls(settings: LossSettings) -> None:
    """Raise ValueError where options of ``apply_patch`` ask for a loss that is not TRL's."""
    if settings.changed:
        raise ValueError(
            f"{settings.changed} has no part in TRL's loss: use the options of apply_patch with "
            "their defaults, and those of the trainer's configuration"
        )


@dataclass
class LogProbsCall:
    """``model(..., labels=labels, fused_lm_head=True)``.

    Attributes:
        temperature, cast_lm_head_to_fp32, outputs: what TRL's trainer asked of its own head.
        same_gradient: see ``linear_log_probs``.
        has_own_head: whether TRL has added its own head to the model, for what cannot be fused.
        means_of_all: whether ``mean_logits`` are those of tokens without a label too.
        left_to_trl: why a forward pass found that the head cannot be fused: all later calls are
            left to TRL. None before that.
        row_weights: (B, K) of the calls from now on, of their last K labels: see
            ``linear_log_probs``.
    """

    fallback_text: ClassVar[str] = LEFT_TO_TRL
    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]
    same_gradient: bool
    has_own_head: bool = True
    means_of_all: bool = False
    left_to_trl: str | None = None
    row_weights: Tensor | None = None

    def handles(self, kwargs: dict[str, Any]) -> bool:
        return bool(kwargs.get("fused_lm_head"))

    def __call__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        record = record_of(model)
        assert record is not None
        if LOSS_WEIGHTS in kwargs:
            raise ValueError(f"fused_lm_head=True takes no {LOSS_WEIGHTS}: TRL computes the loss")
        own = {name: kwargs.get(name) for name in OF_HEAD}
        if own["labels"] is None and own["shift_labels"] is None:
            raise ValueError("fused_lm_head=True needs labels or shift_labels, got neither")
        check_loss_is_trls(record.settings)
        output = self._fused(model, record, forward, args, kwargs, own)
        if output is not None:
            return output
        if not self.has_own_head:
            return None
        if _has_adapters_on_head(model):  # they came after TRL looked for them
            raise RuntimeError(
                f"{type(model).__name__} has adapters on its head, which TRL's own head leaves "
                f"out, and liger_patch does not compute it: {record.reason}"
            )
        assert record.replaced_forward is not None
        return record.replaced_forward(*args, **kwargs)

    def _fused(
        self,
        model: PreTrainedModel,
        record: PatchRecord,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        own: dict[str, Any],
    ) -> Any:
        """Return TRL's output, or None where the record says why not."""
        with one_at_a_time(model), ExitStack() as stack:
            forward_pass = defer_logits(
                stack, model, record, flags.return_logits(), why_transformed()
            )
            why = forward_pass.unfused or self.left_to_trl
            if why is not None:
                record.note(why)
                return None
            targets = own["shift_labels"]  # (B, T): what the logits at each position predict
            if targets is None:
                targets = next_labels(own["labels"], IGNORE_INDEX)
            used = functools.partial(used_tokens, model, record, targets, IGNORE_INDEX, kwargs)
            used = None if self.means_of_all else used
            with UsedTokens(used, sees_before=has_other_layers(model)):
                others = {k: v for k, v in kwargs.items() if k not in (*OF_HEAD, "fused_lm_head")}
                outputs = forward(*args, **others | {"use_cache": False})
        logits: Tensor = outputs.logits
        labels = targets.to(logits.device)
        decision = forward_pass.decide(
            logits, labels.reshape(-1), logits.shape[-1], ignore_index=IGNORE_INDEX
        )
        if decision.product is not None and self.cast_lm_head_to_fp32:
            decision = _in_float32(decision.product)
        record.note(decision.reason)
        if decision.product is None:
            self.left_to_trl = decision.reason
            return None
        record.before_loss()
        means = mean_of_all_logits(decision.product) if self.means_of_all else None
        if self.means_of_all and means is None:
            labels = labels.clamp(min=0)  # the head's product of all tokens
        flat = fused_log_probs(
            decision.product,
            labels.reshape(-1),
            temperature=self.temperature,
            outputs=[n for n in self.outputs if means is None or n != "mean_logits"],
            same_gradient=self.same_gradient,
            row_weights=self._row_weights(labels),
            chunk_mib=record.chunk_mib,
        )
        prepare_backward(flat.log_probs, cast(DeferredLogits, logits))
        if means is not None:
            flat = flat._replace(mean_logits=means / self.temperature)
        return self._output(model, outputs, labels, flat, own)

    def _row_weights(self, labels: Tensor) -> Tensor | None:
        """Return (B * T,) for labels (B, T) that each position predicts."""
        weights = self.row_weights
        if weights is None:
            return None
        before = labels.shape[1] - 1 - weights.shape[1]
        return functional.pad(weights, (before, 1)).reshape(-1).to(labels.device)

    def _output(
        self,
        model: PreTrainedModel,
        outputs: Any,
        labels: Tensor,  # (B, T)
        flat: LogProbs,  # (B * T,) each
        own: dict[str, Any],
    ) -> Any:
        """Return TRL's output; ``outputs``: of the model's own forward."""
        shape = labels.shape
        if own["shift_labels"] is None:
            labels = labels[..., :-1]  # nothing follows the last token
        per_token: dict[str, Any] = {
            name: None if value is None else value.reshape(shape)[:, : labels.shape[1]]
            for name, value in flat._asdict().items()
            if name in ("log_probs", *self.outputs)
        }
        mask = labels != IGNORE_INDEX
        count = own["num_items_in_batch"]
        loss = -per_token["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else count)
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is not None:
            config = model.config.get_text_config()
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **per_token)


def _has_adapters_on_head(model: PreTrainedModel) -> bool:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(model.get_output_embeddings(), tuners.BaseTunerLayer)


def _in_float32(product: HeadProduct) -> Decision:
    """Return the head outside autocast, where the trainer has cast it to float32; or the reason."""
    tensors = (product.hidden_states, product.weight, product.bias)
    if all(t is None or t.dtype == torch.float32 for t in tensors):
        return Decision(product._replace(autocast_dtype=None))
    return Decision(reason="cast_lm_head_to_fp32=True, and the head is not in float32")
