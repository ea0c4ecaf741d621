"""TRL's experimental trainers that take logits, without them: ORPO, CPO (SimPO), TPO, Online-DPO,
A2PO, SDFT and SDPO.

    from liger_patch.integrations.trl_trainers import CPOConfig, CPOTrainer
    CPOTrainer(model, args=CPOConfig(use_liger_patch=True, loss_type="simpo", ...), ...)

All that their losses and metrics read of logits (B, T, V) is of the tokens that follow. One call
of the model computes it by ``linear_log_probs``, and TRL's own code gets it in place of the logits.
B: sequences, T: tokens of each, V: vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from liger_patch.apply import apply_patch
from liger_patch.integrations.trl import OnKernels
from liger_patch.integrations.trl_head import LogProbsCall
from liger_patch.patch.forward import record_of
from liger_patch.patch.packing import IGNORE_INDEX
from liger_patch.readers.wrapped_model import transformers_model

SAME_FOR_ALL = ("reshape", "view", "contiguous", "detach")  # methods that keep the vocabulary whole
OF_TENSORS = ("shape", "dtype", "device", "ndim")
FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1")  # of TRL's output, that are read
# of functional.cross_entropy, as given; others compute another loss
PLAIN = {"weight": None, "ignore_index": IGNORE_INDEX, "reduction": "mean", "label_smoothing": 0.0}


class NextTokens:
    """What stands for logits (..., V), less their log-sum-exp: what TRL's code reads of them. All
    else raises.

    Attributes:
        fields: (..., 1), as if of a vocabulary of one token: "labels" are the tokens that follow
            and count, and the others are outputs of ``LogProbsCall``.
        temperature: what the model's call has divided the logits by, and TRL's code has not yet.
    """

    def __init__(self, fields: dict[str, Tensor], temperature: float = 1.0) -> None:
        self.fields, self.temperature = fields, temperature

    def _each(self, function: Callable[[Tensor], Tensor]) -> NextTokens:
        fields = {name: function(value) for name, value in self.fields.items()}
        return NextTokens(fields, self.temperature)

    def _field(self, name: str, read: str, dim: int | None = -1) -> Tensor:
        if name not in self.fields or dim not in (-1, None):
            raise _not_computed(read)
        return self.fields[name]

    def __getattr__(self, name: str) -> Any:
        if name in OF_TENSORS:
            return getattr(self.fields["log_probs"], name)
        if name in SAME_FOR_ALL:
            return lambda *given: self._each(lambda value: getattr(value, name)(*given))
        raise _not_computed(name)

    def __getitem__(self, index: Any) -> NextTokens:
        return self._each(lambda value: value[index])

    def chunk(self, chunks: int, dim: int = 0) -> list[NextTokens]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def split(self, size: int, dim: int = 0) -> list[NextTokens]:
        parts = {name: value.split(size, dim) for name, value in self.fields.items()}
        return [
            NextTokens(dict(zip(parts, part, strict=True)), self.temperature)
            for part in zip(*parts.values(), strict=True)
        ]

    def stride(self, dim: int) -> int:
        return 0  # no memory: TRL's own Triton kernels take it for unsupported

    def __truediv__(self, temperature: float) -> NextTokens:
        if temperature != self.temperature:
            raise _not_computed(f"/ {temperature}")
        return NextTokens(self.fields)

    def log_softmax(self, dim: int) -> NextTokens:
        return self

    def __mul__(self, log_probs: object) -> Tensor:
        """Return what adds up to p log p over the vocabulary: ``exp`` of these is p."""
        if isinstance(log_probs, NextTokens):
            return -self._field("entropy", "*")
        return NotImplemented

    def mean(self, dim: int | None = None) -> Tensor:
        means = self._field("mean_logits", "mean", dim)
        return means.mean() if dim is None else means.squeeze(-1)

    def argmax(self, dim: int) -> Tensor:
        is_top1 = self._field("is_top1", "argmax", dim)
        return torch.where(is_top1, self.fields["labels"], -1).squeeze(-1)

    def sum(self) -> Tensor:
        return self.fields["log_probs"].sum()  # only ever times 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        logits, index = args[0], options.pop("index", args[-1])
        if not isinstance(logits, cls):
            return NotImplemented
        if func in (torch.exp, functional.log_softmax):
            return logits
        log_probs, labels = logits.fields["log_probs"], logits.fields["labels"]
        if func is torch.logsumexp:
            return torch.zeros_like(log_probs[..., 0])
        if func in (torch.gather, torch.take_along_dim) and index.shape == log_probs.shape:
            counted = (labels != IGNORE_INDEX) & (index != 0)  # 0: TRL masks the result
            _check_following(func, index, labels, counted)
            return log_probs
        is_plain = all(value == PLAIN.get(name) for name, value in options.items())
        if func is functional.cross_entropy and is_plain:
            supervised = index != IGNORE_INDEX
            _check_following(func, index, labels[:, 0], supervised)
            return -(log_probs[:, 0] * supervised).sum() / supervised.sum()
        return NotImplemented


def _check_following(func: Any, index: Tensor, labels: Tensor, counted: Tensor) -> None:
    wrong = counted & (index != labels)
    if wrong.any():
        asked, follows = (each[wrong][0].item() for each in (index, labels))
        raise _not_computed(f"{func.__name__} of token {asked} where {follows} follows")


def _not_computed(read: str) -> AttributeError:
    return AttributeError(
        f"'{read}' of logits is not computed with use_liger_patch=True; "
        "LIGER_PATCH_RETURN_LOGITS=1 gives the logits"
    )


def _call(
    model: Callable[..., Any],
    temperature: float,
    counted: Tensor | None,  # (B, T)
    last: int | None,
    input_ids: Tensor,  # (B, T)
    **inputs: Any,
) -> Any:
    """Call a model as TRL's loss does, and return ``NextTokens`` in place of its logits.

    Args:
        temperature: what the call divides the logits by.
        counted: 0 for the tokens whose log-probabilities count for nothing.
        last: how many tokens at the end are asked for. None for all of both.
    """
    labels = functional.pad(input_ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    if counted is not None:
        ignored = functional.pad(counted[:, 1:].to(labels.device), (0, 1)) == 0
        labels = labels.masked_fill(ignored, IGNORE_INDEX)
    if last is not None:
        before = torch.arange(labels.shape[1], device=labels.device) < labels.shape[1] - last - 1
        labels = labels.masked_fill(before, IGNORE_INDEX)
    kept = {name: inputs.pop(name) for name in ("logits_to_keep",) if name in inputs}
    output = model(input_ids, shift_labels=labels, fused_lm_head=True, **inputs)
    if output is None:  # the head cannot be fused, and a warning has said why
        return model(input_ids, **kept, **inputs)
    fields = {
        "labels": labels.to(output.loss.device),
        **{name: output[name] for name in FIELDS if name in output},
    }
    fields = {name: value[..., None] for name, value in fields.items()}
    logits = NextTokens(fields, temperature)
    return SimpleNamespace(
        logits=logits[:, -kept["logits_to_keep"] :] if kept else logits, aux_loss=output.aux_loss
    )


class _WithoutLogits(OnKernels):
    """What these trainers do with the flag. Without it they are TRL's to the last call."""

    outputs: tuple[str, ...] = ("log_probs",)  # of ``LogProbsCall``
    means_of_all = False

    def _patch_model(
        self, name: str, model: nn.Module, *, temperature: float = 1.0, **options: Any
    ) -> None:
        target = transformers_model(model)
        if target.config.is_encoder_decoder:
            return
        record = record_of(apply_patch(target, **options))
        assert record is not None
        how: dict[str, Any] = {"has_own_head": False, "means_of_all": self.means_of_all}
        record.fused_head_call = LogProbsCall(temperature, False, self.outputs, False, **how)

    def _asking(self, model: Any, counted: Tensor | None = None, last: int | None = None) -> Any:
        """Return what TRL's method calls as the model: see ``_call``."""
        trainer: Any = self
        record = record_of(transformers_model(trainer.accelerator.unwrap_model(model)))
        call = None if record is None else record.fused_head_call
        if not isinstance(call, LogProbsCall):
            return model
        return functools.partial(_call, model, call.temperature, counted, last)


