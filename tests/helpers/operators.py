"""The operators of ``liger_patch.kernels``, a row each. ``test_operators`` holds every row to every
property that operators share, and to views of its inputs.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import delta_cases
import eager_layers
import expert_cases
import layer_checks
import torch
from distillation_ways import check_distillation, heads
from layer_checks import (
    causal_conv,
    gated,
    gated_delta_rule,
    gated_mlp,
    gated_norm,
    lora_linears,
    rms_norm,
)
from log_probs_ways import DIFFERENTIABLE, check_log_probs
from lora_checks import eager_linears, eager_mlp, linears_inputs, mlp_inputs, of_tensors, tensors_of
from three_ways import check_linear, check_logits, linear_inputs, logits_inputs, paired
from torch import Tensor

from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_distillation import linear_distillation
from liger_patch.kernels.linear_log_probs import linear_log_probs
from liger_patch.kernels.lora.projection import LoraProjection
from liger_patch.kernels.rotary import rotary

Tensors = dict[str, Tensor]
Rule = Callable[..., Any]  # of tensors by name, ``frozen``, and a view of the upstream gradients
EVERYTHING = r".*"
EPS = eager_layers.EPS
TOKENS = 10
WIDE = ("class_weight", "token_weight")  # float32 beside inputs of every dtype


@dataclass(frozen=True)
class Operator:
    name: str  # in its errors
    call: Callable[..., Any]  # takes tensors by name; returns what has a gradient
    made: Callable[[int], Tensors]  # of so many tokens, in float32
    rule: Rule  # holds a call to the rule of ``exactness``
    fixed: tuple[str, ...] = ()  # tensors without a gradient
    wanted: tuple[str, ...] = ()  # patterns of names that take gradients, beside each name alone
    dtype: torch.dtype = torch.bfloat16  # of tests in one dtype
    records: bool = False  # one operator forward and one backward in every graph

    def tensors(
        self, device: Any, dtype: torch.dtype | None = None, tokens: int = TOKENS
    ) -> Tensors:
        made, dtype = self.made(tokens), dtype or self.dtype
        cast = {n for n, value in made.items() if value.is_floating_point()} - set(WIDE)
        return {n: v.to(device, dtype if n in cast else v.dtype) for n, v in made.items()}

    def trainable(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [name for name in tensors if name not in self.fixed]

    def run(
        self, tensors: Mapping[str, Tensor], wanted: str = EVERYTHING
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the leaves whose names match, and the results."""
        leaves = {
            name: value.detach().requires_grad_(
                name not in self.fixed and re.fullmatch(wanted, name) is not None
            )
            for name, value in tensors.items()
        }
        return [each for each in leaves.values() if each.requires_grad], as_tuple(
            self.call(**leaves)
        )

    def gradients(self, tensors: Mapping[str, Tensor], wanted: str = EVERYTHING) -> list[Tensor]:
        """Return results and gradients, of upstream gradients that differ everywhere."""
        leaves, results = self.run(tensors, wanted)
        gradients = torch.autograd.grad(results, leaves, upstream_of(results))
        return [*(each.detach() for each in results), *gradients]

    def check(self, tensors: Mapping[str, Tensor], wanted: str = EVERYTHING, **how: Any) -> None:
        frozen = [n for n in tensors if n in self.fixed or not re.fullmatch(wanted, n)]
        self.rule(tensors, frozen=frozen, **how)


def transposed(x):
    """The first two dimensions the other way round."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else strided(x)


def columns(x):
    """The last two dimensions the other way round."""
    return x.mT.contiguous().mT if x.dim() > 1 else strided(x)


def strided(x):
    """Every second element along each dimension of a larger tensor."""
    larger = x.new_full([2 * size for size in x.shape], 3)
    view = larger[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def padded(x):
    """Rows with something behind them."""
    larger = x.new_full((*x.shape[:-1], x.shape[-1] + 5), 3)
    return larger[..., : x.shape[-1]].copy_(x)


def offset(x):
    """The second half of a larger tensor's features."""
    return x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 3).chunk(2, -1)[1].copy_(x)


