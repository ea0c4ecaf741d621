"""Rows that hold several sequences: where each begins, what recurrent layers are told, and warnings
of packed rows that the model or the caller does not take for what they are. B: rows, T: tokens of a
row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from liger_patch.kernels.graphs import is_traced
from liger_patch.layers.recurrent import (
    CACHES,
    PACKED,
    PackedRows,
    carrying_layers,
    gives_masks_positions,
    packed_rows,
    takes_index,
    takes_packed_rows,
)
from liger_patch.patch.settings import PatchRecord

# the layers whose tokens only see what their mask shows, by Transformers' names
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
IN_PATCHES = ("blt",)  # model types whose bytes see the patch before them, padding or not
IGNORE_INDEX = -100  # of Transformers' and TRL's collators


def sequence_starts(shape: torch.Size, arguments: Mapping[str, Any]) -> Tensor | None:
    """Return (B, T) bool, True at the first token of each sequence, for labels of this shape; None
    where no argument says that rows hold several.

    A sequence begins:

    - where position ids do not rise from one token to the next. Tokens that an attention mask
      (B, T) leaves out are skipped. A row whose position ids never rise says nothing;
    - where ``seq_idx`` (B, T) changes;
    - at ``cu_seq_lens_q`` (sequences + 1,), which count along all rows.

    Position ids are (B, T), or (4, B, T) with those of the text first. Other shapes say nothing.

    Raises:
        ValueError: ``seq_idx`` or ``cu_seq_lens_q`` of another form.
    """
    if len(shape) != 2:
        return None
    begins = restarts(arguments.get("position_ids"), arguments.get("attention_mask"), shape)
    index, ends = arguments.get("seq_idx"), arguments.get("cu_seq_lens_q")
    found = [] if begins is None else [begins]
    if index is not None:
        if not isinstance(index, Tensor) or not _fits(index, shape):
            raise ValueError(f"seq_idx must be a tensor {tuple(shape)}, got {_form(index)}")
        found.append(_after_first(index[:, 1:] != index[:, :-1]))
    if ends is not None:
        is_vector = isinstance(ends, Tensor) and ends.dim() == 1 and len(ends) > 1
        if not is_vector or ends.is_floating_point() or ends.dtype == torch.bool:
            raise ValueError(
                "cu_seq_lens_q must be an integer tensor (sequences + 1,), at least (2,), "
                f"got {_form(ends)}"
            )
        flat = torch.zeros(shape.numel() + 1, dtype=torch.bool, device=ends.device)
        flat.index_fill_(0, ends.to(torch.int64).clamp(0, shape.numel()), True)
        found.append(flat[:-1].view(shape))
    if not found:
        return None
    starts = found[0].expand(shape).clone()
    for other in found[1:]:
        starts |= other.to(starts.device)
    starts[:, :1] = True
    return starts


def leaking_labels(labels: Tensor, arguments: Mapping[str, Any]) -> Tensor | None:
    """Return (B, T) bool, True for labels that the last token of another sequence would predict:
    those of the first token of each sequence behind another in its row. None where no argument says
    that rows hold several.

    A label that is not the token in its place is the user's own, as the ``separator_id`` of
    Transformers' ``DataCollatorWithFlattening`` is: that last token is to predict it.
    """
    starts, input_ids = sequence_starts(labels.shape, arguments), arguments.get("input_ids")
    if starts is None:
        return None
    leaks = starts.to(labels.device)
    leaks[:, :1] = False
    if isinstance(input_ids, Tensor) and input_ids.shape == labels.shape:
        leaks &= labels == input_ids.to(labels.device)
    return leaks


def next_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """Return (B, T) what each token predicts: the next label of its row."""
    targets = torch.full_like(labels, ignore_index, memory_format=torch.contiguous_format)
    targets[..., :-1] = labels[..., 1:]
    return targets


def sequences_are_split() -> bool:
    """Return whether a parallelism of accelerate gives each process a part of each sequence.

    The parts' position ids do not say where sequences begin: a process may hold the middle of one,
    and context parallelism joins two distant parts.
    """
    if "accelerate" not in sys.modules:
        return False
    from accelerate.state import AcceleratorState

    config = getattr(AcceleratorState, "_shared_state", {}).get("parallelism_config")
    return any((getattr(config, name, None) or 1) > 1 for name in ("cp_size", "sp_size"))


def restarts(positions: object, mask: object, shape: torch.Size) -> Tensor | None:
    """Return (B, T) bool, True where position ids do not rise from the last kept token to this one;
    None where position ids or mask have another shape. See ``sequence_starts``.
    """
    if not isinstance(positions, Tensor):
        return None
    places = _of_text(positions)
    if not _fits(places, shape):
        return None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if not _fits(mask, shape):
            return None
        kept, places = torch.broadcast_tensors(mask.to(places.device).bool(), places)
        index = torch.arange(shape[1], device=places.device)
        before = index.where(kept, -1).cummax(1).values[:, :-1]  # the last kept token
        follows = kept[:, 1:] & (before >= 0)
        rises = places[:, 1:] > places.gather(1, before.clamp(min=0))
    else:
        rises = places[:, 1:] > places[:, :-1]
        follows = torch.ones_like(rises)
    begins = follows & ~rises & (follows & rises).any(1, keepdim=True)
    return _after_first(begins)


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


def _fits(tensor: Tensor, shape: torch.Size) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] in (1, shape[0]) and tensor.shape[1] == shape[1]


def _after_first(begins: Tensor) -> Tensor:
    """Return (B, T) of (B, T - 1): a row's first token begins a sequence."""
    return pad(begins, (1, 0), value=True)


