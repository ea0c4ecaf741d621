"""Derive the classes of recurrent layers: gated delta nets, Mamba and short convolutions.

They carry a state along a row, from one sequence into the next. Here, the sequences of packed rows
are unpacked into a batch, the layer's own code runs on that, and its result is packed again. Where
it calls kernels that keep sequences apart, it gets one row of all sequences, and their ends.

B: rows, T: tokens of a row, N: tokens of all sequences, S: sequences, H: hidden size.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_patch.kernels.graphs import is_compiled_here
from liger_patch.layers.checks import has_hooks, is_left_to_model, layers_of
from liger_patch.layers.delta_net import (
    CACHES,
    delta_net_forward,
    is_delta_net,
)
from liger_patch.layers.lora import computed_together
from liger_patch.subclass import (
    derived_class,
    is_transformers,
    once_for_each_class,
    original_class,
    own_name,
)

PACKED = "liger_patch_packed_rows"  # the keyword by which a model hands them down to its layers
NAMES = "recurrent", "delta_net"  # of the layers that one module may be
WITHOUT_KEYWORDS = {  # classes to which Transformers 5.24 hands none
    "FalconMambaMixer",
    "InklingShortConvolution",
    "JambaMambaMixer",
    "Mamba2Mixer",
    "MambaMixer",
}
# methods of a cache by which layers keep what they carry to the next call
WRITES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}
UNPACKED, BY_KERNELS = "own code over unpacked sequences", "kernels that keep sequences apart"
PADDED = 2  # times the tokens, at most: longer batches are split by length


class Group(NamedTuple):
    """Sequences that run as one batch, padded behind to the longest of them.

    Attributes:
        tokens: (n,) the places of their tokens among the B T of the rows.
        places: (n,) the places of the same tokens among the count * longest of the batch.
    """

    tokens: Tensor
    places: Tensor
    count: int
    longest: int


class PackedRows:
    """Where the sequences of a call's rows are. No dataclass: FSDP would make a new one for each
    layer, without what this one has counted and kept.

    Args:
        shape: (B, T).
        tokens: (N,) on the host, the places of all tokens of sequences among B T.
        lengths: (S,) on the host.
        device: that of the call.
        are_packed: whether a row holds several sequences.

    Attributes:
        reached: how often a layer was given them.
    """

    def __init__(
        self,
        shape: torch.Size,
        tokens: Tensor,
        lengths: Tensor,
        device: torch.device,
        are_packed: bool,
    ) -> None:
        self.shape, self.tokens, self.lengths, self.device = shape, tokens, lengths, device
        self.are_packed, self.reached = are_packed, 0

    @functools.cached_property
    def are_whole(self) -> bool:
        """Whether each row is one sequence, without padding."""
        return self.lengths.tolist() == [self.shape[1]] * self.shape[0]

    @functools.cached_property
    def together(self) -> list[Group]:
        """All sequences as one batch."""
        return [self._group(torch.ones_like(self.lengths).nonzero()[:, 0])]

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The same as batches of at most PADDED times as many tokens as their sequences have."""
        lengths = self.lengths
        if len(lengths) * int(lengths.max()) <= PADDED * len(self.tokens):
            return self.together
        power = torch.frexp((lengths - 1).double())[1]  # lengths <= 2 ** power
        return [self._group((power == each).nonzero()[:, 0]) for each in power.unique()]

    @functools.cached_property
    def in_one_row(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Places (N,) of the tokens of one row of all sequences, and what kernels want of it."""
        sequence = _rows(self.lengths)
        ends = nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        says = {"seq_idx": sequence[None], "cu_seq_lens_q": ends}
        says = {name: each.to(self.device, torch.int32) for name, each in says.items()}
        return self.tokens.to(self.device), says

    def _group(self, chosen: Tensor) -> Group:
        lengths = self.lengths[chosen]
        longest, row = int(lengths.max()), _rows(lengths)
        column = torch.ones_like(row).cumsum(0) - 1 - (lengths.cumsum(0) - lengths)[row]
        begins = (self.lengths.cumsum(0) - self.lengths)[chosen]
        tokens, places = self.tokens[begins[row] + column], row * longest + column
        return Group(tokens.to(self.device), places.to(self.device), len(chosen), longest)


def _rows(lengths: Tensor) -> Tensor:
    """Return for each token of sequences of these lengths the number of its sequence."""
    return (torch.ones_like(lengths).cumsum(0) - 1).repeat_interleave(lengths)


def packed_rows(starts: Tensor, kept: Tensor) -> PackedRows:
    """Read where sequences are: the host waits for the device once.

    Args:
        starts: (B, T) bool, True at the first token of each sequence, and of each row.
        kept: (B, T) bool, False for padding.
    """
    on_host = torch.stack((starts, kept)).cpu()
    tokens = on_host[1].flatten().nonzero()[:, 0]
    sequence = on_host[0].flatten().cumsum(0)[tokens]
    lengths = sequence.unique_consecutive(return_counts=True)[1]
    are_packed = len(lengths) > int(on_host[1].any(1).sum())
    return PackedRows(starts.shape, tokens, lengths, starts.device, are_packed)


@functools.cache
def gives_masks_positions(cls: Any) -> bool:
    """Return whether a backbone gives positions to all functions that make its masks, by which
    these keep sequences apart: the names of arguments are constants of the code of its forward, or
    of its other methods (BERT). Masks of another model's states are none of these.
    """
    own = (each for each in cls.__mro__ if each.__module__.startswith("transformers.models."))
    methods = [f for each in own for f in vars(each).values() if inspect.isfunction(f)]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in methods]
    constants = [each for code in codes if code is not None for each in code.co_consts]
    names = [{*each} for each in constants if isinstance(each, tuple)]
    masks = [each for each in names if {"config", "attention_mask"} <= each]
    return all("position_ids" in each for each in masks if "encoder_hidden_states" not in each)


def carries_state(module: nn.Module) -> bool:
    """Return whether a module is a layer of Transformers that hands a state to the next call."""
    return _carries_state(original_class(module))


@functools.cache
def _carries_state(cls: Any) -> bool:
    own = (value for base in cls.__mro__ for value in vars(base).values())
    methods = [inspect.unwrap(each) for each in own if inspect.isfunction(each)]
    return any(WRITES & {*each.__code__.co_names} for each in methods)


def recurrent_class(module: Any, names: Collection[str]) -> Any:
    """Return the class of a recurrent layer that takes packed rows, or runs on kernels, or both;
    None for any other module.

    Args:
        names: some of NAMES.
    """
    wanted = [("recurrent", takes_packed_rows), ("delta_net", is_delta_net)]
    found = tuple(name for name, fits in wanted if name in names and fits(module))
    if not found:
        return None
    replacement: Any = recurrent_on_kernels(found, type(module))
    if "delta_net" in found:
        replacement.forward.look_up()  # once: compiled calls do not look up globals
    return replacement


def takes_packed_rows(module: Any) -> bool:
    """Return whether a module is a recurrent layer that takes hidden states alone, and keywords."""
    own = original_class(module).forward
    if not is_transformers(own) or not carries_state(module):
        return False
    if own_name(type(module)) in WITHOUT_KEYWORDS:
        return False
    parameters = inspect.signature(own).parameters
    takes_keywords = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    # any other argument may have values for each token
    fits = parameters.keys() <= {"self", "hidden_states", "attention_mask", "kwargs", *CACHES}
    return fits and takes_keywords


def takes_index(module: Any) -> bool:
    """Return whether a recurrent layer takes ``seq_idx``: it keeps sequences apart, or raises."""
    own = original_class(module).forward
    return "seq_idx" in inspect.signature(own).parameters or takes_packed_rows(module)


@once_for_each_class
def recurrent_on_kernels(names: tuple[str, ...], original: Any) -> type[nn.Module]:
    """Derive the class of a recurrent layer with some of NAMES."""
    forward = original.forward
    if "delta_net" in names:
        forward = delta_net_forward(original)
    forward = _with_siblings(forward)
    if "recurrent" in names:
        forward = _over_sequences(forward, takes_sequences(original.forward))
    derive = functools.partial(recurrent_on_kernels, names)
    return derived_class(original, derive, forward=forward, _liger_patch_layers=names)


def _with_siblings(own: Any) -> Any:
    """Return a forward around which the layer's projections of one input are computed together."""

    @functools.wraps(own)
    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        x = arguments[0] if arguments else options.get("hidden_states")
        if is_compiled_here() or is_left_to_model(self, x):
            return own(self, *arguments, **options)
        with computed_together(self):
            return own(self, *arguments, **options)

    return forward


def _over_sequences(own: Any, by_kernels: bool) -> Any:
    """Return the forward of a layer that takes packed rows.

    Args:
        own: the layer's forward.
        by_kernels: whether all functions that it calls keep sequences apart.
    """
    names = list(inspect.signature(own).parameters)[2:]
    on_kernels = getattr(own, "keeps_apart", None)  # of a gated delta net

    @functools.wraps(own)
    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        rows = options.pop(PACKED, None)
        if rows is None:
            return own(self, hidden_states, *arguments, **options)
        rows.reached += 1
        named = {**dict(zip(names, arguments, strict=False)), **options}
        if any(named.get(name) is not None for name in CACHES):
            raise ValueError(
                "rows of several sequences must have no cache, whose one state would be that of "
                f"the last: pass use_cache=False (got one in {type(self).__name__})"
            )
        if hidden_states.shape[:2] != rows.shape:
            raise ValueError(
                f"{type(self).__name__} got hidden states {tuple(hidden_states.shape)}, but its "
                f"packed rows are {tuple(rows.shape)}"
            )
        if rows.are_whole:
            return own(self, hidden_states)
        if by_kernels or (on_kernels is not None and on_kernels(self, hidden_states)):
            return _in_one_row(rows, hidden_states, functools.partial(own, self))
        # hooks of its modules see one call on all ranks alike: those of ZeRO-3 gather weights
        groups = rows.together if has_hooks(*self.modules()) else rows.groups
        return _unpacked(rows, groups, hidden_states, functools.partial(own, self))

    return forward


def _unpacked(
    rows: PackedRows, groups: list[Group], x: Tensor, run: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return (B, T, H), the results of batches of sequences; 0 for padding."""
    flat, results, found = x.flatten(0, 1), [], []
    for group in groups:
        tokens, places = group.tokens.to(x.device), group.places.to(x.device)
        batch = x.new_zeros(group.count * group.longest, x.shape[-1])
        batch = batch.index_copy(0, places, flat.index_select(0, tokens))
        y = run(batch.view(group.count, group.longest, -1))
        results.append(y.flatten(0, 1).index_select(0, places))
        found.append(tokens)
    return _packed(rows, torch.cat(found), torch.cat(results))


def _in_one_row(rows: PackedRows, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
    tokens, says = rows.in_one_row
    tokens, says = tokens.to(x.device), {name: each.to(x.device) for name, each in says.items()}
    y = run(x.flatten(0, 1).index_select(0, tokens)[None], **says)
    return _packed(rows, tokens, y[0])


def _packed(rows: PackedRows, tokens: Tensor, y: Tensor) -> Tensor:
    result = y.new_zeros(rows.shape.numel(), y.shape[-1]).index_copy(0, tokens, y)
    return result.view(*rows.shape, -1)


def takes_sequences(own: Any) -> bool:
    """Return whether all functions that a layer's forward calls on a whole row are kernels that
    keep sequences apart by what Transformers gives them.

    Transformers (5.17 to 5.24) wraps each in a function that knows the parameters of the kernel, or
    that there is none. It does not give ``cu_seq_lens_q`` to all that take it, as ``cu_seqlens``.
    """
    own = inspect.unwrap(own)
    is_told, takes = "cu_seq_lens_q" in own.__code__.co_consts, []
    for name in own.__code__.co_names:
        function = own.__globals__.get(name)
        if not inspect.isfunction(function) or "update" in name or "recurrent" in name:
            continue
        known = inspect.getclosurevars(function).nonlocals
        if "applicable_params" in known:
            given = {*known["applicable_params"]} if known.get("is_new_implementation") else ()
            takes.append("seq_idx" in given or ("cu_seqlens" in given and is_told))
    return bool(takes) and all(takes)


def ways_of_packed_rows(model: nn.Module) -> Counter[str]:
    """Return how many recurrent layers take packed rows in which way."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if "recurrent" in layers_of(module):
            by_kernels = takes_sequences(original_class(module).forward)
            by_kernels = by_kernels or hasattr(type(module).forward, "keeps_apart")
            found[BY_KERNELS if by_kernels else UNPACKED] += 1
    return found


def carrying_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that carry their state from a sequence of a row into the next."""
    return [m for m in model.modules() if carries_state(m) and "recurrent" not in layers_of(m)]