def expanded(x):
    """The first row, or element, for all."""
    return x[:1].expand_as(x)


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def upstream_of(results: Collection[Tensor]) -> list[Tensor]:
    return [torch.linspace(-1, 2, each.numel()).view(each.shape).to(each) for each in results]


def of_layer(call: Callable[..., Any], eager: Callable[..., Any]) -> dict[str, Any]:
    return {"call": call, "rule": partial(layer_checks.check, call, eager)}


def loss_rule(
    check: Callable[..., Any],
    tensors: Tensors,
    frozen: Collection[str],
    view: Callable[[Tensor], Tensor] = lambda upstream: upstream,
    **how: Any,
):
    inputs = {n: v for n, v in tensors.items() if n not in ("labels", *WIDE)}
    frozen, labels = [name for name in frozen if name in inputs], tensors["labels"]
    upstream = torch.linspace(-1, 2, len(labels), device=labels.device)
    if check is check_log_probs:
        given = {name: view(upstream * (i + 1)) for i, name in enumerate(DIFFERENTIABLE)}
        return check(inputs, labels, upstream=given, frozen=frozen, outputs=DIFFERENTIABLE)
    if how.get("reduction") != "none":
        upstream = torch.tensor(-1.7, device=labels.device)
    how |= {name: tensors[name] for name in WIDE}
    how["upstream"] = view(upstream) if upstream.dim() else upstream
    if check is check_logits:
        return check(inputs["logits"], labels, **how)
    return check(inputs, labels, frozen=frozen, **how)


def of_loss(function: Any, check: Any, **options: Any) -> dict[str, Any]:
    return {
        "call": lambda **tensors: function(**paired(tensors), **options),
        "rule": partial(loss_rule, check, **options),
        "fixed": ("labels", *WIDE),
    }


def made_linear(tokens: int, **how: Any) -> Tensors:
    """``how`` as of ``linear_inputs``."""
    inputs, labels = linear_inputs(torch.float32, torch.device("cpu"), tokens, **how)
    return {**inputs, "labels": labels, **weights(tokens)}


def made_logits(tokens: int, **how: Any) -> Tensors:
    logits, labels = logits_inputs(torch.float32, torch.device("cpu"), tokens, **how)
    return {"logits": logits, "labels": labels, **weights(tokens)}


def weights(tokens: int) -> Tensors:
    return {"class_weight": torch.rand(131) + 0.5, "token_weight": torch.rand(tokens)}


def log_probs(**tensors: Tensor) -> tuple[Any, ...]:
    results = linear_log_probs(**paired(tensors), outputs=DIFFERENTIABLE)
    return tuple(getattr(results, name) for name in DIFFERENTIABLE)


def made_log_probs(tokens: int, **how: Any) -> Tensors:
    tensors = made_linear(tokens, **how)
    return {name: value for name, value in tensors.items() if name not in WIDE}


TEACHER = ("teacher_hidden", "teacher_weight", "teacher_bias")


def made_distillation(tokens: int) -> Tensors:
    student, teacher, labels = heads(torch.float32, torch.device("cpu"), tokens, bias=True)
    return {**student, **teacher, "labels": labels, "token_weight": torch.rand(tokens)}


def distillation_rule(
    tensors: Tensors, frozen: Collection[str], view: Any = None, **options: Any
) -> None:
    """Its upstream gradient is one number, of which there is one view."""
    student = {n: v for n, v in tensors.items() if n not in (*TEACHER, "labels", *WIDE)}
    teacher = {name: tensors[name] for name in TEACHER}
    options["token_weight"] = tensors["token_weight"]
    upstream = torch.tensor(-1.7, device=tensors["labels"].device)
    how = {"upstream": upstream, "frozen": tuple(n for n in frozen if n in student)}
    check_distillation(student, teacher, tensors["labels"], **how, **options)


