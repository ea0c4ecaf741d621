"""Run a backbone on the tokens of a padded batch alone, as one row of packed sequences.

Where a call of a patched model uses no result of its padding (see ``UsedTokens``), the backbone's
own code gets the real tokens of all rows in one row, and no mask: Transformers' packed form. Each
row's positions begin at 0, which is where Transformers and its flash attention part sequences; for
rotary embeddings only distances matter. The last hidden states go back to their places, with zeros
between them. So the head, the loss and whoever reads the logits see the batch as it was given.
Recurrent layers get the sequences of the row, see ``recurrent``.

B: rows, T: tokens of a row, N: real tokens, H: hidden size. Extra memory: (B, T, H).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.segments import may_serve_flash_attention
from liger_patch.layers.checks import has_hooks, layers_of
from liger_patch.layers.deferred_mask import NEED_MASKS
from liger_patch.layers.masked_attention import UsedTokens
from liger_patch.layers.recurrent import PACKED, WITHOUT_POSITIONS, carries_state, packed_rows

LEAST_PADDING = 1 / 16  # of a batch: leaving out less saves less than gathering rows takes
IMPLEMENTATIONS = "sdpa", "flash_attention_2", "flash_attention_3"  # no (N, N) products
MOST_FEATURES = 256  # of a head, with which flash attention serves
SCALED_BY_POSITION = "llama_4_scaling_beta"  # of rotary embeddings: it scales queries
OF_LENGTH = {"dynamic", "longrope"}  # rotary embeddings that depend on the length of a padded row
GIVEN = {"input_ids", "attention_mask", "num_items_in_batch"}  # arguments that may have a value
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
# their hooks take any shape
LIBRARIES = "torch.", "transformers.", "accelerate.", "deepspeed.", "peft.", "trl."


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
    places = _places(mask, used)
    if places is None or not may_defer():
        return None
    recurrent = _recurrent_layers(backbone)
    if recurrent is None or (backbone._is_stateful and not recurrent):
        return None
    rows, tokens = ids.shape
    starts = (places // tokens).diff(prepend=places.new_full((1,), -1)) > 0
    place = torch.arange(len(places), device=places.device)
    row: dict[str, Any] = {
        "input_ids": ids.flatten()[places][None],
        "attention_mask": None,
        "position_ids": (place - place.where(starts, 0).cummax(0).values)[None],
        "use_cache": False,  # with a cache, Transformers looks for no restarts
    }
    if recurrent:
        row[PACKED] = packed_rows(starts[None], torch.ones_like(starts)[None])
    outputs = function(backbone, **{**options, **row})
    if recurrent and row[PACKED].reached < len(recurrent):
        raise RuntimeError(
            f"Transformers {transformers.__version__} hands no keyword to all recurrent layers of "
            f"{type(backbone).__name__}, so a batch without its padding would mix its rows: call "
            'apply_patch with layers that lack "attention"'
        )
    used.without_padding = True
    (hidden,) = outputs.last_hidden_state
    padded = hidden.new_zeros(rows * tokens, hidden.shape[-1]).index_copy(0, places, hidden)
    outputs.last_hidden_state = padded.view(rows, tokens, -1)
    return outputs


def _places(mask: Tensor, used: UsedTokens) -> Tensor | None:
    """Return (N,), where the real tokens are among (B T,), in their order. None where a result of
    padding is used, where a row has padding between its tokens, and where there is little padding.
    The host waits for these numbers.
    """
    tokens_used = used.of_batch(len(mask), mask)
    if tokens_used is None or not mask.numel():
        return None
    real = mask.bool()
    starts = torch.cat([real[:, :1], real[:, 1:] & ~real[:, :-1]], 1)
    fits = (starts.sum(1) <= 1).all() & (real | ~tokens_used).all()
    fits, count = torch.stack([fits.long(), real.sum()]).tolist()
    if not fits or not 0 < count <= (1 - LEAST_PADDING) * mask.numel():
        return None
    return real.flatten().logical_not().to(torch.uint8).argsort(stable=True)[:count]


def _takes_one_row(backbone: Any, options: Mapping[str, Any], ids: Tensor) -> bool:
    """Return whether packed sequences give the results of a padded batch, without an (N, N) mask
    where it would be larger.
    """
    given = {name for name, value in options.items() if value is not None and value is not False}
    if given - GIVEN or options.get("return_dict") is False:
        return False
    config = backbone.config
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return False
    if config._attn_implementation not in IMPLEMENTATIONS:
        return False
    if config.model_type in WITHOUT_POSITIONS or not _has_relative_positions(backbone):
        return False
    if any(getattr(config, name, None) for name in NEED_MASKS):
        return False
    use_cache = options.get("use_cache")
    use_cache = getattr(config, "use_cache", False) if use_cache is None else use_cache
    if use_cache and not torch.is_grad_enabled():  # whoever evaluates may read it
        return False
    if not _takes_positions(type(backbone)):
        return False
    embedding = backbone.get_input_embeddings()
    if getattr(embedding, "neftune_noise_alpha", None):  # whose noise depends on a row's length
        return False
    if config._attn_implementation != "sdpa":
        return True
    # not the embedding's weight: under ZeRO-3, reading it gathers it
    own = next((p.dtype for p in backbone.parameters() if p.is_floating_point()), None)
    dtype = autocast_dtype(ids.device.type) or own
    return may_serve_flash_attention(ids.device, dtype)


def _has_relative_positions(backbone: nn.Module) -> bool:
    """Return whether only distances between tokens matter: a row's first token may have any
    position.
    """
    rotary = getattr(backbone, "rotary_emb", None)
    if SCALED_BY_POSITION in (getattr(backbone.config, "rope_parameters", None) or {}):
        return False
    types = getattr(rotary, "rope_type", None)
    types = types.values() if isinstance(types, dict) else [types]
    return rotary is not None and not OF_LENGTH & {*types}


@functools.cache
def _takes_positions(cls: Any) -> Any:
    return "position_ids" in inspect.signature(cls.forward).parameters


def _recurrent_layers(backbone: nn.Module) -> list[nn.Module] | None:
    """Return the recurrent layers that take packed rows. None where others would mix the rows,
    where flash attention does not serve the heads of an attention, and where hooks or forwards of a
    user within the backbone would see one row in place of the batch.
    """
    if has_hooks():  # of all modules
        return None
    found = []
    for module in backbone.modules():
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
