"""The class that a patched model instance gets: its own, with another ``forward``.

An instance's class and one attribute change, and nothing else: see ``subclass``.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_patch.deferred.capture import defer_head, replace_attribute
from liger_patch.deferred.engines import in_process_group
from liger_patch.deferred.kept_weight import keeping_units
from liger_patch.deferred.record import real
from liger_patch.kernels.graphs import between_graphs, is_exporting, is_traced
from liger_patch.layers.checks import decoding
from liger_patch.layers.masked_attention import UsedTokens
from liger_patch.layers.recurrent import PACKED
from liger_patch.patch import flags
from liger_patch.patch.adapters import follow_adapters, follow_classes, warning_of_dtypes
from liger_patch.patch.fallback import (
    note_loss_outside,
    note_other_forward,
    why_loss_is_other,
    why_not_deferred,
    why_transformed,
)
from liger_patch.patch.labels import (
    HANDS_OVER,
    LOSS_WEIGHTS,
    expected_labels,
    gives_logits_to_loss,
    take_weights,
    used_by_loss,
    weights_of_targets,
)
from liger_patch.patch.loss import ForwardPass
from liger_patch.patch.packing import (
    IGNORE_INDEX,
    giving_rows,
    has_other_layers,
    leaking_labels,
    look_at_packing,
)
from liger_patch.patch.settings import LOGITS_ASKED, PatchRecord, TrialRecord
from liger_patch.patch.verify import compare_losses
from liger_patch.subclass import (
    ORIGINAL,
    derived_class,
    once_for_each_class,
)

RECORD = "_liger_patch"  # attribute of a patched instance: its PatchRecord
WHY_REAL = "_liger_patch_why"  # attribute of real logits of a call in deferred_logits(): why
_defers: ContextVar[bool] = ContextVar("defers", default=False)  # in deferred_logits()
_LOCKS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()


def record_of(model: PreTrainedModel) -> PatchRecord | None:
    """Return the record of a patched model, None for any other."""
    return vars(model).get(RECORD) if hasattr(type(model), ORIGINAL) else None


@once_for_each_class
def patched_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the subclass of ``original`` for patched instances: same name, same signature."""
    signature = inspect.signature(original.forward)
    names = tuple(signature.parameters)[1:]

    def named_arguments(args, kwargs):
        # no zip: Dynamo of torch 2.6 does not trace its ``strict``
        return {**{names[i]: value for i, value in enumerate(args[: len(names)])}, **kwargs}

    def call(self, record, args, kwargs, compiled=None):
        inner: Callable[..., Any] = functools.partial(original.forward, self)
        replaced = None if record is None or record.passes_through else record.replaced_forward
        if replaced is not None:
            inner = replaced
        fused_head_call = None if record is None else record.fused_head_call
        if fused_head_call is not None and fused_head_call.handles(kwargs):
            inner = inner if compiled is None else compiled(inner)
            return fused_head_call(self, inner, args, kwargs)
        if record is None:
            return inner(*args, **kwargs)
        weights = take_weights(kwargs)
        named = named_arguments(args, kwargs)
        if named.get("labels") is None:
            if not is_traced() and _defers.get():
                return _forward_without_loss(self, record, inner, args, kwargs)
            with _context_without_labels(named):
                outputs = inner(*args, **kwargs)
            if self.training and torch.is_grad_enabled():
                note_loss_outside(record, outputs)
            return outputs
        return _forward_with_loss(self, record, inner, args, kwargs, named, weights, compiled)

    def patched_forward(self, *args, **kwargs):
        record = vars(self).get(RECORD)
        if record is None or torch.compiler.is_compiling():
            return call(self, record, args, kwargs)
        follow_classes(self, record)
        if "peft_config" in vars(self):
            follow_adapters(self, record)
        with ExitStack() as stack:
            if record.unpacks:
                named = named_arguments(args, kwargs)
                kwargs = {**kwargs, **stack.enter_context(giving_rows(self, record, named))}
            if record.adapters is not None and not record.checked_dtypes:
                stack.enter_context(warning_of_dtypes(self, record))
            if in_process_group():
                stack.enter_context(keeping_units(self, self.get_output_embeddings()))
            if record.offload is not None and _keeps_checkpoints():
                stack.enter_context(record.offload.forward_pass(self))
            return call(self, record, args, kwargs)

    vars(patched_forward)["__signature__"] = signature

    # accelerate's unwrap_model(keep_fp32_wrapper=False) follows __wrapped__ from the bound
    # method to a function and binds that again: one must be there, and it must be the patched one
    @functools.wraps(original.forward)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            record = record_of(self)
            if record is not None and named_arguments(args, kwargs).get("labels") is not None:
                return between_graphs(call, self, record, args, kwargs)
        return patched_forward(self, *args, **kwargs)

    forward.__wrapped__ = patched_forward

    def __setattr__(self, name, value):
        if name == "forward" and (record := record_of(self)) is not None:
            note_other_forward(record, value)
        original.__setattr__(self, name, value)

    attributes: dict[str, Any] = {
        "forward": forward,
        "__setattr__": __setattr__,
        HANDS_OVER: gives_logits_to_loss(original),
    }
    return derived_class(original, patched_class, **attributes)


