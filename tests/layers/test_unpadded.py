"""A padded batch runs through the backbone as one row of its real tokens. Losses, gradients and
results of real tokens are the model's own; where it cannot be, the batch stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import CONFIGS, SIZES, WARNINGS, Calls, configured, make_model, rows_of
from attention_models import served_calls as served_calls
from rows import IS_NEWEST, every_row
from rows import model_type as row_name
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import Tensor
from training_step import assert_right, in_float64, step, widened, with_checkpoints
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from liger_patch import apply_patch, registry
from liger_patch.layers import unpadded
from liger_patch.layers.replace import count_layers
from liger_patch.patch.labels import gives_logits_to_loss

pytestmark = WARNINGS
# of a row: from, to. The second begins behind the place where the first ends; the last is empty
LENGTHS = [(0, 9), (9, 31), (0, 40), (39, 40), (20, 20)]


def make_batch(lengths: list[tuple[int, int]] = LENGTHS, tokens: int = 40) -> dict[str, Tensor]:
    """Rows with padding on the left, on the right, on both sides, and nothing else."""
    generator = torch.Generator().manual_seed(2)
    shape = len(lengths), tokens
    ids = torch.randint(3, SIZES["vocab_size"], shape, generator=generator)
    place = torch.arange(tokens)
    mask = torch.stack([(place >= start) & (place < stop) for start, stop in lengths])
    labels = ids.masked_fill(~mask, -100)
    for row, (start, _) in enumerate(lengths):
        labels[row, start] = -100  # a token of padding would predict it
    return {"input_ids": ids * mask, "labels": labels, "attention_mask": mask.long()}


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["", "reentrant", "not"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_step_is_the_models_own(
    model_type: str, checkpointing: bool | None, calls: Calls
) -> None:
    model, batch = make_model(model_type), make_batch()
    truth = step(widened(model), batch)
    with_checkpoints(model, checkpointing)
    own = step(model, batch)
    shapes = rows_of(model)
    apply_patch(model, layers=["attention"])
    calls.own.clear()
    ours = step(model, batch)
    assert {*shapes} == {(1, 9 + 22 + 40 + 1)}
    assert_right(ours, own, truth)
    assert True not in calls.own
    assert model(**batch).logits.shape == (*batch["input_ids"].shape, SIZES["vocab_size"])


IN_ONE_ROW = "bamba", "qwen3_5_text", "qwen3_next"  # recurrent layers get the row's sequences


# those with recurrent layers also in a quick run
@pytest.mark.parametrize(
    "row", [*every_row(), *(ROWS[name] for name in IN_ONE_ROW if name in ROWS)], ids=row_name
)
def test_every_architecture_computes_what_it_does_with_padding(
    row: registry.Architecture, calls: Calls
) -> None:
    """No tokens of the batch begin alike: those would get another mask."""
    model = widened(tiny_model(row))
    model.train(row.model_type == "reformer")  # the others without what is drawn at random
    model.config.use_cache = model.config.get_text_config().use_cache = False
    batch = tiny_batch(model, batch=3, length=12)
    batch["attention_mask"] = mask = torch.ones_like(batch["labels"])
    mask[1, :5] = mask[2, 7:] = 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    batch["labels"][1, 5] = -100  # a token of padding would predict it
    with in_float64():
        own = step(model, batch)
        apply_patch(model)
        # before Transformers 5.17, they take no keywords
        is_one = row.model_type in IN_ONE_ROW and count_layers(model)["recurrent"] > 0
        assert is_one or row.model_type not in IN_ONE_ROW or not IS_NEWEST
        shapes = rows_of(model) if is_one else []
        ours = step(model, batch)
    torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-10)
    assert {*shapes} == ({(1, 12 + 7 + 7)} if is_one else set())


def text_of_images_too(model_type: str, prompt: int) -> tuple[Any, dict[str, Tensor]]:
    """A model that takes images, and padded rows of text whose first tokens are the same."""
    if model_type not in ROWS:
        pytest.skip("not in this version of Transformers")
    model = tiny_model(model_type).eval()
    if not gives_logits_to_loss(type(model)):
        pytest.skip("its forward reads the logits in this version of Transformers")
    model.config.use_cache = False  # as Trainer has it, which leaves that of the text on
    batch = make_batch([(0, 12), (0, 9), (1, 9), (0, 10)], 12)
    batch["input_ids"] = 10 + batch["input_ids"] % 40
    for row, start in enumerate((0, 0, 1, 0)):
        batch["input_ids"][row, start : start + prompt] = torch.arange(prompt)
        batch["labels"][row, : start + max(1, prompt)] = -100
    batch["labels"] = batch["input_ids"].masked_fill(batch["labels"] < 0, -100)
    return model, batch


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", [0, 6], ids=["", "one prompt"])
@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "qwen3_5", "qwen3_vl"])
def test_text_of_models_of_images_too_on_a_gpu_is_no_worse(model_type: str, prompt: int) -> None:
    model, batch = text_of_images_too(model_type, prompt)
    truth = step(widened(model), batch)
    model, batch = model.cuda(), {name: value.cuda() for name, value in batch.items()}
    eager = step(model, batch, autocast=True)
    apply_patch(model)
    shapes = rows_of(model)
    assert_right(step(model, batch, autocast=True), eager, truth, torch.bfloat16)
    assert {rows for rows, _ in shapes} == {1}


@pytest.mark.parametrize("prompt", [0, 6], ids=["", "one prompt"])
@pytest.mark.parametrize("model_type", unpadded.WITH_IMAGES)
def test_models_of_images_too_run_text_alone_as_one_row(
    model_type: str, prompt: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the dtype of what sees images."""
    asked: list[torch.dtype] = []

    def serves(_: Any, dtype: torch.dtype) -> bool:
        asked.append(dtype)
        return True

    monkeypatch.setattr(unpadded, "may_serve_flash_attention", serves)
    model, batch = text_of_images_too(model_type, prompt)
    model = widened(model)
    for name, weight in model.model.named_parameters():
        if not name.startswith("language_model."):
            weight.data = weight.data.bfloat16()
    with in_float64():
        own = step(model, batch)
        apply_patch(model)
        shapes = rows_of(model)
        ours = step(model, batch)
    torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-10)
    tokens = 39 if not prompt or count_layers(model)["delta_net"] else 39 - 3 * prompt
    assert {*shapes} == {(1, tokens)}
    assert {*asked} == {torch.float64}
    shapes.clear()
    with torch.no_grad():
        model(**batch)
    assert shapes == [(1, tokens)]


