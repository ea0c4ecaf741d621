"""Launch Triton's kernels.

``kernel[grid](...)`` binds and specializes every argument anew, in Python: on the host of an H200
that took twice as long as the launch itself, and a layer with adapters has some 45 launches in a
step. ``launch`` keeps each compiled kernel under what Triton specializes it for, and calls it as
Triton's own tutorials call a compiled kernel. On AMD, in the interpreter, and in versions whose
rules were not tested, Triton launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
TESTED = (3, 6), (3, 9)  # the first and the last version of Triton whose specialization is known
KNOWN = TESTED[0] <= VERSION <= TESTED[1] and torch.version.hip is None
LARGEST = 2**31 - 1  # of an argument that is no 64-bit one
COMPILED = "_liger_patch_compiled"  # attribute of a kernel: what is compiled of it, by keys


def launch(kernel: Any, grid: tuple[Any, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument.

    Args:
        kernel: of ``triton.jit``.
        grid: programs, in up to three dimensions.
        arguments: its parameters before the constants, in order: numbers, None, tensors and
            descriptors of them. The first is a tensor or a descriptor.
        constants: its other parameters and Triton's options by name.
    """
    like: Tensor = getattr(arguments[0], "base", arguments[0])
    if not KNOWN or type(kernel) is not JITFunction or kernel.pre_run_hooks:
        with torch.cuda.device_of(like):
            kernel[grid](*arguments, **constants)
        return
    index = like.get_device()
    key = index, *constants, *constants.values(), *specialization(arguments)
    compiled: dict[tuple, tuple[Any, tuple]] = vars(kernel).setdefault(COMPILED, {})
    found = compiled.get(key)
    if found is None:
        with torch.cuda.device(index):
            made = kernel[grid](*arguments, **constants)
        names = kernel.arg_names[len(arguments) :]
        compiled[key] = made, tuple(constants[name] for name in names)
        return
    run, values = found
    run = run[(*grid, 1, 1)[:3]]
    if index == torch.cuda.current_device():
        run(*arguments, *values)
    else:
        with torch.cuda.device(index):
            run(*arguments, *values)


def specialization(arguments: tuple) -> list:
    """Return a key of arguments. Those with equal keys have the same compiled kernel on an NVIDIA
    GPU: Triton distinguishes types, 1 from other integers, 64-bit ones from others, and multiples
    of 16, of integers and of addresses in memory.
    """
    key: list[Any] = []
    for each in arguments:
        kind = type(each)
        if kind is int:
            if each == 1:
                key.append("1")  # not what True is equal to
            else:
                key.append((not each & 15, -LARGEST - 1 <= each <= LARGEST, each > 2**63 - 1))
        elif kind is float or each is None:
            key.append(kind)
        elif isinstance(each, Tensor):
            key.append(each.dtype)
            key.append(not each.data_ptr() & 15)
        elif kind is bool:
            key.append(each)
        else:  # a descriptor, whose memory is aligned
            key.append((each.base.dtype, *each.block_shape))
    return key
