"""Offloaded checkpoints that do not all fit in host memory: some inputs stay on the device. Values
of ``checkpoint_offload``, its warnings, and that it leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from offloaded_models import (
    KINDS,
    gradients,
    inputs_alive,
    model_of,
    offloaded,
    step,
    tiny_batch_of,
)
from torch import Tensor, nn

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.patch import offload as offload_module
from liger_patch.patch.forward import record_of
from liger_patch.patch.layer_input import PIECE_BYTES, Lane, LayerInput
from liger_patch.patch.offload import FUNCTION, available_bytes


@KINDS
@pytest.mark.parametrize("fitting", [0, 1, 2, 3])
def test_inputs_beyond_the_bound_stay_on_the_device(reentrant: bool, fitting: int) -> None:
    """Those of the last layers, with the same gradients; a warning says so once."""
    plain = apply_patch(model_of(reentrant, num_hidden_layers=5))
    offload = offloaded(model := model_of(reentrant, num_hidden_layers=5))
    offload.host_gib = (fitting + 0.5) * PIECE_BYTES / 2**30
    shortage = (
        f"all but the last take 0.0625 GiB of host memory, and checkpoint_offload="
        f"{offload.host_gib:g} allows {offload.host_gib:.4g} GiB"
    )
    said = f"liger_patch keeps {5 - fitting} of 5 layer inputs on the GPU: {shortage}"
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$"):
        found = step(model)
    assert_same_bits(found, step(plain))
    batch = tiny_batch_of(model, 1)
    torch.manual_seed(1)
    loss, alive = inputs_alive(model, lambda: model(**batch, use_cache=False).loss)
    assert alive == [False] * fitting + [True] * (5 - fitting)
    model.zero_grad()
    loss.backward()
    assert_same_bits({"loss": loss.detach(), **gradients(model)}, step(plain, 1))
    assert offload.host_bytes == fitting * PIECE_BYTES
    mib = fitting * PIECE_BYTES // 2**20
    assert dict(patch_status(model).rows)["checkpoint offload"] == (
        f"{fitting} layer inputs, {mib} MiB of host memory; {5 - fitting} stay on the GPU: "
        f"{shortage}"
    )


@KINDS
@pytest.mark.parametrize(("pieces", "fetched"), [(2, 2), (100, 4)])
def test_inputs_are_on_their_way_before_they_are_needed(
    pieces: int, fetched: int, reentrant: bool, record: Callable[..., list[bool]]
) -> None:
    """Also the first one to be fetched, behind layers whose inputs are on the device."""
    come = record(LayerInput, "_fetched", lambda self: self.fetched is not None)
    offload = offloaded(model := model_of(reentrant, num_hidden_layers=5))
    offload.host_gib = pieces * PIECE_BYTES / 2**30
    short = pytest.warns(UserWarning, match="keeps 3 of 5")
    with short if pieces == 2 else contextlib.nullcontext():
        step(model)
    assert come == [True] * fetched


def test_memory_that_is_available_is_read_where_more_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A system that does not say what is available sets no bound."""
    available = [2 * PIECE_BYTES, 0, PIECE_BYTES, None]
    monkeypatch.setattr(offload_module, "available_bytes", lambda: available.pop(0))
    plain = apply_patch(model_of(num_hidden_layers=6))
    offload = offloaded(model := model_of(num_hidden_layers=6))
    said = (
        "keeps 4 of 6 layer inputs on the GPU: all but the last take 0.07812 GiB of host memory, "
        "and 0.03125 GiB are available (checkpoint_offload=<GiB> sets another bound)"
    )
    with pytest.warns(UserWarning, match=f"^liger_patch {re.escape(said)}$"):
        found = [step(model, 0)]
    held = [offload.host_bytes]
    for seed in (1, 2, 3, 4):
        found.append(step(model, seed))
        held.append(offload.host_bytes)
    assert held == [PIECE_BYTES * pieces for pieces in (2, 2, 3, 5, 5)]
    assert available == []
    for seed, each in enumerate(found):
        assert_same_bits(each, step(plain, seed))
    assert str(offload) == f"5 layer inputs, {5 * PIECE_BYTES // 2**20} MiB of host memory"