class OfAnswers(_WithoutLogits):
    """CPO. Only answers pass through the head, unless it has a softcap: TRL's metrics ``logits/*``
    are means over prompts and padding too.
    """

    outputs = ("log_probs", "mean_logits")
    means_of_all = True

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        trls: Any = super()
        if cast(Any, self).is_encoder_decoder:  # its batches have other names
            return trls.concatenated_forward(model, batch)
        parts = self._counted(batch)
        longest = max(part.shape[1] for part in parts)
        counted = [functional.pad(part, (0, longest - part.shape[1])) for part in parts]
        return trls.concatenated_forward(self._asking(model, torch.cat(counted)), batch)

    def _counted(self, batch: dict[str, Any]) -> list[Tensor]:
        """Return (B, T) bool of the chosen and of the rejected rows."""
        return [batch[f"{kind}_labels"] != IGNORE_INDEX for kind in ("chosen", "rejected")]


class OfAnswersAndPrompts(OfAnswers):
    """ORPO, whose likelihood is that of the chosen prompts too."""

    def _counted(self, batch: dict[str, Any]) -> list[Tensor]:
        return [batch["chosen_attention_mask"] == 1, super()._counted(batch)[1]]


class OfTriples(_WithoutLogits):
    """TPO."""

    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        trls: Any = super()
        if not return_outputs:
            model = self._asking(model, inputs["completion_mask"])
        return trls._compute_loss(model, inputs, return_outputs)


class OfPairs(_WithoutLogits):
    """Online-DPO, whose metrics count what follows an answer's end."""

    def _forward(
        self,
        model: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        *others: Any,
        **named: Any,
    ) -> Any:
        trls: Any = super()
        asked = self._asking(model, last=completion_ids.shape[1])
        return trls._forward(asked, prompt_ids, prompt_mask, completion_ids, *others, **named)


class OfSequences(_WithoutLogits):
    """A2PO."""

    def _get_sequence_logps(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
    ) -> Any:
        trls: Any = super()
        asked = self._asking(model, attention_mask, logits_to_keep)
        return trls._get_sequence_logps(asked, input_ids, attention_mask, logits_to_keep)


class OfOneself(_WithoutLogits):
    """SDFT and SDPO of the tokens that were sampled; other modes compare logits."""

    def _patch_model(self, name: str, model: nn.Module, **options: Any) -> None:
        temperature = cast(Any, self).args.temperature
        super()._patch_model(name, model, temperature=temperature, **options)

    def _forward_logits(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
    ) -> Any:
        trls, trainer = cast(Any, super()), cast(Any, self)
        if trainer.args.distillation_mode == "sampled_token":
            model = self._asking(model, attention_mask, logits_to_keep)
        return trls._forward_logits(model, input_ids, attention_mask, logits_to_keep)
