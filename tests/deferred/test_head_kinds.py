"""Every kind of head x what trains x precision x when it is patched: fused or falling back as
docs/models.md says, with eager's loss and gradients. UPDATE_README=1 writes the table there.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import training_step
from documents import check_section, table_of
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import nn
from torch.nn.utils import parametrizations
from training_step import assert_right
from unusual_heads import float8, packed, sharded, two_layers

from liger_patch import apply_patch, patch_status

peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
bnb = pytest.importorskip("bitsandbytes")

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
TRAINED = ("everything", "all but the head", "the head alone")
PRECISIONS = ("float64", "bfloat16", "bfloat16 autocast")

# of PEFT: an adapter on a tied head; a base model without a name to look up
pytestmark = pytest.mark.filterwarnings(
    "ignore:Model (has|with) .tie_word_embeddings:UserWarning",
    "ignore:Could not find a config file in:UserWarning",
    "ignore:TorchaoLoraLinear was instantiated without:UserWarning",  # it cannot be merged
)


class Kind(NamedTuple):
    """A row of the table.

    Attributes:
        change: of a model's head; the model, or a wrapper around it.
        why: it falls back, as the table says; "" where it is fused.
        model_type: of the model.
        trained: what of TRAINED is possible: a quantized head does not train.
        quantized: it has no float64 form.
    """

    change: Callable[[Any], Any]
    why: str = ""
    model_type: str = "llama"
    trained: tuple[str, ...] = TRAINED
    quantized: bool = False


def replaced(change: Callable[[Any], nn.Module | None]) -> Callable[[Any], Any]:
    def changed(model: Any) -> Any:
        head = change(model.lm_head)
        if head is not None:
            model.lm_head = head.to(model.dtype)
        return model

    return changed


def adapted(*targets: str, second: bool = False, **options: Any) -> Callable[[Any], Any]:
    def changed(model: Any) -> Any:
        # as Transformers says of a model that it has loaded in 4 bits: then PEFT's layer is another
        model.is_loaded_in_4bit = isinstance(model.lm_head, bnb.nn.Linear4bit)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=list(targets) or ["lm_head"], **options
        )
        model = peft.get_peft_model(model, config)
        if second:
            model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["lm_head"]))
            model.base_model.set_adapter(["default", "second"])
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.3)
        return model

    return changed


def merged(model: Any) -> Any:
    model = adapted()(model)
    model.merge_adapter()
    return model


def with_ia3(model: Any) -> Any:
    config = peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "lm_head"], feedforward_modules=[]
    )
    return peft.get_peft_model(model, config)


def with_bias(head: nn.Linear) -> nn.Module:
    new = nn.Linear(head.in_features, head.out_features)
    new.weight = head.weight
    return new


def in_bits(config: Any) -> Callable[[nn.Linear], nn.Module]:
    """As ``BitsAndBytesConfig`` quantizes a linear layer."""

    def changed(head: nn.Linear) -> nn.Module:
        sizes, weight = (head.in_features, head.out_features), head.weight.detach().clone()
        if config == 4:
            new: Any = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=weight.dtype)
            new.weight = bnb.nn.Params4bit(weight, requires_grad=False, blocksize=32)
        else:
            new = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return new.to("cpu")

    return changed


def by_torchao(model: Any) -> Any:
    ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    ao.quantize_(model.lm_head, ao.Int8WeightOnlyConfig())
    return model


def both(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: second(first(model))


def offloaded(model: Any) -> Any:
    accelerate.cpu_offload_with_hook(model.lm_head, execution_device="cpu")
    return model


def hooked(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


BODY = ("all but the head",)
FROZEN_HEAD = ("everything", "all but the head")
KINDS: dict[str, Kind] = {
    "`nn.Linear`": Kind(lambda model: model),
    "… with a bias": Kind(replaced(with_bias)),
    "… tied to the input embedding": Kind(
        lambda model: model, model_type="gemma2", trained=FROZEN_HEAD
    ),
    "… with a forward hook": Kind(hooked),
    "… offloaded by accelerate": Kind(offloaded, trained=BODY),
    "weight norm, and other parametrizations": Kind(replaced(parametrizations.weight_norm)),
    "stored in float8, cast to be used": Kind(replaced(float8), trained=FROZEN_HEAD),
    "PEFT: adapters elsewhere": Kind(adapted("q_proj"), trained=BODY),
    "PEFT: LoRA on `lm_head`": Kind(adapted()),
    "… rank-stabilised, with dropout": Kind(adapted(use_rslora=True, lora_dropout=0.2)),
    "… two adapters at once": Kind(adapted(second=True)),
    "… merged": Kind(merged),
    "… DoRA": Kind(adapted(use_dora=True), why="scales the sum by a vector"),
    "PEFT: IA³ on `lm_head`": Kind(with_ia3, why="scales the logits by a vector"),
    'PEFT: `modules_to_save=["lm_head"]`': Kind(adapted("q_proj", modules_to_save=["lm_head"])),
    "PEFT: trainable tokens of a tied head": Kind(
        adapted("q_proj", trainable_token_indices=[20, 21]),
        why="builds its weight anew at each call",
        model_type="gemma2",
        trained=FROZEN_HEAD,
    ),
    "bitsandbytes: 4 bits": Kind(
        replaced(in_bits(4)), why="quantized", trained=FROZEN_HEAD, quantized=True
    ),
    "… LoRA on it": Kind(both(replaced(in_bits(4)), adapted()), why="quantized", quantized=True),
    "bitsandbytes: 8 bits": Kind(
        replaced(in_bits(8)), why="quantized", trained=FROZEN_HEAD, quantized=True
    ),
    "torchao: int8 weights": Kind(by_torchao, why="quantized", trained=FROZEN_HEAD, quantized=True),
    "a tensor subclass, such as a distributed tensor": Kind(
        replaced(sharded), why="not a plain tensor"
    ),
    "packed integers (GPTQ, AWQ)": Kind(
        replaced(packed), why="quantized", trained=FROZEN_HEAD, quantized=True
    ),
    "any other module": Kind(replaced(two_layers), why="unknown module"),
}


def build(kind: Kind, dtype: torch.dtype, patch: str) -> Any:
    model = tiny_model(kind.model_type, dtype=dtype).train()
    if patch == "before":
        apply_patch(model, layers=False)
    torch.manual_seed(1)
    model = kind.change(model)
    return apply_patch(model, layers=False) if patch == "after" else model


def train_only(model: Any, trained: str) -> None:
    """By name: the head's parameters, its adapters among them, and the others."""
    for name, parameter in model.named_parameters():
        of_head = "lm_head" in name
        wanted = trained == "everything" or of_head == (trained == "the head alone")
        if parameter.is_floating_point():
            parameter.requires_grad_(wanted and parameter.dtype != torch.float8_e4m3fn)


