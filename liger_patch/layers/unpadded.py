"""Run a backbone on the tokens of a padded batch alone, as one row of packed sequences.

Where a call of a patched model uses no result of its padding (see ``UsedTokens``), the backbone's
own code gets the real tokens of all rows in one row, and no mask: Transformers' packed form. Each
row's positions begin at 0, which is where Transformers and its flash attention part sequences;
mostly only distances matter. The last hidden states go back to their places, with zeros
between them. So the head, the loss and whoever reads the logits see the batch as it was given.
Recurrent layers get the sequences of the row, see ``recurrent``. Of models that take images too, it
is the backbone of both that gets the row, in calls with text alone.

Where rows begin with the same tokens, as pairs and groups of completions do with their prompt,
these are in the row once (``prefixes``), and the mask of the call says who sees them.

B: rows, T: tokens of a row, H: hidden size. Extra memory: (B, T, H).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from liger_patch.kernels.attention import has_lse_of_tokens, may_serve_flash_attention
from liger_patch.kernels.backend import autocast_dtype
from liger_patch.layers.checks import has_hooks, layers_of, names_of
from liger_patch.layers.masked_attention import TABLE, DeferredMask, UsedTokens
from liger_patch.layers.prefixes import (
    MOST_COMPARED,
    MOST_ROWS,
    Group,
    PutBack,
    compare_rows,
    groups_of,
    in_one_row,
)
from liger_patch.layers.recurrent import (
    PACKED,
    carries_state,
    gives_masks_positions,
    packed_rows,
)

LEAST_SAVED = 1 / 16  # of tokens: leaving out less saves less than gathering rows takes
# of real tokens, by sharing prefixes: attention in two parts takes some of that. On an H100, 7 %
# fewer tokens made an update of GRPO 3 % slower, 14 % fewer one of DPO 6 % faster
LEAST_SHARED = 1 / 8
IMPLEMENTATIONS = "sdpa", "flash_attention_2", "flash_attention_3"  # no (N, N) products
# with one of these in its configuration, a model's attention needs its mask
NEED_MASKS = (
    "attn_logit_softcapping",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
)
MOST_FEATURES = 256  # of a head, with which flash attention serves
SCALED_BY_POSITION = "llama_4_scaling_beta"  # of rotary embeddings: it scales queries
# these scale queries by position too, or norm queries and keys behind rotary embeddings
BY_PLACE = {"beam", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"}
NO_STATE = "full_attention", "sliding_attention"  # layers whose tokens see just what masks show
NOISE = "drop", "jitter"  # parts of names in configurations
OF_LENGTH = {"dynamic", "longrope"}  # rotary embeddings that depend on the length of a padded row
# arguments that may have a value
GIVEN = {"input_ids", "attention_mask", "num_items_in_batch", "return_dict"}
# backbones of text and images that keep sequences apart by positions (B, T), each of them tested:
# the arguments that they are given with text alone, and do not read then
WITH_IMAGES: dict[str, tuple[str, ...]] = {
    "gemma3": ("labels",),
    "mistral3": ("vision_feature_layer",),
    "qwen3_5": (),
    "qwen3_5_moe": (),
    "qwen3_vl": (),
    "qwen3_vl_moe": (),
}
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
# their hooks take any shape
LIBRARIES = "torch.", "transformers.", "accelerate.", "deepspeed.", "peft.", "trl."


def takes_images_too(module: Any) -> bool:
    """Return whether a module is a backbone of text and images, whose calls with text alone may
    run as one row.
    """
    return module.config.model_type in WITH_IMAGES and module.base_model is module


def _text_within(backbone: Any) -> Any:
    return backbone.get_decoder() if takes_images_too(backbone) else backbone


def without_padding(
    backbone: Any,
    function: Callable[..., Any],
    arguments: tuple,
    options: Mapping[str, Any],
    used: UsedTokens,
    may_defer: Callable[[], bool],
) -> Any:
    """Return what a backbone's function gives of a padded batch, None where it must be given the
    batch as it is.

    Args:
        function: the backbone's forward.
        arguments, options: of its call.
        used: the tokens whose results the call uses.
        may_defer: whether no module within is compiled, or has a forward of its own.
    """
    ids, mask = options.get("input_ids"), options.get("attention_mask")
    if arguments or not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        return None
    if mask.dim() != 2 or mask.shape != ids.shape or not _takes_one_row(backbone, options, ids):
        return None
    text = _text_within(backbone)
    found = _rows_of(ids, mask, used, functools.partial(_may_share, text))
    if found is None or not may_defer():
        return None
    recurrent = _recurrent_layers(text, backbone)
    layer_types = {*(getattr(text.config, "layer_types", None) or ())}
    has_others = text._is_stateful or layer_types - {*NO_STATE}
    if recurrent is None or (has_others and not recurrent):
        return None
    starts, lengths, groups = found
    if any(starts) and not _only_distances_matter(text.config):
        return None
    rows, tokens = ids.shape
    one = in_one_row(starts, lengths, tokens, groups, ids.device)
    row: dict[str, Any] = {
        "input_ids": ids.flatten()[one.places][None],
        "attention_mask": None,
        "position_ids": one.positions[None],
        "use_cache": False,  # with a cache, Transformers looks for no restarts
    }
    if groups:
        row["attention_mask"] = DeferredMask.of(
            lambda: one.segments, 1, len(one.places), ids.device
        )
    if recurrent:
        row[PACKED] = packed_rows(row["position_ids"] == 0, torch.ones_like(row["input_ids"]))
    outputs = function(backbone, **{**options, **row})
    if recurrent and row[PACKED].reached < len(recurrent):
        raise RuntimeError(
            f"Transformers {transformers.__version__} hands no keyword to all recurrent layers of "
            f"{type(backbone).__name__}, so a batch without its padding would mix its rows: call "
            'apply_patch with layers that lack "attention"'
        )
    used.without_padding = True
    padded: Any = PutBack.apply(outputs.last_hidden_state[0], one, rows * tokens)
    outputs.last_hidden_state = padded.view(rows, tokens, -1)
    return outputs


def _rows_of(
    ids: Tensor, mask: Tensor, used: UsedTokens, may_share: Callable[[int], bool]
) -> tuple[list[int], list[int], list[Group]] | None:
    """Return where the real tokens of each row start and how many they are, and the groups of rows
    that share a prefix. None where a result of padding is used, where a row has padding between its
    tokens, and where there is little to leave out. The host waits for these numbers.

    Args:
        may_share: whether rows of at most so many tokens may share prefixes.
    """
    rows = len(mask)
    tokens_used = used.of_batch(rows, mask)
    if tokens_used is None or not mask.numel():
        return None
    real = mask.bool()
    begins = torch.cat([real[:, :1], real[:, 1:] & ~real[:, :-1]], 1)
    fits = (begins.sum(1) <= 1).all() & (real | ~tokens_used).all()
    begin, length = real.to(torch.uint8).argmax(1), real.sum(1)
    numbers = [fits.long()[None], begin, length]
    if rows <= MOST_ROWS and rows * mask.numel() <= MOST_COMPARED:
        numbers.append(compare_rows(ids, begin, length).flatten())
    fits, *read = torch.cat(numbers).tolist()
    if not fits:
        return None
    starts, lengths, *alike = (read[place : place + rows] for place in range(0, len(read), rows))
    groups = groups_of(alike, list(range(rows))) if alike else []
    count, saved = sum(lengths), sum(group.saved for group in groups)
    if saved < LEAST_SHARED * count or not may_share(max(lengths)):
        groups, saved = [], 0
    if not 0 < count - saved <= (1 - LEAST_SAVED) * mask.numel():
        return None
    return starts, lengths, groups


def _may_share(backbone: Any, longest: int) -> bool:
    """Return whether rows of at most so many tokens may share prefixes: all attentions take that
    for a mask, no window hides a token, and no result of a token is drawn at random.
    """
    config = backbone.config
    layer_types = {*(getattr(config, "layer_types", None) or ())}
    if config._attn_implementation != "sdpa" or layer_types - {*NO_STATE}:
        return False
    if longest > (getattr(config, "sliding_window", None) or longest):
        return False
    draws = backbone.training and any(
        value and any(part in name for part in NOISE) for name, value in vars(config).items()
    )
    if draws or not has_lse_of_tokens():
        return False
    for module in backbone.modules():
        if carries_state(module):
            return False
        if TABLE in names_of(type(module)) and "attention" not in layers_of(module):
            return False
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and module.training:
            return False
    return True


def _takes_one_row(backbone: Any, options: Mapping[str, Any], ids: Tensor) -> bool:
    """Return whether a backbone gives packed sequences the results of a padded batch, and needs no
    mask of all pairs of tokens for them.
    """
    given = {name for name, value in options.items() if value is not None and value is not False}
    given -= {*WITH_IMAGES.get(backbone.config.model_type, ())}
    if given - GIVEN or options.get("return_dict") is False:
        return False
    text = _text_within(backbone)
    config = text.config
    layer_types = {*(getattr(config, "layer_types", None) or ())} - {*NO_STATE, "linear_attention"}
    if any("attention" in each for each in layer_types):  # in chunks, or to keys of an index
        return False
    if config._attn_implementation not in IMPLEMENTATIONS:
        return False
    if getattr(config, "is_causal", True) is False:  # Transformers then makes masks of both sides
        return False
    if not _has_rotary_positions(text):
        return False
    if any(getattr(config, name, None) for name in NEED_MASKS):
        return False
    use_cache = options.get("use_cache")
    if use_cache is None:  # Trainer switches it off in the outer one, which not all models read
        use_cache = getattr(backbone.config, "use_cache", getattr(config, "use_cache", False))
    if use_cache and not torch.is_grad_enabled():  # whoever evaluates may read it
        return False
    if not all(_takes_positions(type(each)) for each in (backbone, text)):
        return False
    embedding = backbone.get_input_embeddings()
    if getattr(embedding, "neftune_noise_alpha", None):  # whose noise depends on a row's length
        return False
    if config._attn_implementation != "sdpa":
        return True
    # not the embedding's weight: under ZeRO-3, reading it gathers it
    own = next((p.dtype for p in text.parameters() if p.is_floating_point()), None)
    dtype = autocast_dtype(ids.device.type) or own
    return may_serve_flash_attention(ids.device, dtype)


def _has_rotary_positions(backbone: nn.Module) -> bool:
    """Return whether a model has rotary embeddings that do not depend on the row's length."""
    rotary = getattr(backbone, "rotary_emb", None)
    types = getattr(rotary, "rope_type", None)
    types = types.values() if isinstance(types, dict) else [types]
    return rotary is not None and not OF_LENGTH & {*types}


