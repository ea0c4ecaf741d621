"""Every Triton kernel is compiled to machine code ahead of time, which needs no GPU.

sm_90 gets the full product of logits' dtypes and flags (48 compilations of the cross entropy), but
of those with statistics rows in which every pair of two flags' values occurs. The other targets get
all flags off, all flags on, and such rows, for each dtype in turn. A compilation takes about a
second. A kernel that has no row in KERNELS fails `test_every_kernel_is_in_the_matrix`.
"""

import importlib
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import INTERPRETED

import liger_patch

pytest.importorskip("triton")

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, KernelInterface

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler")

FOLDER = Path(liger_patch.__file__).parent / "kernels"
FULL = GPUTarget("cuda", 90, 32)
TARGETS = [
    FULL,
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("hip", "gfx942", 64),
]
BINARY = {"cuda": "cubin", "hip": "hsaco"}
DTYPES = ("*bf16", "*fp16", "*fp32")
MULTIPLE = "i32 multiple of 16"  # as a launch specialises it
FLAGS = (  # softcap, class weight, label smoothing, gradient
    (0, 0, 0, 0),
    (1, 1, 1, 1),
    (1, 0, 0, 1),
    (0, 1, 0, 1),
    (0, 0, 1, 1),
    (1, 1, 1, 0),
)