def step(model: Any, trained: str, autocast: bool = False) -> dict[str, Any]:
    train_only(model, trained)
    return training_step.step(model, tiny_batch(model), autocast=autocast)


CELLS = [
    (name, trained, precision, patch)
    for name, kind in KINDS.items()
    for trained in kind.trained
    for precision in PRECISIONS
    for patch in ("before", "after")
    if not (kind.quantized and precision == "float64")
    and (patch == "after" or precision == "bfloat16")  # the moment has nothing to do with numbers
]


def is_quick(cell: tuple[str, str, str, str]) -> bool:
    """The most exact numbers of a kind are its quick test."""
    name, _, precision, patch = cell
    most_exact = "bfloat16" if KINDS[name].quantized else "float64"
    return (precision, patch) == (most_exact, "after")


@pytest.mark.parametrize(
    ("name", "trained", "precision", "patch"), slow_but([*filter(is_quick, CELLS)], CELLS)
)
def test_every_cell_is_what_the_table_says(
    name: str, trained: str, precision: str, patch: str
) -> None:
    kind = KINDS[name]
    dtype = torch.float64 if precision == "float64" else torch.bfloat16
    autocast = "autocast" in precision
    eager = step(build(kind, dtype, ""), trained, autocast)
    model = build(kind, dtype, patch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = step(model, trained, autocast)
    status = patch_status(model)
    assert status.fused is not bool(kind.why), status
    said = [str(w.message) for w in caught if "liger_patch" in str(w.message)]
    assert len(said) == bool(kind.why)
    assert all(status.reason is not None and status.reason in message for message in said)
    assert {name for name in eager if eager[name] is None} == {
        name for name in ours if ours[name] is None
    }
    if dtype == torch.float64:
        assert_no_worse(ours, eager, eager, torch.float32)
        return
    # what falls back computes what eager does
    truth = eager
    if not kind.why:
        truth = step(copy.deepcopy(build(kind, torch.bfloat16, "")).double(), trained)
    kept = [name for name in eager if eager[name] is not None]
    truth, eager, ours = ({name: x[name] for name in kept} for x in (truth, eager, ours))
    assert_right(ours, eager, truth, torch.bfloat16)


def table() -> str:
    lines = [["head", *(f"trains {trained}" for trained in TRAINED)]]
    for name, kind in KINDS.items():
        cell = "falls back" if kind.why else "fused"
        why = f": {kind.why}" if kind.why else ""
        lines.append([name + why, *(cell if t in kind.trained else "" for t in TRAINED)])
    return table_of(lines)


def test_the_docs_have_the_table() -> None:
    check_section(DOCS, "kinds", table())