def _only_distances_matter(config: Any) -> bool:
    """Return whether a row's first token may have any position."""
    is_scaled = SCALED_BY_POSITION in (getattr(config, "rope_parameters", None) or {})
    return not is_scaled and config.model_type not in BY_PLACE


@functools.cache
def _takes_positions(cls: Any) -> bool:
    takes_them = "position_ids" in inspect.signature(cls.forward).parameters
    return takes_them and gives_masks_positions(cls)


def _recurrent_layers(text: nn.Module, backbone: nn.Module) -> list[nn.Module] | None:
    """Return the recurrent layers that take packed rows. None where others would mix the rows,
    where flash attention does not serve the heads of an attention, and where hooks or forwards of a
    user within the backbone would see one row in place of the batch.
    """
    if has_hooks():  # of all modules
        return None
    found = []
    for module in text.modules():
        if "recurrent" in layers_of(module):
            found.append(module)
        elif carries_state(module):
            return None
        own = module.__dict__
        size = own.get("qk_head_dim", own.get("head_dim")) or 0
        if size > MOST_FEATURES or own.get("v_head_dim", size) != size:
            return None
        hooks = [hook for name in HOOKS if own[name] for hook in own[name].values()]
        hooks += [own["forward"]] if "forward" in own else []
        if hooks and module is not backbone:
            names = [getattr(each, "__module__", None) or "" for each in hooks]
            if not all(name.startswith(LIBRARIES) for name in names):
                return None
    return found