@contextmanager
def deferred_logits() -> Iterator[None]:
    """Defer the logits of patched models that are called without labels within this context, for
    ``distillation_loss``: they are computed where something else reads them.
    """
    token = _defers.set(True)
    try:
        yield
    finally:
        _defers.reset(token)


def _forward_without_loss(
    model: PreTrainedModel,
    record: PatchRecord,
    inner: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Run the model's forward with deferred logits, and no loss."""
    with one_at_a_time(model), UsedTokens(), ExitStack() as stack:
        forward_pass = defer_logits(stack, model, record, flags.return_logits(), why_transformed())
        outputs = inner(*args, **kwargs)
    logits = getattr(outputs, "logits", None)
    if forward_pass.unfused is not None and isinstance(logits, Tensor):
        vars(logits)[WHY_REAL] = forward_pass.unfused
    return outputs


def _context_without_labels(named: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Return what a call without labels runs in."""
    if is_traced():
        return nullcontext()
    ids = named.get("input_ids")
    ids = named.get("inputs_embeds") if ids is None else ids
    is_one_token = isinstance(ids, Tensor) and ids.dim() > 1 and ids.shape[1] == 1
    return decoding() if is_one_token and not torch.is_grad_enabled() else UsedTokens()


def _keeps_checkpoints() -> bool:
    """Return whether hooks of this package see the tensors that this forward pass saves."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return why_transformed() is None


def leads_to_patch(forward: Callable[..., Any] | None, patched: type[PreTrainedModel]) -> bool:
    """Return whether an instance's own ``forward`` (of accelerate) wraps the patched class's."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if forward in (patched.forward, inspect.unwrap(patched.forward)):
            return True
        # accelerate's hooks are partials that wrap a forward; others may be plain ones of it
        inner = forward.func if isinstance(forward, functools.partial) else None
        forward = getattr(forward, "__wrapped__", inner)
    return False


def _forward_with_loss(
    model: PreTrainedModel,
    record: PatchRecord,
    inner: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    named: dict[str, Any],
    weights: Tensor | None,  # (B, T)
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
) -> Any:
    """Run the model's forward with deferred logits.

    Args:
        named: all arguments by their names.
        compiled: see ``between_graphs``; None outside of it.
    """
    return_logits = flags.return_logits()
    labels = named["labels"]
    compares = not record.tested and _is_to_be_compared(model, record, labels, return_logits)
    if compares:

        def forward(trial: TrialRecord, args: tuple, kwargs: dict[str, Any]) -> Any:
            return _deferred_forward(model, trial, inner, args, kwargs, {}, None, None, None)

        compare_losses(model, record, forward, args, kwargs)
    inner = inner if compiled is None else compiled(inner)
    # shift_labels are predicted as they are; of a split sequence, position ids say nothing
    is_shifted, is_weighted = named.get("shift_labels") is not None, weights is not None
    is_transformers_loss = return_logits is True and not (record.settings.changed or is_weighted)
    leaks = None
    if not (is_transformers_loss or is_shifted) and isinstance(labels, Tensor):
        leaks = leaking_labels(labels, named)
    ignore_index = named.get("ignore_index", IGNORE_INDEX)  # an option of Transformers' loss
    if record.tested and named.get("position_ids") is not None:
        look_at_packing(model, record, None if is_weighted else leaks, ignore_index, named)
    # models that are not tested may not shift their labels: see causal_lm_loss
    if leaks is not None and record.tested:
        # whatever loss the model computes, no token predicts the first of the next sequence
        labels = labels.masked_fill(leaks, ignore_index)
        place = list(named).index("labels")  # positional arguments come first
        if place < len(args):
            args = (*args[:place], labels, *args[place + 1 :])
        else:
            kwargs = {**kwargs, "labels": labels}
    named = {**named, "labels": labels}
    try:
        return _deferred_forward(
            model, record, inner, args, kwargs, named, weights, leaks, return_logits
        )
    except Exception:
        if compares:  # what could not be compared may be this call alone
            record.compared = None
        raise


def _deferred_forward(
    model: PreTrainedModel,
    record: PatchRecord,
    inner: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    named: dict[str, Any],  # all arguments by their names; {} where the loss is not to expect any
    weights: Tensor | None,  # (B, T)
    leaks: Tensor | None,  # (B, T)
    return_logits: bool | None,
) -> Any:
    """Run the model's forward with deferred logits and the loss of this package."""
    with one_at_a_time(model):  # before its loss function is read
        runs_own = isinstance(record, TrialRecord) and not record.defers
        other, traced = why_loss_is_other() or why_transformed(), is_traced()
        is_transformers_loss = model.loss_function is ForCausalLMLoss and not other
        with ExitStack() as stack:
            forward_pass = defer_logits(stack, model, record, return_logits, other)
            forward_pass.leaks = leaks
            if weights is not None:
                shifted = named.get("shift_labels") is not None
                labels = named["shift_labels" if shifted else "labels"]
                forward_pass.loss_weights = functools.partial(
                    weights_of_targets, weights, labels, shifted
                )
            if runs_own and forward_pass.head is not None:
                _read_logits(stack, forward_pass.head)
            elif is_transformers_loss:
                _replace_loss_function(stack, model, forward_pass.causal_lm_loss)
                if not (traced or forward_pass.unfused):
                    forward_pass.expected = expected_labels(forward_pass.head, named)
            elif PACKED in kwargs:  # keywords of the forward reach the loss
                own = model.loss_function

                def without_rows(*args: Any, **how: Any) -> Any:
                    return own(*args, **{n: v for n, v in how.items() if n != PACKED})

                _replace_loss_function(stack, model, without_rows)
            if not traced:
                used = UsedTokens(
                    functools.partial(used_by_loss, model, record, forward_pass.expected, named),
                    sees_before=has_other_layers(model),
                )
                stack.enter_context(used)
                forward_pass.used = used if torch.is_grad_enabled() else None
            outputs = inner(*args, **kwargs)
        lacks_option = forward_pass.unreached and not forward_pass.is_causal
        if not forward_pass.done or lacks_option:
            _note_own_loss(model, record, forward_pass)
    return outputs


def _is_to_be_compared(
    model: PreTrainedModel, record: PatchRecord, labels: object, return_logits: bool | None
) -> bool:
    """Return whether a model without a row in the registry is called with labels for the first
    time, and its logits would be deferred.
    """
    if record.compared or record.distrusted or not isinstance(labels, Tensor):
        return False
    if return_logits is True or why_loss_is_other() or why_transformed():
        return False
    return why_not_deferred(model, model.get_output_embeddings()) is None


def one_at_a_time(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Return the lock of a model whose head and loss function are replaced for a forward pass."""
    if torch.compiler.is_compiling():  # Dynamo does not trace locks
        return nullcontext()
    return _LOCKS.setdefault(model, threading.RLock())


def defer_logits(
    stack: ExitStack,
    model: PreTrainedModel,
    record: PatchRecord,
    return_logits: bool | None,
    why_not: str | None,
) -> ForwardPass:
    """Defer the logits of a patched model until the stack is closed, unless something prevents it
    or LIGER_PATCH_RETURN_LOGITS=1 asks for real ones.

    Args:
        stack: undoes it; within ``one_at_a_time``.
        why_not: what is known to prevent it, of ``why_transformed`` and ``why_loss_is_other``.
    """
    head = model.get_output_embeddings()
    unfused = LOGITS_ASKED if return_logits is True else record.distrusted or why_not
    unfused = unfused or why_not_deferred(model, head)
    forward_pass = ForwardPass(record, head, unfused, isinstance(record, TrialRecord))
    stack.callback(setattr, forward_pass, "running", False)
    if head is not None and unfused is None:
        defer_head(stack, model, head, forward_pass)
    return forward_pass


def _read_logits(stack: ExitStack, head: nn.Module) -> None:
    """Make a head that returns deferred logits return real ones, until the stack is closed."""
    forward = head.forward
    replace_attribute(stack, head, "forward", lambda *args, **how: real(forward(*args, **how)))


def _note_own_loss(model: PreTrainedModel, record: PatchRecord, forward_pass: ForwardPass) -> None:
    """Record that the model has computed its loss by its own code, on real logits.

    Raises:
        ValueError: options or weights were asked for, which that loss does not know.
    """
    name = type(model).__name__
    if forward_pass.changed:
        why = why_loss_is_other() or "it is not Transformers' ForCausalLMLoss"
        raise ValueError(
            f"{forward_pass.changed} cannot reach the loss that {name} computes: {why}. Use the "
            f"options of apply_patch with their defaults, and no {LOSS_WEIGHTS}"
        )
    why = forward_pass.unfused
    record.note(why or f"{name} computes a loss of its own: {forward_pass.why_not_recorded}")


def _replace_loss_function(
    stack: ExitStack, model: PreTrainedModel, loss_function: Callable[..., Any]
) -> None:
    """Set what ``model.loss_function`` gives, a property of Transformers or an attribute of the
    class, until the stack is closed.
    """
    is_property = isinstance(getattr(type(model), "loss_function", None), property)
    name = "_loss_function" if is_property else "loss_function"
    replace_attribute(stack, model, name, loss_function)