LOOKS = 4  # at training calls with position ids: at each, the host waits for the device
SAY_WHERE = "seq_idx", "cu_seq_lens_q"  # arguments for kernels: others raise where they get them


@contextmanager
def giving_rows(
    model: PreTrainedModel, record: PatchRecord, arguments: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the keywords that the forward is to hand down to recurrent layers. Warn if packed rows
    have not reached all of them.

    A training step and packed rows make no cache unless they were asked to: with one, layers run
    without kernels, and would carry one state for all sequences. Where positions of a step skip or
    repeat but mark no sequences, the model's own ``use_cache`` decides: without a cache,
    Transformers cuts attention there.
    """
    rows = rows_of_call(arguments)
    given: dict[str, Any] = {} if rows is None else {PACKED: rows}
    if all(arguments.get(name) is None for name in ("use_cache", *CACHES)):
        trains = model.training and torch.is_grad_enabled() and arguments.get("labels") is not None
        makes_cache = getattr(model.config.get_text_config(), "use_cache", False)
        if given or (trains and not (makes_cache and _are_uneven(arguments))):
            given["use_cache"] = False
    yield given
    if rows is not None and rows.reached < record.unpacks:
        record.warn_once(
            f"packed sequences see one another: Transformers {transformers.__version__} hands no "
            f"keyword to all recurrent layers of {type(model).__name__}: do not pack rows for it"
        )


def _are_uneven(arguments: Mapping[str, Any]) -> bool:
    """Return whether position ids of a call without a mask have another step than one. The host
    waits for the device if there are some.
    """
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor) or arguments.get("attention_mask") is not None:
        return False
    if _has_three_rows(positions) or positions.device.type == "meta" or is_traced():
        return False
    return bool((_of_text(positions).diff() != 1).any())


def _of_text(positions: Tensor) -> Tensor:
    """Return (B, T) of position ids (B, T), or (4, B, T) with those of the text first."""
    return positions[0] if positions.dim() == 3 and len(positions) == 4 else positions


def rows_of_call(arguments: Mapping[str, Any]) -> PackedRows | None:
    """Return where the sequences of a call's rows are, for its recurrent layers; None where no
    argument says that a row holds several, and none is for kernels.

    The host waits for the device once, if there is such an argument.
    """
    says = [arguments.get(name) for name in SAY_WHERE]
    given, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    given = arguments.get("inputs_embeds") if given is None else given
    if all(each is None for each in (arguments.get("position_ids"), *says)):
        return None
    if not isinstance(given, Tensor) or given.dim() < 2 or given.shape[1] == 1:
        return None
    if given.device.type == "meta" or is_traced() or sequences_are_split():
        return None
    shape = given.shape[:2]
    is_plain = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == shape[1]
    if mask is not None and not is_plain and any(arguments.get(n) is not None for n in CACHES):
        return None  # of generate: the positions of padding say nothing
    starts = sequence_starts(shape, arguments)
    if starts is None:
        return None
    kept = torch.ones_like(starts)
    if isinstance(mask, Tensor) and is_plain:
        kept = mask.to(starts.device).bool().expand(shape)
    rows = packed_rows(starts, kept)
    are_for_kernels = any(each is not None for each in says) and len(rows.lengths) > 0
    return rows if rows.are_packed or are_for_kernels else None


def look_at_packing(
    model: PreTrainedModel,
    record: PatchRecord,
    leaks: Tensor | None,  # (B, T) of leaking_labels; None where num_items_in_batch may differ
    ignore_index: int,
    named: Mapping[str, Any],
) -> None:
    """Warn of packed rows that the model or the caller does not take for what they are, at the
    first training call that has some.
    """
    if record.looks_at_packing >= LOOKS or not torch.is_grad_enabled() or is_traced():
        return
    record.looks_at_packing += 1
    labels = named["labels"]
    if not positions_restart(named, labels.shape):
        return
    record.looks_at_packing = LOOKS
    why = why_sequences_mix(model, named)
    if why is not None:
        record.warn_once(f"packed sequences see one another: position ids restart, but {why}")
    is_counted = named.get("num_items_in_batch") is not None and leaks is not None
    if is_counted and (labels[leaks] != ignore_index).any():
        record.warn_once(
            "leaves out labels that num_items_in_batch counts: those of the first tokens of packed "
            "sequences, which other sequences would predict. Set them to -100 in the data"
        )


def positions_restart(arguments: Mapping[str, Any], shape: torch.Size) -> bool:
    """Return whether the position ids of a call restart within a row of (B, T) tokens."""
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if not isinstance(positions, Tensor) or len(shape) != 2:
        return False
    if _has_three_rows(positions):  # all tokens of an image have one position
        begins = pad(positions[0, :, 1:] < positions[0, :, :-1], (1, 0))
        if isinstance(mask, Tensor) and mask.dim() == 2:  # positions of padding say nothing
            real = mask.to(begins.device).bool()
            begins &= real & pad(real[:, :-1], (1, 0))
    else:
        begins = restarts(positions, mask, shape)
    return begins is not None and bool(begins[:, 1:].any())


def why_sequences_mix(model: PreTrainedModel, arguments: Mapping[str, Any]) -> str | None:
    """Return what lets sequences of packed rows see one another in a call whose position ids
    restart, and what to change; None for nothing.
    """
    config, mask = model.config.get_text_config(), arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4:  # the caller's own
        return None
    if _has_three_rows(arguments["position_ids"]):
        return "position ids have 3 rows: put those of the text before them, as a 4th row"
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return "attention_mask (B, T) hides the restarts from Transformers: leave it out"
    is_flash = "flash" in (getattr(config, "_attn_implementation", None) or "")
    use_cache = arguments.get("use_cache")
    use_cache = getattr(config, "use_cache", False) if use_cache is None else use_cache
    if use_cache and model.training:  # Transformers has no cache beside checkpoints
        use_cache = not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if use_cache and not is_flash:
        return "Transformers looks for restarts without a cache only: pass use_cache=False"
    if not (is_flash or gives_masks_positions(type(model.get_decoder()))):
        return "masks of attention are made without them: do not pack rows for this model"
    if has_other_layers(model):
        carrying = carrying_layers(model)
        if PACKED in arguments and not carrying:
            return None
        if arguments.get("seq_idx") is not None and all(map(takes_index, carrying)):
            return None
        names = ", ".join(sorted({type(each).__name__ for each in carrying}))
        may_unpack = carrying and all(
            takes_packed_rows(each) and "forward" not in vars(each) for each in carrying
        )
        advice = 'name "recurrent" in layers' if may_unpack else "do not pack rows for this model"
        return f"recurrent layers{names and f' ({names})'} carry their state across them: {advice}"
    return None


def _has_three_rows(positions: Tensor) -> bool:
    return positions.dim() == 3 and len(positions) == 3


def has_other_layers(model: PreTrainedModel) -> bool:
    """Return whether a model has layers that are not attention, whose tokens see earlier ones that
    the mask does not show.
    """
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    is_other = model._is_stateful or config.model_type in IN_PATCHES
    return is_other or bool({*layer_types} - ATTENTION_LAYER_TYPES)
