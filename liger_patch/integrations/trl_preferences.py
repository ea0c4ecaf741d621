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

from liger_patch.apply import apply_patch, transformers_model
from liger_patch.integrations import trl_trainers
from liger_patch.integrations.trl import OnKernels
from liger_patch.integrations.trl_head import LogProbsCall
from liger_patch.patch.forward import record_of
from liger_patch.patch.packing import IGNORE_INDEX

SAME_FOR_ALL = ("reshape", "view", "contiguous", "detach")  # methods that keep the vocabulary whole
OF_TENSORS = ("shape", "dtype", "device", "ndim")
FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1")  # of TRL's output, that are read


class NextTokens:
    """What stands for logits (..., V) in TRL's code: what it reads of them.

    Attributes:
        fields: (..., 1), as if of a vocabulary of one token: "labels" are the tokens that follow,
            and the others are outputs of ``LogProbsCall``.
    """

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self.fields = fields

    def _each(self, function: Callable[[Tensor], Tensor]) -> NextTokens:
        return NextTokens({name: function(value) for name, value in self.fields.items()})

    def __getattr__(self, name: str) -> Any:
        if name in OF_TENSORS:
            return getattr(self.fields["log_probs"], name)
        if name in SAME_FOR_ALL:
            return lambda *given: self._each(lambda value: getattr(value, name)(*given))
        raise AttributeError(
            f"'{name}' of logits is not computed with use_liger_patch=True; "
            "LIGER_PATCH_RETURN_LOGITS=1 gives the logits"
        )

    def __getitem__(self, index: Any) -> NextTokens:
        return self._each(lambda value: value[index])

    def chunk(self, chunks: int, dim: int = 0) -> list[NextTokens]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def split(self, size: int, dim: int = 0) -> list[NextTokens]:
        count = -(-self.shape[dim] // size)
        parts = (lambda value, i=i: value.split(size, dim)[i] for i in range(count))
        return [self._each(part) for part in parts]

    def stride(self, dim: int) -> int:
        return 0  # no memory: TRL's own Triton kernels take it for unsupported

    def __truediv__(self, temperature: float) -> NextTokens:
        return self  # the model's call has divided by it

    def log_softmax(self, dim: int) -> NextTokens:
        return self

    def __mul__(self, log_probs: NextTokens) -> Tensor:
        """Return what adds up to p log p over the vocabulary: ``exp`` of these is p."""
        return -self.fields["entropy"]

    def mean(self, dim: int | None = None) -> Tensor:
        means = self.fields["mean_logits"]
        return means.mean() if dim is None else means.squeeze(-1)

    def argmax(self, dim: int) -> Tensor:
        return torch.where(self.fields["is_top1"], self.fields["labels"], -1).squeeze(-1)

    def sum(self) -> Tensor:
        return self.fields["log_probs"].sum()  # only ever times 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        logits, index = args[0], (kwargs or {}).get("index", args[-1])
        if not isinstance(logits, cls):
            return NotImplemented
        if func in (torch.exp, functional.log_softmax):
            return logits
        log_probs = logits.fields["log_probs"]
        if func is torch.logsumexp:
            return torch.zeros_like(log_probs[..., 0])
        if func in (torch.gather, torch.take_along_dim) and index.shape == log_probs.shape:
            return log_probs
        if func is functional.cross_entropy:
            supervised = index != IGNORE_INDEX
            return -(log_probs[:, 0] * supervised).sum() / supervised.sum()
        return NotImplemented


def _call(
    model: Callable[..., Any],
    counted: Tensor | None,  # (B, T)
    last: int | None,
    input_ids: Tensor,  # (B, T)
    **inputs: Any,
) -> Any:
    """Call a model as TRL's loss does, and return ``NextTokens`` in place of its logits.

    Args:
        counted: 0 for the tokens whose log-probabilities count for nothing.
        last: how many tokens at the end are asked for. None for all of both.
    """
    following = functional.pad(input_ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    labels = following
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
    fields = {"labels": following, **{name: output[name] for name in FIELDS if name in output}}
    logits = NextTokens({name: value[..., None] for name, value in fields.items()})
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
        if record is None or not isinstance(record.fused_head_call, LogProbsCall):
            return model
        return functools.partial(_call, model, counted, last)


class OfAnswers(_WithoutLogits):
    """CPO. Only answers pass through the head, unless it has a softcap: TRL's metrics ``logits/*``
    are means over prompts and padding too.
    """

    outputs = ("log_probs", "mean_logits")
    means_of_all = True

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        trls: Any = super()
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
        self, model: Any, prompt_ids: Any, prompt_mask: Any, ids: Any, *others: Any
    ) -> Any:
        trls: Any = super()
        asked = self._asking(model, last=ids.shape[1])
        return trls._forward(asked, prompt_ids, prompt_mask, ids, *others)


class OfSequences(_WithoutLogits):
    """A2PO."""

    def _get_sequence_logps(
        self, model: Any, ids: Tensor, mask: Tensor, logits_to_keep: int
    ) -> Any:
        trls: Any = super()
        asked = self._asking(model, mask, logits_to_keep)
        return trls._get_sequence_logps(asked, ids, mask, logits_to_keep)


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


def __getattr__(name: str) -> Any:
    """Return what version 0.1 had here: the trainers of ORPO and CPO."""
    return getattr(trl_trainers, name)
