"""Launch Triton's kernels.

``kernel[grid](...)`` binds and specializes every argument anew, in Python: on the host of an H200
that took twice as long as the launch itself, and a layer with adapters has some 45 launches in a
step. ``launch`` keeps each compiled kernel under what Triton specializes it for, and runs it as
Triton's ``JITFunction.run`` does, but without metadata for hooks that nobody added, and with
addresses in place of tensors, about each of which Triton asks the driver. Triton does where
somebody hooks launches, on AMD, in the interpreter, and in versions whose rules were not tested.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

TESTED = (3, 6), (3, 7)  # the first and the last version of Triton whose specialization is known
LARGEST = 2**31 - 1  # of an argument that is no 64-bit one
COMPILED = "_liger_patch_compiled"  # attribute of a kernel: what is compiled of it, by keys


def _knows_triton() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return TESTED[0] <= version <= TESTED[1] and torch.version.hip is None


KNOWN = _knows_triton()
DRIVER: Any = triton.runtime.driver
KNOBS: Any = getattr(triton, "knobs", None)  # Triton 3.4 and newer


def launch(kernel: Any, grid: tuple[Any, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument.

    Args:
        kernel: of ``triton.jit``.
        grid: programs, in up to three dimensions.
        arguments: those that are no constants, in the order of its parameters: numbers, None,
            tensors and descriptors of them. The first is one of the last two.
        constants: its other parameters and Triton's options by name.

    Raises:
        ValueError: a tensor that is not on the device of the first.
    """
    first = arguments[0]
    like: Tensor = first if isinstance(first, Tensor) else first.base
    if not KNOWN or type(kernel) is not JITFunction or _has_hooks(kernel):
        with torch.cuda.device_of(like):
            kernel[grid](*arguments, **constants)
        return
    index = like.get_device()
    key, given = specialized(arguments, index)
    key = (*key, index, *constants, *constants.values())
    compiled: dict[tuple, tuple[Any, tuple]] = vars(kernel).setdefault(COMPILED, {})
    found = compiled.get(key)
    if found is None:
        with torch.cuda.device(index):
            made = kernel[grid](*arguments, **constants)
        names = kernel.arg_names[len(arguments) :]
        compiled[key] = made, tuple(constants[name] for name in names)
    elif index == torch.cuda.current_device():
        _run(*found, grid, index, given)
    else:
        with torch.cuda.device(index):
            _run(*found, grid, index, given)


def cdiv(size: int, block: int) -> int:
    """Return how many blocks hold so much. Triton's own function traces its arguments first."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is no less than a size of at least 1."""
    return 1 << (size - 1).bit_length()


def _has_hooks(kernel: Any) -> bool:
    """Return whether somebody wants to see launches, as Triton's profiler does."""
    enter, leave = KNOBS.runtime.launch_enter_hook, KNOBS.runtime.launch_exit_hook
    chains = getattr(enter, "calls", enter), getattr(leave, "calls", leave)
    return any((kernel.pre_run_hooks, *chains))


def _run(made: Any, values: tuple, grid: tuple[Any, ...], index: int, given: list) -> None:
    """Run a compiled kernel on the current device."""
    stream = DRIVER.active.get_current_stream(index)
    how = stream, made.function, made.packed_metadata, None, None, None  # no metadata, no hooks
    made.run(*(*grid, 1, 1)[:3], *how, *given, *values)


def specialized(arguments: tuple, index: int) -> tuple[list, list]:
    """Return a key of arguments, and the arguments with addresses in place of tensors. Those with
    equal keys have the same compiled kernel on an NVIDIA GPU: Triton distinguishes types, 1 from
    other integers, 64-bit ones from others, and multiples of 16, of integers and of addresses.

    Raises:
        ValueError: a tensor that is not on the device of this index.
    """
    key: list[Any] = []
    given: list[Any] = []
    for each in arguments:
        if isinstance(each, Tensor):
            if each.get_device() != index:  # Triton asks the driver; a kernel would not
                raise ValueError(f"a kernel's tensors must be on one device, got {each.device}")
            address = each.data_ptr()
            key.append(each.dtype if address & 15 else (each.dtype,))
            given.append(address)
            continue
        given.append(each)
        kind = type(each)
        if kind is int:
            if each == 1:
                key.append("1")  # not what True is equal to
            else:
                key.append((not each & 15, -LARGEST - 1 <= each <= LARGEST, each > 2**63 - 1))
        elif kind is float or each is None:
            key.append(kind)
        elif kind is bool:
            key.append(each)
        else:  # a descriptor, whose memory is aligned
            key.append((each.base.dtype, *each.block_shape))
    return key, given
