"""A compiled kernel is launched again only for arguments that Triton compiles it for."""

from itertools import combinations
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from liger_patch.kernels.triton import launch as launching
from liger_patch.kernels.triton.launch import launch, specialization

NUMBERS = [0, 1, -1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), 2**40, 2**40 + 8]
NUMBERS += [2**63 - 1, 2**63, 2**63 + 16]


def arguments() -> list[Any]:
    tensors = [
        torch.zeros(64, dtype=dtype)[start:]
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
        for start in (0, 1, 16)
    ]
    return [*NUMBERS, 0.0, 1.0, 16.0, 1e300, None, True, False, *tensors]


@pytest.mark.skipif(launching.TESTED[0] > launching.VERSION, reason="older rules")
def test_arguments_of_one_key_are_one_specialization():
    """By Triton's own function, for an H100."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    found = [
        (each, native_specialize_impl(backend, each, False, True, True)) for each in arguments()
    ]
    keys = [tuple(specialization((each,))) for each, _ in found]
    same = [(i, j) for i, j in combinations(range(len(found)), 2) if keys[i] == keys[j]]
    assert len(same) > 10
    for i, j in same:
        assert found[i][1] == found[j][1], (found[i][0], found[j][0])
    known = launching.KNOWN or torch.version.hip is not None
    assert known, "The rules of this Triton are those of TESTED: widen it."


class Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append(("again", grid, arguments))


class Kernel:
    """In the place of a kernel, which has parameters a, n, eps, FLAG and BLOCK."""

    arg_names = "a", "n", "eps", "FLAG", "BLOCK"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Compiled:
            self.calls.append(("compiled", grid, arguments, constants))
            return Compiled(self.calls)

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launching, "JITFunction", Kernel)
    monkeypatch.setattr(launching, "KNOWN", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as a CPU's tensors have it
    return Kernel()


def test_a_second_launch_gives_the_constants_in_their_places(kernel):
    x = torch.zeros(32)
    for n in (3, 5):
        launch(kernel, (7,), x, n, 1e-6, BLOCK=64, FLAG=True, num_warps=4)
    (first, second), constants = kernel.calls, {"BLOCK": 64, "FLAG": True, "num_warps": 4}
    assert first == ("compiled", (7,), (x, 3, 1e-6), constants)
    assert second == ("again", (7, 1, 1), (x, 5, 1e-6, True, 64))


@pytest.mark.parametrize(
    "other",
    [
        {"n": 16},
        {"n": 1},
        {"eps": None},
        {"BLOCK": 128},
        {"num_warps": 8},
        {"x": torch.zeros(33)[1:]},
        {"x": torch.zeros(32, dtype=torch.float16)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_arguments_are_left_to_triton(kernel, other):
    for change in ({}, other):
        how = {"x": torch.zeros(32), "n": 3, "eps": 1e-6, "BLOCK": 64, "num_warps": 4, **change}
        constants = {name: how[name] for name in ("BLOCK", "num_warps")}
        launch(kernel, (7,), how["x"], how["n"], how["eps"], FLAG=True, **constants)
    assert [name for name, *_ in kernel.calls] == ["compiled"] * 2


@pytest.mark.parametrize("why", ["hooks", "version"])
def test_all_launches_are_left_to_triton(why, kernel, monkeypatch):
    if why == "hooks":
        kernel.pre_run_hooks.append(print)
    else:
        monkeypatch.setattr(launching, "KNOWN", False)
    for _ in range(2):
        launch(kernel, (7,), torch.zeros(32), 3, 1e-6, FLAG=True, BLOCK=64)
    assert [name for name, *_ in kernel.calls] == ["compiled"] * 2