def cross_entropy(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(id, arguments: a type or a value, warps) of each compilation for the target."""
    from liger_patch.kernels.cross_entropy_triton import MAX_BLOCK_V, block_and_warps

    everything = itertools.product(DTYPES, itertools.product((0, 1), repeat=4), (MAX_BLOCK_V,))
    rotated = ((DTYPES[i % 3], flags, MAX_BLOCK_V) for i, flags in enumerate(FLAGS * 2))
    ends = itertools.product(DTYPES, FLAGS[:2], (MAX_BLOCK_V,))
    small = [("*bf16", FLAGS[1], 131), ("*fp32", FLAGS[1], 2)]
    cases = {*everything, *small} if target == FULL else {*rotated, *ends, *small}
    for dtype, flags, vocab_size in sorted(cases):
        softcap, class_weight, smoothing, gradient = flags
        block_v, warps = block_and_warps(vocab_size, target.warp_size)
        yield (
            f"{dtype[1:]}-V{vocab_size}-" + "".join(map(str, flags)),
            {
                "logits_ptr": dtype,
                "logits_stride": "i32",
                "dlogits_ptr": dtype if gradient else None,
                "dlogits_stride": "i32",
                "labels_ptr": "*i64",
                "row_scale_ptr": "*fp32" if gradient else None,
                # class weights come in the model's dtype or in float32
                "class_weight_ptr": (dtype if smoothing else "*fp32") if class_weight else None,
                "loss_ptr": "*fp32",
                "vocab_size": "i32",
                "ignore_index": "i32",
                "softcap": ("fp32", 30.0 * softcap),
                "logit_scale": "fp32",
                "label_smoothing": ("fp32", 0.1 * smoothing),
                "z_loss": "fp32",
                "BLOCK_V": block_v,
            },
            warps,
        )


def scale(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.scale_triton import BLOCK

    for dtype, size in itertools.product(DTYPES, ("i32", "i64")):
        yield (
            f"{dtype[1:]}-{size}",
            {
                "first_ptr": dtype,
                "first_size": size,
                "second_ptr": dtype if size == "i64" else None,
                "second_size": size,
                "factor_ptr": "*fp32",
                "stride": "i32",
                "BLOCK": BLOCK,
            },
            8,
        )


def scale_rows(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.scale_triton import ROW_BLOCK

    # float32 products to gradients, and hidden states to scaled ones
    for values, out, rows in (("*fp32", "*bf16", 0), ("*fp32", "*fp32", 1), ("*bf16", "*bf16", 0)):
        yield (
            f"{values[1:]}-{out[1:]}-{rows}",
            {
                "values_ptr": values,
                "values_stride": "i32",
                "factors_ptr": "*fp32",
                "out_ptr": out,
                "out_stride": "i32",
                "rows_ptr": "*i64" if rows else None,
                "labels_ptr": "*i64" if values == "*fp32" else None,
                "label_gradients_ptr": "*fp32" if values == "*fp32" else None,
                "weight_ptr": "*bf16" if values == "*fp32" else None,
                "weight_stride": "i32" if values == "*fp32" else None,
                "columns": "i32",
                "BLOCK": ROW_BLOCK,
            },
            4,
        )


ODDS_CONSTANTS = ("GROUPED_TILES", "TILE_ROWS", "TILE_V", "TILE_H", "PARTS")
ODDS_WITH_STATISTICS = (  # softcap, writes, again, rank, sums: every pair of two flags' values
    (0, 0, 0, 0, 3),
    (1, 1, 1, 0, 3),
    (0, 1, 1, 16, 3),
    (1, 0, 0, 16, 3),
    (1, 0, 1, 64, 3),
    (0, 1, 0, 64, 3),
)


def odds(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Only what it serves: bf16 on Hopper."""
    from liger_patch.kernels import odds_head as kernels

    if target != FULL or kernels.TensorDescriptor is None:
        return
    everything = itertools.product((0, 1), (0, 1), (0, 1), (0, 16, 64), (2,))
    for softcap, writes, again, rank, sums in [*everything, *ODDS_WITH_STATISTICS]:
        constants = kernels.tile_constants(4096, rank)
        part = kernels.TILE_V // constants["PARTS"]
        low_rank = [f"tensordesc<bf16[{n},{rank}]>" for n in (kernels.TILE_ROWS, kernels.TILE_V)]
        yield (
            f"{softcap}{writes}{again}-{rank}-{sums}",
            {
                "low_rank": low_rank[0] if rank else None,
                "low_rank_weight": low_rank[1] if rank else None,
                "x": f"tensordesc<bf16[{kernels.TILE_ROWS},{kernels.TILE_H}]>",
                "weight": f"tensordesc<bf16[{kernels.TILE_V},{kernels.TILE_H}]>",
                "odds": f"tensordesc<bf16[{kernels.TILE_ROWS},{part}]>" if writes else None,
                "labels_ptr": "*i64",
                "reference_ptr": "*fp32",
                "partial_ptr": "*fp32",
                "overflow_ptr": "*i32",
                "counts_ptr": "*i64",
                "start": "i32",
                "rows": "i32",
                "hidden_size": "i32",
                "vocab_size": "i32",
                "softcap": "fp32" if softcap else None,
                "logit_scale": "fp32",
                "SUMS": sums,
                "ONLY_ON_OVERFLOW": bool(again),
                **{name: constants[name] for name in ODDS_CONSTANTS},
            },
            constants["num_warps"],
        )


def label_logit(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import odds_head as kernels

    for softcap, rank in itertools.product((0, 1), repeat=2):
        yield (
            f"{softcap}{rank}",
            {
                "low_rank_ptr": "*bf16" if rank else None,
                "low_rank_stride": "i32" if rank else None,
                "low_rank_weight_ptr": "*bf16" if rank else None,
                "low_rank_weight_stride": "i32" if rank else None,
                "rank": "i32" if rank else None,
                "x_ptr": "*bf16",
                "x_stride": "i32",
                "rows_ptr": "*i64",
                "weight_ptr": "*bf16",
                "weight_stride": "i32",
                "labels_ptr": "*i64",
                "counts_ptr": "*i64",
                "label_logit_ptr": "*fp32",
                "label_z_ptr": "*fp32",
                "reference_ptr": "*fp32",
                "hidden_size": "i32",
                "vocab_size": "i32",
                "softcap": "fp32" if softcap else None,
                "logit_scale": "fp32",
                **kernels.DOT,
            },
            4,
        )


def finish(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import odds_head as kernels

    for softcap, class_weight, writes, again, statistics in itertools.product((0, 1), repeat=5):
        if class_weight and statistics:  # losses have the one, log-probabilities the other
            continue
        if target != FULL and {softcap, writes, again} != {statistics}:  # odds are not served there
            continue
        yield (
            f"{softcap}{class_weight}{writes}{again}{statistics}",
            {
                "partial_ptr": "*fp32",
                "labels_ptr": "*i64",
                "label_logit_ptr": "*fp32",
                "label_z_ptr": "*fp32",
                "reference_ptr": "*fp32",
                "row_scale_ptr": "*fp32" if writes else None,
                "class_weight_ptr": ("*bf16" if softcap else "*fp32") if class_weight else None,
                "loss_ptr": "*fp32",
                "factor_ptr": "*fp32",
                "label_gradient_ptr": "*fp32",
                "entropy_ptr": "*fp32" if statistics else None,
                "lse_ptr": "*fp32" if statistics else None,
                "is_top1_ptr": "*i1" if statistics else None,
                "overflow_ptr": "*i32",
                "counts_ptr": "*i64",
                "start": "i32",
                "rows": "i32",
                "v_tiles": "i32",
                "vocab_size": "i32",
                "softcap": "fp32" if softcap else None,
                "logit_scale": "fp32",
                "z_loss": "fp32",
                "TILE_V": kernels.TILE_V,
                "ONLY_ON_OVERFLOW": bool(again),
                **kernels.FINISHED,
            },
            4,
        )


def order_tokens(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import supervised_triton as kernels

    for labels in ("*i64", "*i32", "*i16", "*i8", "*u8"):
        yield (
            labels[1:],
            {
                "given_ptr": labels,
                "labels_ptr": "*i64",
                "rows_ptr": "*i64",
                "counts_ptr": "*i64",
                "tokens": "i32",
                "vocab_size": "i32",
                "ignore_index": "i32",
                "BLOCK": kernels.BLOCK,
            },
            kernels.WARPS,
        )


def add_label_rows(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import label_rows_triton as kernels

    for dweight, rows in itertools.product(("*bf16", "*fp32"), (0, 1)):
        yield (
            f"{dweight[1:]}-{rows}",
            {
                "labels_ptr": "*i32",
                "order_ptr": "*i64",
                "label_gradients_ptr": "*fp32",
                "x_ptr": "*bf16",
                "x_stride": "i32",
                "rows_ptr": "*i64" if rows else None,
                "dweight_ptr": dweight,
                "dweight_stride": "i32",
                "tokens": "i32",
                "hidden_size": "i32",
                **kernels.BLOCKS,
            },
            kernels.WARPS,
        )


def token_statistics(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.cross_entropy_triton import MAX_BLOCK_V, block_and_warps

    everything = [*itertools.product(DTYPES, (0, 1), (MAX_BLOCK_V,)), ("*bf16", 1, 131)]
    rotated = [("*bf16", 1, MAX_BLOCK_V), ("*fp16", 0, MAX_BLOCK_V), ("*fp32", 1, 131)]
    for dtype, softcap, vocab_size in everything if target == FULL else rotated:
        block_v, warps = block_and_warps(vocab_size, target.warp_size)
        yield (
            f"{dtype[1:]}-V{vocab_size}-{softcap}",
            {
                "logits_ptr": dtype,
                "logits_stride": "i32",
                "labels_ptr": "*i64",
                "entropy_ptr": "*fp32",
                "lse_ptr": "*fp32",
                "is_top1_ptr": "*i1",
                "mean_logits_ptr": "*fp32",
                "log_sum_sq_probs_ptr": "*fp32",
                "vocab_size": "i32",
                "softcap": ("fp32", 30.0 * softcap),
                "logit_scale": "fp32",
                "BLOCK_V": block_v,
            },
            warps,
        )


def log_probs_gradient(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.cross_entropy_triton import MAX_BLOCK_V, block_and_warps

    # of log_probs, entropy, lse; without the last two, the cross entropy's kernel has the gradient
    some = [flags for flags in itertools.product((0, 1), repeat=3) if any(flags[1:])]
    cases = [(DTYPES[(i + s) % 3], s, flags) for s in (0, 1) for i, flags in enumerate(some)]
    if target != FULL:
        cases = [("*bf16", 1, (1, 1, 1)), ("*fp16", 0, (0, 1, 0)), ("*fp32", 1, (1, 0, 1))]
    block_v, warps = block_and_warps(MAX_BLOCK_V, target.warp_size)
    for dtype, softcap, flags in cases:
        of_log_probs, of_entropy, of_lse = flags
        yield (
            f"{dtype[1:]}-{softcap}{of_log_probs}{of_entropy}{of_lse}",
            {
                "logits_ptr": dtype,
                "logits_stride": "i32",
                "labels_ptr": "*i64",
                "dlog_probs_ptr": "*fp32" if of_log_probs else None,
                "dentropy_ptr": "*fp32" if of_entropy else None,
                "dlse_ptr": "*fp32" if of_lse else None,
                "vocab_size": "i32",
                "softcap": ("fp32", 30.0 * softcap),
                "logit_scale": "fp32",
                "BLOCK_V": block_v,
            },
            warps,
        )


def rms_norm(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.rms_norm_triton import tile

    for dtype, hidden_size, has_weight in (("*bf16", 4096, 1), ("*fp16", 128, 1), ("*fp32", 33, 0)):
        blocks, warps = tile(hidden_size)
        yield (
            f"{dtype[1:]}-{hidden_size}-{has_weight}",
            {
                "x_ptr": dtype,
                "weight_ptr": dtype if has_weight else None,
                "y_ptr": dtype,
                "rstd_ptr": "*fp32",
                "rows": "i32",
                "hidden_size": "i32" if hidden_size % 16 else MULTIPLE,
                "eps": "fp32",
                "offset": "fp32",
                **blocks,
            },
            warps,
        )


def rms_norm_backward(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels.rms_norm_triton import backward_tile

    for dtype, hidden_size, has_weight, shared_kib in (
        ("*bf16", 4096, 1, 64),
        ("*bf16", 2304, 1, 64),
        ("*bf16", 5120, 1, 64),
        ("*bf16", 640, 1, 227),
        ("*bf16", 5120, 1, 227),
        ("*bf16", 8192, 1, 99),
        ("*bf16", 10240, 1, 99),
        ("*fp16", 128, 1, 64),
        ("*fp32", 33, 0, 64),
        ("*fp32", 2304, 0, 227),
        ("*fp32", 32768, 1, 227),
    ):
        if target.backend == "hip" and shared_kib > 64:
            continue  # gfx942 has 64
        element_bytes = 8 if dtype == "*fp32" else 4
        blocks, warps = backward_tile(hidden_size, element_bytes, shared_kib * 1024)
        yield (
            f"{dtype[1:]}-{hidden_size}-{has_weight}-{shared_kib}",
            {
                "dy_ptr": dtype,
                "x_ptr": dtype,
                "weight_ptr": dtype if has_weight else None,
                "rstd_ptr": "*fp32",
                "dx_ptr": dtype,
                "dweight_ptr": "*fp32" if has_weight else None,
                "rows": "i32",
                "hidden_size": "i32" if hidden_size % 16 else MULTIPLE,
                "offset": "fp32",
                **blocks,
            },
            warps,
        )


def sum_parts(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import rms_norm_triton as kernels

    for dtype in ("*bf16", "*fp16", "*fp32"):
        sizes = {"parts": "i32", "hidden_size": "i32"}
        blocks = {"BLOCK_P": kernels.SUM_PARTS, "BLOCK_H": kernels.SUM_COLUMNS}
        yield (
            dtype[1:],
            {"parts_ptr": "*fp32", "sum_ptr": dtype, **sizes, **blocks},
            kernels.SUM_WARPS,
        )


GATED = (("*bf16", True, 0), ("*fp16", False, 0), ("*fp32", True, 1), ("*bf16", False, 1))


def gated(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import gated_triton as kernels

    for dtype, is_silu, halves in GATED:
        pointers = dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), dtype)
        if halves:
            pointers["up_ptr"] = None
        others = {"columns": "i32", "IS_SILU": is_silu, "BLOCK": kernels.BLOCK}
        yield f"{dtype[1:]}-{is_silu}-{halves}", pointers | others, kernels.WARPS


def gated_backward(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import gated_triton as kernels

    for dtype, is_silu, halves in GATED:
        names = ("dy_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr")
        pointers = dict.fromkeys(names, dtype)
        if halves:
            pointers |= {"up_ptr": None, "dup_ptr": None}
        for wants_y in (False, True):
            pointers["y_ptr"] = dtype if wants_y else None
            others = {"columns": "i32", "IS_SILU": is_silu, "BLOCK": kernels.BACKWARD_BLOCK}
            name = f"{dtype[1:]}-{is_silu}-{halves}-{wants_y}"
            yield name, pointers | others, kernels.WARPS


def rotary(target: GPUTarget) -> Iterator[tuple[str, dict[str, Any], int]]:
    from liger_patch.kernels import rotary_triton as kernels

    cases = (
        ("*bf16", True, False, 2, 0),
        ("*fp16", False, False, 1, 64),
        ("*fp32", True, False, 0, 8),
        ("*bf16", False, True, 2, 64),
        ("*fp32", True, True, 8, 0),
    )
    for dtype, backward, interleaved, k_heads, rest in cases:
        blocks, warps = kernels.tile(32, k_heads, 128 + rest, 128)
        pointers = ("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr", "cos_ptr", "sin_ptr")
        sizes = [f"{x}_{part}_stride" for x in "qk" for part in ("batch", "head", "token")]
        sizes += [f"{x}_{part}_stride" for x in ("cos", "sin") for part in ("batch", "token")]
        sizes += ["tokens", "q_heads", "k_heads", "size", "turned"]
        # of the tables: specialised where it is 1
        strides = dict.fromkeys(("cos_stride", "sin_stride"), "i32" if interleaved else 1)
        constants = {
            "BACKWARD": backward,
            "INTERLEAVED": interleaved,
            **blocks,
        }
        arguments = dict.fromkeys(pointers, dtype) | dict.fromkeys(sizes, "i32")
        name = f"{dtype[1:]}-{backward}-{interleaved}-{k_heads}-{rest}"
        yield name, arguments | strides | constants, warps


KERNELS = {
    "_add_label_rows_kernel": add_label_rows,
    "_cross_entropy_kernel": cross_entropy,
    "_finish_kernel": finish,
    "_gated_backward_kernel": gated_backward,
    "_gated_kernel": gated,
    "_label_logit_kernel": label_logit,
    "_log_probs_gradient_kernel": log_probs_gradient,
    "_odds_kernel": odds,
    "_order_tokens_kernel": order_tokens,
    "_rms_norm_backward_kernel": rms_norm_backward,
    "_rms_norm_kernel": rms_norm,
    "_rotary_kernel": rotary,
    "_scale_kernel": scale,
    "_scale_rows_kernel": scale_rows,
    "_sum_parts_kernel": sum_parts,
    "_token_statistics_kernel": token_statistics,
}


def jit_functions() -> dict[str, KernelInterface]:
    """Every function under @triton.jit in the package's kernels, with its heuristics, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        module = importlib.import_module(f"liger_patch.kernels.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, KernelInterface) and plain(value).module == module.__name__:
                found[name] = value
    return found


def plain(kernel: Any) -> JITFunction:
    return kernel if isinstance(kernel, JITFunction) else plain(kernel.fn)


def flags_of(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The flags that the kernel's own heuristics make of the arguments."""
    if isinstance(kernel, JITFunction):
        return {}
    values = {n: v[1] if isinstance(v, tuple) else v for n, v in arguments.items()}
    return {n: derive(values) for n, derive in kernel.values.items()} | flags_of(
        kernel.fn, arguments
    )


def compiled(kernel: Any, arguments: dict[str, Any], warps: int, target: GPUTarget) -> Any:
    function = plain(kernel)
    arguments = arguments | flags_of(kernel, arguments)
    assert sorted(arguments) == sorted(function.arg_names)
    types = {n: v[0] if isinstance(v, tuple) else v for n, v in arguments.items()}
    multiples = {n for n, v in types.items() if v == MULTIPLE}
    types |= dict.fromkeys(multiples, "i32")
    constants = {n: v for n, v in types.items() if not isinstance(v, str)}
    if "constexprs" in inspect.signature(ASTSource).parameters:
        signature = {n: "constexpr" if n in constants else types[n] for n in function.arg_names}
        # PyTorch's tensors start at multiples of 16 bytes: loads are as wide as in a real launch
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(function.arg_names)
            if signature[n].startswith("*") or n in multiples
        }
        source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    else:  # Triton 3.2
        signature = {n: types[n] for n in function.arg_names if n not in constants}
        source = ASTSource(function, signature, constants=constants)
    return compile_kernel(source, target=target, options={"num_warps": warps})


def lacking(target: GPUTarget) -> str:
    """What the installed Triton lacks to compile for the target; empty if nothing."""
    if target.arch == 100 and "constexprs" not in inspect.signature(ASTSource).parameters:
        return "sm_100 came with Triton 3.3"
    if target.backend == "hip":
        from triton.backends.amd.compiler import HIPBackend

        try:  # newer ones bring their linker
            getattr(HIPBackend, "path_to_rocm_lld", lambda: None)()
        except Exception as error:
            return str(error)
    return ""


MATRIX = [
    pytest.param(
        target,
        name,
        case,
        id=f"{target.backend}-{target.arch}-{name.strip('_')}-{case[0]}",
        marks=pytest.mark.skipif(bool(reason), reason=reason),
    )
    for target in TARGETS
    for reason in [lacking(target)]
    for name, cases in (() if INTERPRETED else KERNELS.items())
    for case in cases(target)
]


@pytest.fixture(scope="module")
def kernels() -> dict[str, KernelInterface]:
    return jit_functions()


def test_every_kernel_is_in_the_matrix(kernels):
    sources = {name: plain(kernel).src for name, kernel in kernels.items()}
    helpers = {
        name
        for name in sources
        for other in sources
        if other != name and f"{name}(" in sources[other]
    }
    assert kernels.keys() - helpers == KERNELS.keys()


@pytest.mark.parametrize(("target", "name", "case"), MATRIX)
def test_compiles(target, name, case, kernels):
    _, arguments, warps = case
    assert len(compiled(kernels[name], arguments, warps, target).asm[BINARY[target.backend]])


@pytest.mark.parametrize("target", [t for t in TARGETS if t.backend == "cuda"], ids=str)
def test_tiles_on_their_way_fit_the_gpu(target, kernels):
    """Of the backward pass of a norm: the last part of a case's name is the memory there is."""
    if reason := lacking(target):
        pytest.skip(reason)
    for case, arguments, warps in rms_norm_backward(target):
        compilation = compiled(kernels["_rms_norm_backward_kernel"], arguments, warps, target)
        *_, shared_kib = case.split("-")
        assert compilation.metadata.shared <= int(shared_kib) * 1024, case
        if arguments["STAGES"] > 1 and "constexprs" in inspect.signature(ASTSource).parameters:
            element_bytes = 8 if arguments["dy_ptr"] == "*fp32" else 4
            tile_bytes = element_bytes * arguments["BLOCK_ROWS"]
            tile_bytes *= arguments["BLOCK_H"] + arguments["BLOCK_REST"]
            on_their_way = arguments["STAGES"] - 1
            assert compilation.metadata.shared >= on_their_way * tile_bytes, case


def test_long_rows_are_on_their_way_where_there_is_memory_for_them():
    from liger_patch.kernels.rms_norm_triton import backward_tile

    stages = {kib: backward_tile(8192, 4, kib * 1024)[0]["STAGES"] for kib in (64, 99, 227)}
    assert stages[64] == 1
    assert stages[99] > 1
    assert stages[227] > 1
