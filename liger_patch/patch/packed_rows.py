"""Give recurrent layers the sequences of packed rows. Warn of packed rows that the model or the
caller does not take for what they are.
"""

from __future__ import annotations

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
    takes_packed_rows,
)
from liger_patch.patch.labels import has_other_layers
from liger_patch.patch.packing import restarts, sequence_starts, why_sequences_are_split
from liger_patch.patch.settings import PatchRecord

LOOKS = 4  # at training calls with position ids: at each, the host waits for the device
SAY_WHERE = "seq_idx", "cu_seq_lens_q"  # arguments for kernels: others raise where they get them


@contextmanager
def giving_rows(
    model: PreTrainedModel, record: PatchRecord, arguments: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the keywords that the forward is to hand down to recurrent layers. Warn if packed rows
    have not reached all of them.

    A training step makes no cache unless it was asked to: with one, layers run without kernels.
    """
    trains = model.training and torch.is_grad_enabled() and arguments.get("labels") is not None
    needs_no_cache = trains and all(arguments.get(n) is None for n in ("use_cache", *CACHES))
    given: dict[str, Any] = {"use_cache": False} if needs_no_cache else {}
    rows = rows_of_call({**arguments, **given})
    yield given if rows is None else {**given, PACKED: rows}
    if rows is not None and rows.reached < record.unpacks:
        record.warn_once(
            f"packed sequences see one another: Transformers {transformers.__version__} hands no "
            f"keyword to all recurrent layers of {type(model).__name__}: do not pack rows for it"
        )


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
    if given.device.type == "meta" or is_traced() or why_sequences_are_split() is not None:
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
    if has_other_layers(model) and arguments.get("seq_idx") is None:
        carrying = carrying_layers(model)
        if PACKED in arguments and not carrying:
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