@KINDS
def test_memory_that_the_system_refuses(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input stays where it is, and no more memory is asked for."""
    allocate, refused = torch.empty, []

    def empty(*size: Any, **options: Any) -> Tensor:
        if options.get("pin_memory") is not None and offload.host_bytes == 2 * PIECE_BYTES:
            refused.append(size)
            raise RuntimeError("CUDA error: out of memory")
        return allocate(*size, **options)

    plain = apply_patch(model_of(reentrant, num_hidden_layers=5))
    offload = offloaded(model := model_of(reentrant, num_hidden_layers=5))
    monkeypatch.setattr(torch, "empty", empty)
    said = (
        "liger_patch keeps 3 of 5 layer inputs on the GPU: all but the last take 0.0625 GiB of "
        "host memory, and no more than 0.03125 GiB could be pinned"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$"):
        found = [step(model, 0)]
    found.append(step(model, 1))
    assert refused == [(PIECE_BYTES,)]
    for seed, each in enumerate(found):
        assert_same_bits(each, step(plain, seed))
    apply_patch(model, checkpoint_offload=True)
    record: Any = record_of(model)
    assert not record.offload.has_failed  # memory that was freed since is asked for


def test_pieces_of_an_input_that_does_not_fit_are_used_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = Lane(torch.device("cpu"))
    taken = lane.pieces(2)
    assert taken is not None
    lane.free.extend(taken)

    def empty(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    assert lane.pieces(3) is None
    assert lane.made == 2
    found = lane.pieces(2)
    assert found is not None
    assert {id(piece) for piece in found} == {id(piece) for piece in taken}


GIB = 2**30
MACHINE = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {2**25} kB\n"}
AVAILABLE = 32 * GIB - 4 * GIB  # a sixteenth of the whole is left to others


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)


def found(root: Path, *groups: dict[str, str]) -> int | None:
    for files in groups:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return available_bytes(root)


def group(folder: str, limit: int | None, used: int, files: int = 0) -> dict[str, str]:
    """The files of a control group, in GiB; a folder of memory alone is of the first version."""
    if folder.startswith("memory"):
        unlimited = str(2**63 - 4096)
        names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    else:
        unlimited, names = "max", ("memory.max", "memory.current", "inactive_file")
    place = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{place}/{names[0]}": f"{unlimited if limit is None else limit * GIB}\n",
        f"{place}/{names[1]}": f"{used * GIB}\n",
        f"{place}/memory.stat": f"anon 7\n{names[2]} {files * GIB}\n",
    }


# on the machine: what a process reads of its control groups, these, and the GiB that are available
# beside a sixteenth that is left to others
SYSTEMS: dict[str, tuple[str, list[dict[str, str]], int]] = {
    # whose cached files can go
    "a container": ("0::/", [group("", 16, 10, files=3)], 8),
    "a job": ("0::/job/step", [group("job/step", 16, 10, files=3)], 8),
    "a limit of a parent": ("0::/job/step", [group("job", 16, 2), group("job/step", None, 2)], 13),
    "a container that does not see its own path": ("0::/docker/1234", [group("", 16, 1)], 14),
    "the first version of control groups": (
        "5:cpu,cpuacct:/job\n4:memory:/job\n0::/",
        [group("memory", None, 1), group("memory/job", 16, 4)],
        11,
    ),
    "no memory is left": ("0::/", [group("", 16, 16)], 0),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_control_group_bounds_what_is_available(name: str, tmp_path: Path) -> None:
    own, groups, expected = SYSTEMS[name]
    own_groups = {"proc/self/cgroup": f"{own}\n"}
    assert found(tmp_path, MACHINE, own_groups, *groups) == expected * GIB


def test_another_system_does_not_say_what_is_available(tmp_path: Path) -> None:
    assert found(tmp_path) is None


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
@pytest.mark.parametrize(("text", "processes"), [("8", 8), ("0", 1), ("", 1), ("all", 1)])
def test_processes_share_it(
    name: str, text: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    assert found(tmp_path, MACHINE) == AVAILABLE // processes


@pytest.mark.parametrize("value", ["cpu", None, 0, -1.0, float("inf"), float("nan"), 10**400])
def test_another_value_is_an_error(value: Any) -> None:
    said = f"checkpoint_offload must be True, False or a finite number of GiB > 0, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        apply_patch(model_of(), checkpoint_offload=value)


def test_patching_again_replaces_the_option() -> None:
    model = model_of()
    offloads: list[Any] = []
    for value in (True, True, 64, 64, 2.5, 2.5):
        record: Any = record_of(apply_patch(model, checkpoint_offload=value))
        offloads.append(record.offload)
    assert [each.host_gib for each in offloads] == [None, None, 64, 64, 2.5, 2.5]
    assert [a is b for a, b in pairwise(offloads)] == [True, False, True, False, True]
    apply_patch(model)
    assert record.offload is None
    assert dict(patch_status(model).rows)["checkpoint offload"] == "off"


def test_revert_frees_the_host_memory() -> None:
    offload = offloaded(model := model_of(), layers=False)
    loss = model(**tiny_batch_of(model)).loss
    step(model)
    assert offload.host_bytes == 4 * PIECE_BYTES
    expected = gradients(model)
    model.zero_grad()
    revert_patch(model)
    assert offload.host_bytes == 0
    loss.backward()  # whose inputs are still there
    assert gradients(model).keys() == expected.keys()
    released = weakref.ref(offload)
    del offload, loss
    assert released() is None


def functions(model: nn.Module) -> list[Any]:
    return [vars(m)[FUNCTION] for m in model.modules() if FUNCTION in vars(m)]


def test_nothing_of_it_stays_on_the_model() -> None:
    model = model_of()
    before = functions(model)
    offloaded(model).host_gib = 2.5
    loss = model(**tiny_batch_of(model)).loss
    assert functions(model) == before
    loss.backward()
    copied = copy.deepcopy(model)
    revert_patch(model)
    assert not any("liger_patch" in name for m in model.modules() for name in vars(m))
    record: Any = record_of(copied)
    assert (record.offload.host_bytes, record.offload.host_gib) == (0, 2.5)
    assert_same_bits(step(copied), step(apply_patch(model)))
    assert str(record.offload).startswith("2 layer inputs")


@KINDS
def test_an_exception_leaves_nothing_behind(reentrant: bool) -> None:
    offload = offloaded(model := model_of(reentrant))
    before = functions(model)
    failing = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    failing.remove()
    assert functions(model) == before
    found = step(model)
    gc.collect()
    assert offload.host_bytes == 2 * PIECE_BYTES
    assert_same_bits(found, step(apply_patch(model_of(reentrant))))


def test_calls_without_gradients_offload_nothing() -> None:
    offload = offloaded(model := model_of())
    with torch.no_grad():
        model(**tiny_batch_of(model))
    model.eval()
    model(**tiny_batch_of(model)).loss.backward()
    assert str(offload) == "on, no eager training step yet"
    assert offload.host_bytes == 0


@pytest.mark.parametrize(
    ("reentrant", "reason"),
    [
        (None, "no layer was checkpointed (see model.gradient_checkpointing_enable())"),
        (False, "no layer saved a contiguous cuda tensor of at least 1 MiB"),
    ],
)
def test_a_step_that_offloads_nothing_warns_once(reentrant: bool | None, reason: str) -> None:
    model = apply_patch(model_of(reentrant), checkpoint_offload=True)
    expected = step(apply_patch(model_of(reentrant)))
    message = f"liger_patch offloads no checkpoint: {reason}"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        found = step(model)
    assert_same_bits(found, expected)
    step(model)  # without a warning: pytest makes an error of it
    assert dict(patch_status(model).rows)["checkpoint offload"] == f"none: {reason}"


def test_rows_that_are_all_too_short_are_a_warning() -> None:
    """But not behind longer ones."""
    said = "no layer saved a contiguous cpu tensor of at least 1 MiB"
    offload = offloaded(model := model_of())
    step(model)
    offload.min_bytes = 2**20
    step(model)
    assert str(offload) == f"none: {said}"
    offload = offloaded(model := model_of())
    offload.min_bytes = 2**20
    with pytest.warns(UserWarning, match=f"{said}$"):
        step(model)