def _hole(model: Any, batch: dict[str, Any]) -> None:
    batch["attention_mask"][1, 10] = 0
    batch["labels"][1, 10:12] = -100


def _positions_of_a_length(model: Any, batch: dict[str, Any]) -> None:
    model.config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)


def _forward(model: Any, batch: dict[str, Any]) -> None:
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x)


def _with(**values: Any) -> Any:
    """Give the batch these."""
    return lambda model, batch: batch.update(values)


KEPT: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "noise of NEFTune": lambda model, _: setattr(
        model.get_input_embeddings(), "neftune_noise_alpha", 5.0
    ),
    "a forward of a user": _forward,
    "a backward hook of a user": lambda model, _: model.model.layers[0].register_full_backward_hook(
        lambda *_: None
    ),
    "padding between tokens": _hole,
    "a hook of a user": lambda model, _: model.model.layers[0].mlp.register_forward_hook(
        lambda *_: None
    ),
    "positions of the caller": _with(position_ids=torch.arange(40).expand(5, 40)),
    "a cache": _with(use_cache=True),
    "little padding": _with(**make_batch([(0, 40), (0, 37), (0, 40)])),
    "positions of a length": _positions_of_a_length,
    "queries scaled by position": lambda model, _: model.config.rope_parameters.update(
        llama_4_scaling_beta=0.1
    ),
    "a cache by the configuration": configured(use_cache=True),
    "values of another size": lambda model, _: setattr(
        model.model.layers[0].self_attn, "v_head_dim", 4
    ),
    "a compiled layer": lambda model, _: model.model.layers[0].compile(backend="eager"),
    "eager attention": lambda model, _: model.set_attn_implementation("eager"),
    "chunks": configured(layer_types=["chunked_attention"] * 2),
    "layers of an unknown kind": configured(layer_types=["linear"] * 2),
    "keys of an index": configured(layer_types=["full_attention", "indexed_attention"]),
    "blocks of keys": configured(layer_types=["full_attention", "minimax_m3_sparse"]),
    "a softcap": configured(attn_logit_softcapping=30.0),
    "attention to both sides": configured(is_causal=False),
    "no padding": _with(**make_batch([(0, 40)] * 3)),
    "no mask": _with(attention_mask=None),
    "embeddings": lambda model, batch: batch.update(
        inputs_embeds=model.model.embed_tokens(batch.pop("input_ids")).detach()
    ),
}