def shaped(**shapes: tuple[int, ...]) -> Callable[[int], Tensors]:
    """Of random numbers; -1 stands for the number of tokens."""
    return lambda tokens: {
        name: torch.randn([tokens if size == -1 else size for size in shape])
        for name, shape in shapes.items()
    }


def made_rotary(pairs: bool, tokens: int) -> Tensors:
    tokens = -(-tokens // 4)  # each is a program, which takes the interpreter a while
    tensors = shaped(q=(2, 3, -1, 16), k=(2, 1, -1, 16))(tokens)
    cos, sin = eager_layers.tables((2, tokens, 10), "any order")
    size = 5 if pairs else 10
    return tensors | {"cos": cos[..., :size].clone(), "sin": sin[..., :size].clone()}


def of_parts(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of x and three projections as one of tensors by name."""
    nothing: Any = None
    parts = [LoraProjection(*[nothing] * 4, scaling=1.5 / (i + 1)) for i in range(3)]
    return of_tensors(layer, parts)


def made_parts(inputs: Callable[..., Any], tokens: int, **how: Any) -> Tensors:
    """``how`` as of ``projection``."""
    return tensors_of(*inputs("cpu", "float32", (2, tokens, 40), **how))


def lora_mlp(x: Tensor, parts: Any, **how: Any) -> Tensor:
    return gated_mlp(x, *parts, activation="gelu_tanh", **how)


LOG_PROBS = {
    "call": log_probs,
    "rule": partial(loss_rule, check_log_probs),
    "fixed": ("labels",),
}
GATED_NORM = {"made": shaped(x=(2, -1, 24), gate=(2, -1, 24), weight=(24,)), "records": True}
MLP = {"made": shaped(x=(2, -1, 24), gate=(40, 24), up=(40, 24), down=(24, 40))}
LORA = {
    "dtype": torch.float16,  # which Triton's interpreter multiplies
    "wanted": (r"\d\.[ab]", r"x|\d\.[ab]", r"x|0\.[ab]", r"2\.[ab]", r"\d\.(weight|bias)"),
}
EXPERTS = {
    "fixed": ("index",),
    "dtype": torch.float16,  # as of LORA
    "wanted": (r".*\.[ab]", r"x|.*\.[ab]", r".*weights?", r".*\.bias|x"),
}
LORA_MLP = {"made": partial(made_parts, mlp_inputs, bias=True), **LORA}

OPERATORS = {
    "linear_cross_entropy": Operator(
        "linear_cross_entropy",
        made=partial(made_linear, bias=True),
        **of_loss(linear_cross_entropy, check_linear),
    ),
    "linear_cross_entropy of each token": Operator(
        "linear_cross_entropy",
        made=partial(made_linear, bias=True, rank=4, ignored=0.0),
        dtype=torch.float32,
        **of_loss(linear_cross_entropy, check_linear, reduction="none", softcap=5.0),
    ),
    "cross_entropy": Operator(
        "cross_entropy", made=made_logits, **of_loss(cross_entropy, check_logits)
    ),
    "cross_entropy of each token": Operator(
        "cross_entropy",
        made=partial(made_logits, ignored=0.0),
        dtype=torch.float32,
        **of_loss(cross_entropy, check_logits, reduction="none", label_smoothing=0.1),
    ),
    "linear_log_probs": Operator(
        "linear_log_probs", made=partial(made_log_probs, bias=True, rank=4), **LOG_PROBS
    ),
    "linear_log_probs of all tokens": Operator(
        "linear_log_probs",
        made=partial(made_log_probs, ignored=0.0),
        dtype=torch.float32,
        **LOG_PROBS,
    ),
    "linear_distillation": Operator(
        "linear_distillation",
        made=made_distillation,
        call=partial(linear_distillation, ce_weight=0.4),
        rule=partial(distillation_rule, ce_weight=0.4),
        fixed=(*TEACHER, "labels", "token_weight"),
    ),
    "rms_norm": Operator(
        "rms_norm",
        made=shaped(x=(2, -1, 5, 16), weight=(16,)),
        records=True,
        **of_layer(lambda x, weight: rms_norm(x, weight, EPS, offset=1.0), eager_layers.gemma_norm),
    ),
    "gated": Operator(
        "gated",
        made=shaped(gate=(2, -1, 48), up=(2, -1, 48)),
        records=True,
        **of_layer(gated, lambda gate, up: layer_checks.ACTIVATIONS["silu"](gate) * up),
    ),
    "gated of halves": Operator(
        "gated",
        made=shaped(both=(2, -1, 48)),
        records=True,
        **of_layer(
            lambda both: gated(both, activation="gelu_tanh"),
            lambda both: layer_checks.ACTIVATIONS["gelu_tanh"](both[..., :24]) * both[..., 24:],
        ),
    ),
    "gated_norm": Operator(
        "gated_norm",
        **GATED_NORM,
        **of_layer(
            lambda x, gate, weight: gated_norm(x, gate, weight, EPS),
            partial(eager_layers.gate_behind, size=24, activation="silu"),
        ),
    ),
    "gated_norm, gate first": Operator(
        "gated_norm",
        **GATED_NORM,
        **of_layer(
            lambda x, gate, weight: gated_norm(
                x, gate, weight, EPS, group_size=12, gate_first=True
            ),
            partial(eager_layers.gate_in_front, size=12, activation="silu"),
        ),
    ),
    "causal_conv": Operator(
        "causal_conv",
        made=shaped(x=(2, -1, 24), weight=(24, 4), bias=(24,)),
        records=True,
        **of_layer(
            partial(causal_conv, activation="silu"),
            partial(eager_layers.causal_conv, activation="silu"),
        ),
    ),
    "gated_delta_rule": Operator(
        "gated_delta_rule",
        made=partial(delta_cases.inputs, heads=1),
        dtype=torch.float16,  # as of LORA
        records=True,
        **of_layer(gated_delta_rule, delta_cases.eager),
    ),
    "rotary": Operator(
        "rotary",
        made=partial(made_rotary, False),
        fixed=("cos", "sin"),
        records=True,
        **of_layer(
            rotary,
            lambda q, k, cos, sin: tuple(eager_layers.rotated(x, cos, sin) for x in (q, k)),
        ),
    ),
    "rotary of pairs": Operator(
        "rotary",
        made=partial(made_rotary, True),
        fixed=("cos", "sin"),
        records=True,
        **of_layer(
            partial(rotary, interleaved=True),
            lambda q, k, cos, sin: tuple(eager_layers.rotated_beside(x, cos, sin) for x in (q, k)),
        ),
    ),
    "gated_mlp": Operator("gated_mlp", **MLP, **of_layer(gated_mlp, eager_layers.mlp)),
    "gated_mlp in slices": Operator(
        "gated_mlp",
        **MLP,
        **of_layer(partial(gated_mlp, slice_tokens=4), eager_layers.mlp),
    ),
    "lora_linears": Operator(
        "lora_linears",
        made=partial(made_parts, linears_inputs),
        **LORA,
        **of_layer(of_parts(lora_linears), of_parts(eager_linears)),
    ),
    "lora_mlp": Operator(
        "gated_mlp",
        **LORA_MLP,
        **of_layer(of_parts(lora_mlp), of_parts(eager_mlp("gelu_tanh"))),
    ),
    "lora_mlp in slices": Operator(
        "gated_mlp",
        **LORA_MLP,
        **of_layer(of_parts(partial(lora_mlp, slice_tokens=4)), of_parts(eager_mlp("gelu_tanh"))),
    ),
    "experts": Operator(
        "experts",
        made=partial(expert_cases.inputs, is_transposed=True),
        **EXPERTS,
        **of_layer(*expert_cases.calls()),
    ),
    "experts with biases": Operator(
        "experts",
        made=partial(expert_cases.inputs, bias=True, hidden=20),
        **EXPERTS,
        **of_layer(*expert_cases.calls(expert_cases.FORMS["clamped, interleaved, shifted"])),
    ),
}
