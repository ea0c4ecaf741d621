"""Streams of a device as logs, on the CPU: each operation is an entry in the log of the stream that
is current, and only events order entries of two streams, as on a GPU. The results are computed at
once; what is noted is whether the order allowed them.

Two entries that use the same memory are a race where one of them writes it, and neither is ordered
before the other. To allocate memory and to free it are writes too, both on the stream on which it
was allocated: the caching allocator hands freed memory on to this stream at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_patch.patch.layer_input import Lane


@dataclass(eq=False)
class Stream:
    """A log. ``seen``: for each stream, how many of its entries are before the next one of this."""

    name: str
    seen: dict[Stream, int] = field(default_factory=dict)


@dataclass(eq=False)
class Event:
    """A place in the log of a stream, as ``torch.cuda.Event``."""

    seen: dict[Stream, int] = field(default_factory=dict)

    def record(self, stream: Stream) -> None:
        self.seen = dict(stream.seen)

    def wait(self, stream: Stream) -> None:
        stream.seen = merged(stream.seen, self.seen)


def merged(seen: dict[Stream, int], other: dict[Stream, int]) -> dict[Stream, int]:
    return {s: max(seen.get(s, 0), other.get(s, 0)) for s in (*seen, *other)}


@dataclass(frozen=True, eq=False)
class Entry:
    """An operation, the entry number ``place`` of its stream, counted from one."""

    name: str
    stream: Stream
    place: int
    seen: dict[Stream, int]

    def is_before(self, other: Entry) -> bool:
        return self is not other and self.place <= other.seen.get(self.stream, 0)

    def __str__(self) -> str:
        return f"{self.name} on the {self.stream.name} stream"


@dataclass
class Memory:
    """Who used it. ``owner``: the stream on which it was allocated, None for memory made before."""

    storage: weakref.ref[Any]  # its callback says that it is freed
    owner: Stream | None
    written: Entry | None = None
    read: list[Entry] = field(default_factory=list)
    others: set[Stream] = field(default_factory=set)


class StreamLog(TorchDispatchMode):
    """Log what runs in this context. It is also the device module (``torch.cuda``) of its lanes.

    Attributes:
        entries: all, in the order in which they were put on their streams.
        races: pairs of entries, in words.
    """

    Event = Event

    def __init__(self) -> None:
        super().__init__()
        self.model = self.current = Stream("model's")
        self.side = Stream("side")
        self.entries: list[Entry] = []
        self.races: list[str] = []
        self._memory: dict[int, Memory] = {}

    @property
    def last(self) -> Entry:
        """The last entry."""
        return self.entries[-1]

    def lane(self, pieces: int) -> Lane:
        """Return a lane whose stream is ``side``, with pieces that were made before the log."""
        lane = Lane(torch.device("cpu"))
        lane.module, lane.stream = self, self.side
        lane.free.extend(lane.pieces(pieces) or ())
        return lane

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Note a stream that is over with the memory before it is used again."""
        self._memory_of(tensor, None).others.add(stream)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        entry, schema = None, func._schema
        named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        for argument in schema.arguments:
            alias = argument.alias_info
            if alias is None or alias.is_write:  # else a view of it is made
                for tensor in tensors(named.get(argument.name)):
                    entry = entry or self._put(str(func), self.current)
                    self._use(self._memory_of(tensor, None), entry, alias is not None)
        for returned, value in zip(
            schema.returns, result if len(schema.returns) > 1 else (result,), strict=True
        ):
            for tensor in tensors(value) if returned.alias_info is None else ():
                entry = entry or self._put(str(func), self.current)
                self._use(self._memory_of(tensor, self.current), entry, is_write=True)
        return result

    def _put(self, name: str, stream: Stream) -> Entry:
        place = stream.seen[stream] = stream.seen.get(stream, 0) + 1
        self.entries.append(Entry(name, stream, place, dict(stream.seen)))
        return self.last

    def _memory_of(self, tensor: Tensor, owner: Stream | None) -> Memory:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._memory:
            freed = weakref.ref(storage, lambda _: self._free(key))
            self._memory[key] = Memory(freed, owner)
        return self._memory[key]

    def _use(self, memory: Memory, entry: Entry, is_write: bool) -> None:
        for earlier in (memory.written, *(memory.read if is_write else ())):
            if earlier not in (None, entry) and not earlier.is_before(entry):
                self.races.append(f"{entry} does not wait for {earlier}")
        if is_write:
            memory.written, memory.read = entry, []
        else:
            memory.read.append(entry)

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        if memory.owner is not None:
            entry = self._put("free", memory.owner)
            for stream in memory.others:  # for which the allocator waits, and no stream
                entry.seen.update(merged(entry.seen, stream.seen))
            self._use(memory, entry, is_write=True)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