@pytest.mark.parametrize("kind", KEPT)
def test_other_batches_stay_as_they_are(kind: str, calls: Calls) -> None:
    model, batch = make_model("llama"), make_batch()
    KEPT[kind](model, batch)
    with torch.no_grad():
        own = model(**batch)[0]
    apply_patch(model, layers=["attention"])
    shapes = rows_of(model)
    with torch.no_grad():
        ours = model(**batch)[0]
    rows = batch.get("input_ids", batch["labels"]).shape
    assert shapes == [rows]
    torch.testing.assert_close(ours, own)


def test_a_model_without_rotary_positions_keeps_its_batch(calls: Calls) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=131, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    model, batch = AutoModelForCausalLM.from_config(config), make_batch()
    assert not unpadded._has_rotary_positions(model.transformer)
    model.eval()
    with torch.no_grad():
        own = model(**batch).loss
        torch.testing.assert_close(apply_patch(model)(**batch).loss, own)


def test_flash_attention_2_parts_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Transformers' own functions, with PyTorch's attention for the library's."""
    from transformers import modeling_flash_attention_utils as utils

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any):
        (ends, _), _ = utils.prepare_fa_kwargs_from_position_ids(options["position_ids"])
        assert ends.tolist() == [0, 9, 31, 71, 72]
        lengths = ends.diff().tolist()
        groups = query.shape[1] // key.shape[1]
        states = query, *(each.repeat_interleave(groups, 1) for each in (key, value))
        parts = zip(*(each.split(lengths, 2) for each in states), strict=True)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([sdpa(*part, is_causal=True) for part in parts], 2).transpose(1, 2), None

    model, batch = make_model("llama"), make_batch()
    truth, own = step(widened(model), batch), step(model, batch)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", attention)
    apply_patch(model, layers=["attention"])
    model.config._attn_implementation_internal = "flash_attention_2"
    assert_right(step(model, batch), own, truth)


def test_hooks_of_peft_take_any_shape(calls: Calls) -> None:
    """As that which it sets on the embedding, for gradient checkpointing."""
    peft = pytest.importorskip("peft")
    model = make_model("llama")
    model.is_loaded_in_4bit = True  # else PEFT sets none
    how = {"use_reentrant": False}
    peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=how)
    shapes = rows_of(model)
    apply_patch(model, layers=["attention"])(**make_batch()).loss.backward()
    assert {*shapes} == {(1, 9 + 22 + 40 + 1)}


@pytest.mark.parametrize("return_dict", [True, False])
def test_logits_of_real_tokens_are_the_models_own(return_dict: bool, calls: Calls) -> None:
    model, batch = make_model("mistral"), make_batch()
    with torch.no_grad():
        own_loss, own, *_ = model(**batch, return_dict=False)
        outputs = apply_patch(model, layers=["attention"])(**batch, return_dict=return_dict)
    loss, ours = (outputs.loss, outputs.logits) if return_dict else outputs[:2]
    torch.testing.assert_close(loss, own_loss)
    real, ours = batch["attention_mask"].bool(), torch.as_tensor(ours)
    torch.testing.assert_close(ours[real], own[real])
    assert ours.isfinite().all()
