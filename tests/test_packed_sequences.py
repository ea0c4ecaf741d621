"""Rows that hold several sequences train as the sequences do apart: no token predicts across a
boundary, and both averages are those of the unpacked batch.

The truth is the eager model in float64, called with one sequence at a time.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import END_OF_WORDS, FIRST_WORD, PAD, tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from training_step import Float64, Step, call, gradients, joined, patched, step, widened
from transformers import DataCollatorWithFlattening, PreTrainedModel

from liger_patch import apply_patch, patch_status, registry
from liger_patch.sequences import count_sequences, sequence_starts

TESTS = Path(__file__).parent
ROWS = {row.model_type: row for row in registry.available()}
MODEL_TYPES = ["llama", "gemma2", "qwen3"]
AVERAGES = ["token", "sequence"]
IGNORED = -100
Sample = dict[str, list[int]]


def make_model(model_type: str = "llama") -> PreTrainedModel:
    model = widened(tiny_model(ROWS[model_type]))
    # as Trainer has it: with a cache, Transformers' attention looks across boundaries
    model.config.use_cache = False
    return model


def make_samples(*lengths: int, prompts: bool = True, seed: int = 0) -> list[Sample]:
    """Sequences of these lengths; with prompts, a third of each is not supervised."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        ids = torch.randint(FIRST_WORD, END_OF_WORDS, (length,), generator=generator).tolist()
        prompt = length // 3 if prompts else 0
        samples.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return samples


def tensors(sample: Sample) -> dict[str, Tensor]:
    return {name: torch.tensor([values]) for name, values in sample.items()}


# --- ways to bring several sequences to a model ---------------------------------------------------


def positions_only(samples: list[Sample]) -> dict[str, Any]:
    """One row, and labels that nobody has masked at the boundaries."""
    lengths = [len(s["input_ids"]) for s in samples]
    row = {name: [x for s in samples for x in s[name]] for name in ("input_ids", "labels")}
    return tensors({**row, "position_ids": [i for n in lengths for i in range(n)]})


def two_rows(samples: list[Sample]) -> dict[str, Any]:
    """Packed rows of the same length, the second padded."""
    rows = [positions_only(samples[:2]), positions_only(samples[2:])]
    length = max(row["input_ids"].shape[1] for row in rows)
    padding = {"input_ids": PAD, "labels": IGNORED, "position_ids": 0}
    return {
        name: torch.cat(
            [
                torch.nn.functional.pad(row[name], (0, length - row[name].shape[1]), value=value)
                for row in rows
            ]
        )
        for name, value in padding.items()
    }


def flattened(samples: list[Sample]) -> dict[str, Any]:
    """Transformers' own collator."""
    return DataCollatorWithFlattening()(samples, return_tensors="pt")


def flattened_for_kernels(samples: list[Sample]) -> dict[str, Any]:
    """The same with what flash attention and linear attention ask for."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return collate(samples, return_tensors="pt")


def trl_padding_free(samples: list[Sample]) -> dict[str, Any]:
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate: Any = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)
    return collate(samples)


def trl_packed(samples: list[Sample]) -> dict[str, Any]:
    """Of TRL's packing: each row says how long its sequences are."""
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate: Any = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)
    packed = [
        {
            "input_ids": [x for s in part for x in s["input_ids"]],
            "labels": [x for s in part for x in s["labels"]],
            "seq_lengths": [len(s["input_ids"]) for s in part],
        }
        for part in (samples[:2], samples[2:])
    ]
    return collate(packed)


def padded(samples: list[Sample], side: str = "right") -> dict[str, Tensor]:
    """Not packed: one sequence a row."""
    longest = max(len(s["input_ids"]) for s in samples)
    batch: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
    padding = {"input_ids": PAD, "labels": IGNORED, "attention_mask": 0}
    for sample in samples:
        missing = longest - len(sample["input_ids"])
        width = (0, missing) if side == "right" else (missing, 0)
        values = {**sample, "attention_mask": [1] * len(sample["input_ids"])}
        for name, value in padding.items():
            row = torch.tensor(values[name])
            batch[name].append(torch.nn.functional.pad(row, width, value=value))
    return {name: torch.stack(rows) for name, rows in batch.items()}


PACKINGS: list[Callable[[list[Sample]], dict[str, Any]]] = [
    positions_only,
    two_rows,
    flattened,
    flattened_for_kernels,
    trl_padding_free,
    trl_packed,
]


def truth_of(model: PreTrainedModel, samples: list[Sample], average: str) -> Step:
    """Loss and gradients of the eager model, one sequence at a time."""
    logits = [call(model, {"input_ids": tensors(s)["input_ids"]}).logits[0] for s in samples]
    return averaged(model, logits, samples, average)


def packed_eagerly(model: PreTrainedModel, samples: list[Sample], average: str) -> Step:
    """Loss and gradients of the eager model, of one packed row."""
    batch = {name: value.to(model.device) for name, value in positions_only(samples).items()}
    del batch["labels"]
    (row,) = call(model, batch).logits
    return averaged(model, row.split([len(s["input_ids"]) for s in samples]), samples, average)


def averaged(
    model: PreTrainedModel, logits: Iterable[Tensor], samples: list[Sample], average: str
) -> Step:
    """Of the logits (T, V) of each sequence."""
    sums, counts = [], []
    for rows, sample in zip(logits, samples, strict=True):
        labels = torch.tensor(sample["labels"][1:], device=rows.device)
        if (labels != IGNORED).any():
            sums.append(cross_entropy(rows[:-1], labels, reduction="sum"))
            counts.append((labels != IGNORED).sum())
    total, count = torch.stack(sums), torch.stack(counts)
    loss = total.sum() / count.sum() if average == "token" else (total / count).mean()
    return {"loss": loss.detach(), **gradients(model, loss)}


# --- packed equals unpacked -----------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: p.__name__)
def test_packed_trains_as_unpacked(packing: Callable, average: str, model_type: str) -> None:
    model, samples = make_model(model_type), make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples, average)
    with patched(model, loss_average=average):
        packed, unpacked = (step(model, how(samples)) for how in (packing, padded))
        assert patch_status(model).fused
    torch.testing.assert_close(unpacked, truth)
    torch.testing.assert_close(packed, truth)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("average", AVERAGES)
def test_packed_trains_as_unpacked_with_layers_on_kernels(average: str, model_type: str) -> None:
    """Rotary embeddings take each token's own position."""
    model, samples = make_model(model_type), make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples, average)
    with patched(model, loss_average=average, layers=True):
        torch.testing.assert_close(step(model, positions_only(samples)), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("average", AVERAGES)
def test_packed_trains_as_unpacked_on_a_gpu(average: str, model_type: str) -> None:
    model: Any = make_model(model_type)
    samples = make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples, average)
    model.to("cuda", torch.float32)
    eager = packed_eagerly(model, samples, average)
    batch = {name: value.cuda() for name, value in positions_only(samples).items()}
    with patched(model, loss_average=average, layers=True):
        ours = step(model, batch)
    eager, ours = ({n: None if v is None else v.cpu() for n, v in x.items()} for x in (eager, ours))
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.float32)


@pytest.mark.parametrize("average", AVERAGES)
def test_real_logits_have_the_same_loss(average: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = make_model(), make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples, average)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    with patched(model, loss_average=average):
        torch.testing.assert_close(step(model, positions_only(samples)), truth)
        assert not patch_status(model).fused


@pytest.mark.parametrize("average", AVERAGES)
def test_a_verified_step_is_fused(average: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = make_model(), make_samples(9, 4, 13, 6)
    monkeypatch.setenv("LIGER_PATCH_VERIFY", "1")
    with patched(model, loss_average=average):
        step(model, positions_only(samples))
        assert patch_status(model).fused


@pytest.mark.parametrize("average", AVERAGES)
def test_labels_that_the_collator_has_shifted(average: str) -> None:
    model, samples = make_model(), make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples, average)
    batch = flattened(samples)
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    assert count_sequences(batch) == len(samples)
    with patched(model, loss_average=average):
        torch.testing.assert_close(step(model, batch), truth)


@pytest.mark.parametrize("average", AVERAGES)
def test_labels_that_are_ignored_by_another_number(average: str) -> None:
    model, samples = make_model(), make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples, average)
    batch = positions_only(samples)
    batch["labels"][batch["labels"] == IGNORED] = -7
    with patched(model, loss_average=average):
        torch.testing.assert_close(step(model, batch, ignore_index=-7), truth)


@pytest.mark.parametrize("average", AVERAGES)
def test_sequences_without_a_supervised_token_do_not_count(average: str) -> None:
    model, samples = make_model(), make_samples(9, 4, 13, 6, 1)
    samples[1]["labels"] = [IGNORED] * 4
    truth = truth_of(model, samples, average)
    assert count_sequences(positions_only(samples)) == 3
    with patched(model, loss_average=average):
        torch.testing.assert_close(step(model, positions_only(samples)), truth)


@pytest.mark.parametrize("average", AVERAGES)
def test_no_supervised_token_at_all_gives_zero(average: str) -> None:
    model, samples = make_model(), make_samples(9, 4)
    for sample in samples:
        sample["labels"] = [IGNORED] * len(sample["labels"])
    with patched(model, loss_average=average):
        results = step(model, positions_only(samples))
    assert all(value is None or not value.any() for value in results.values())


def test_a_sum_of_sequences_means() -> None:
    model, samples = make_model(), make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples, "sequence")
    assert truth["loss"] is not None
    with patched(model, loss_average="sequence", reduction="sum"):
        loss = step(model, positions_only(samples))["loss"]
    torch.testing.assert_close(loss, truth["loss"] * len(samples))


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.model_type)
@pytest.mark.filterwarnings("ignore:liger_patch computes ordinary logits:UserWarning")
def test_no_model_predicts_across_a_boundary(row: registry.Architecture) -> None:
    """Models that compute their own loss are among them."""
    model, samples = tiny_model(row).eval(), make_samples(9, 4, prompts=False)
    batch = positions_only(samples)
    with patched(model):
        left_in = model(**batch, use_cache=False).loss
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        torch.testing.assert_close(model(**batch, use_cache=False).loss, left_in)


def test_a_loss_function_of_the_users_sees_no_label_of_another_sequence() -> None:
    model, seen = make_model(), []
    batch = positions_only(make_samples(9, 4, prompts=False))

    def loss_function(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
        seen.append(labels)
        return logits.sum() * 0

    model.loss_function = loss_function
    with patched(model), pytest.warns(UserWarning, match="a loss of its own"):
        call(model, batch)
    assert seen[0].eq(IGNORED).nonzero().tolist() == [[0, 0], [0, 9]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
def test_a_compiled_model_packs_too() -> None:
    model, samples = make_model().float(), make_samples(9, 4, 13, 6)
    with patched(model, loss_average="sequence"):
        expected = model(**positions_only(samples)).loss
        compiled: Any = torch.compile(model, backend="eager", dynamic=False)
        loss = compiled(**positions_only(samples)).loss
    torch.testing.assert_close(loss, expected)
    torch.compiler.reset()


# --- over several forward passes ------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("average", AVERAGES)
def test_gradient_accumulation_is_exact(average: str, model_type: str) -> None:
    model, samples = make_model(model_type), make_samples(9, 4, 13, 6, 5)
    truth = truth_of(model, samples, average)
    micro_batches = [flattened(samples[:1]), flattened(samples[1:4]), flattened(samples[4:])]
    items = sum((batch["labels"] != IGNORED).sum() for batch in micro_batches)
    sequences = sum(count_sequences(batch) for batch in micro_batches)
    named = {"num_sequences_in_batch": sequences} if average == "sequence" else {}
    with patched(model, loss_average=average):
        losses = [
            call(model, batch, num_items_in_batch=items, **named).loss for batch in micro_batches
        ]
    loss = torch.stack(losses).sum()
    torch.testing.assert_close({"loss": loss.detach(), **gradients(model, loss)}, truth)


def test_a_number_of_tokens_alone_is_refused() -> None:
    """Divided by it, a sum of sequences' means would be far too small."""
    model = apply_patch(make_model(), loss_average="sequence")
    batch = flattened(make_samples(9, 4))
    with pytest.raises(ValueError, match=r"num_sequences_in_batch .*integrations\.transformers"):
        call(model, batch, num_items_in_batch=11)


@pytest.fixture(scope="module")
def imported_objects_are_not_collected() -> Iterator[None]:
    """Trainer collects garbage in each run: 0.5 s over all that the imports have made."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.parametrize("average", AVERAGES)
def test_accumulated_steps_are_those_of_whole_batches(average: str, tmp_path: Path) -> None:
    results = []
    for per_device, accumulated in [(4, 1), (1, 4), (2, 2)]:
        model = apply_patch(make_model(), loss_average=average)
        results.append(weights_after(model, tmp_path, per_device, accumulated))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.slow
@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.parametrize("average", AVERAGES)
def test_steps_of_two_processes_are_those_of_one(average: str, tmp_path: Path) -> None:
    model = apply_patch(make_model(), loss_average=average)
    expected = weights_after(model, tmp_path, per_device=4, accumulated=1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    paths = {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "distributed_trainer.py"), average, str(tmp_path)],
            env=os.environ | group | paths | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    for rank in range(2):
        weights = torch.load(tmp_path / f"weights{rank}.pt")
        torch.testing.assert_close(weights, expected)


@pytest.mark.usefixtures("imported_objects_are_not_collected")
def test_other_models_train_as_with_transformers_trainer(tmp_path: Path) -> None:
    from transformers import Trainer

    eager = weights_after(make_model(), tmp_path, 2, 2, trainer_class=Trainer)
    torch.testing.assert_close(weights_after(make_model(), tmp_path, 2, 2), eager)
    torch.testing.assert_close(weights_after(apply_patch(make_model()), tmp_path, 2, 2), eager)


class Toy(torch.nn.Module):
    """No model of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> dict[str, Tensor]:
        return {"loss": (self.scale * input_ids - labels.clamp(min=0)).abs().mean()}


@pytest.mark.usefixtures("imported_objects_are_not_collected")
def test_a_model_that_is_not_of_transformers_trains_too(tmp_path: Path) -> None:
    from transformers import Trainer

    toys: list[Any] = [Toy(), Toy()]
    expected = weights_after(toys[0], tmp_path, 2, 2, trainer_class=Trainer)
    assert expected["scale"] != 1
    torch.testing.assert_close(weights_after(toys[1], tmp_path, 2, 2), expected)


@pytest.mark.usefixtures("imported_objects_are_not_collected")
def test_a_loss_outside_the_model_is_refused(tmp_path: Path) -> None:
    model = apply_patch(make_model(), loss_average="sequence")
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1"):
        weights_after(model, tmp_path, 2, 2, label_smoothing_factor=0.1)


@pytest.mark.parametrize("number", ["3", -1, 0, 2.5])
def test_a_number_of_sequences_that_is_none_is_an_error(number: Any) -> None:
    model = apply_patch(make_model(), loss_average="sequence")
    with pytest.raises(ValueError, match=f"num_sequences_in_batch must be .* got {number!r}"):
        call(model, flattened(make_samples(9, 4)), num_sequences_in_batch=number)


def test_a_number_of_sequences_for_means_of_tokens_is_an_error() -> None:
    model = apply_patch(make_model())
    with pytest.raises(ValueError, match="num_sequences_in_batch is for means of sequences"):
        call(model, flattened(make_samples(9, 4)), num_sequences_in_batch=2)


def weights_after(
    model: PreTrainedModel,
    folder: Path,
    per_device: int,
    accumulated: int,
    *,
    trainer_class: Any = None,
    **how: Any,
) -> Step:
    """Of two steps of four sequences, the sequences of each forward pass in one row."""
    from transformers import TrainingArguments

    if trainer_class is None:
        from liger_patch.integrations.transformers import Trainer as trainer_class

    samples: Any = make_samples(9, 4, 13, 6, 5, 7, 3, 11, prompts=False)
    collate: Any = flattened
    trainer: Any = trainer_class(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulated,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=1e9,
            lr_scheduler_type="constant",
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **how,
        ),
        data_collator=collate,
        train_dataset=samples,
        eval_dataset=samples,
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(samples)
    with Float64():
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- what says where sequences begin --------------------------------------------------------------


def starts_of(length: int, **arguments: Any) -> list[int] | None:
    starts = sequence_starts(torch.Size((1, length)), arguments)
    return None if starts is None else starts[0].nonzero()[:, 0].tolist()


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0]])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, None),
        ({"position_ids": torch.arange(6)[None]}, [0]),
        ({"position_ids": POSITIONS}, [0, 3, 5]),
        ({"position_ids": POSITIONS + 2}, [0, 3, 5]),
        ({"position_ids": POSITIONS, "attention_mask": torch.ones(1, 6)}, None),
        ({"position_ids": POSITIONS, "attention_mask": torch.zeros(1, 1, 6, 6)}, [0, 3, 5]),
        ({"position_ids": POSITIONS.expand(3, 1, 6)}, None),
        ({"position_ids": torch.stack([POSITIONS, *[POSITIONS * 0] * 3])}, [0, 3, 5]),
        ({"position_ids": POSITIONS[:, 1:]}, None),
        ({"position_ids": torch.tensor([[0, 2, 4, 100, 101, 102]])}, [0]),
        ({"position_ids": torch.tensor([[7, 8, 9, 3, 4, 0]])}, [0, 3, 5]),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2]])}, [0, 2, 5]),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32)}, [0, 2]),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32)}, [0, 2, 4]),
        ({"cu_seq_lens_q": torch.tensor([2, 9])}, [0, 2]),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 6]), "position_ids": POSITIONS}, [0, 2, 3, 5]),
    ],
)
def test_where_sequences_start(arguments: dict[str, Any], expected: list[int] | None) -> None:
    assert starts_of(6, **arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seq_lens_q": [0, 3, 6]}, "cu_seq_lens_q must be .* got list"),
        (
            {"cu_seq_lens_q": torch.tensor([[0, 3, 6]])},
            r"cu_seq_lens_q .* got torch.int64 \(1, 3\)",
        ),
        ({"cu_seq_lens_q": torch.tensor([0.0, 3.0])}, "cu_seq_lens_q .* got torch.float32"),
        ({"seq_idx": [[0, 0, 1]]}, r"seq_idx must be a tensor \(1, 6\), got list"),
        ({"seq_idx": torch.tensor([0, 0, 1, 1, 1, 1])}, r"seq_idx .* got torch.int64 \(6,\)"),
    ],
)
def test_what_says_nothing_of_the_sequences_is_an_error(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        starts_of(6, **arguments)


def test_rows_start_sequences_of_their_own() -> None:
    shape = torch.Size((2, 3))
    for arguments in (
        {"position_ids": torch.arange(3)[None]},
        {"position_ids": torch.tensor([[0, 1, 2], [3, 4, 5]])},
        {"cu_seq_lens_q": torch.tensor([0, 6])},
    ):
        starts = sequence_starts(shape, arguments)
        assert starts is not None
        assert starts.tolist() == [[True, False, False]] * 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_boundary(side: str) -> None:
    """Positions of padded rows do not go on by one either, and eager's loss is what it was."""
    model = make_model()
    batch = padded(make_samples(9, 4, prompts=False), side)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    eager = step(model, batch)
    with patched(model):
        torch.testing.assert_close(step(model, batch), eager)


def test_an_argument_by_its_place_is_seen() -> None:
    model, samples = make_model(), make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples, "token")
    batch = positions_only(samples)
    with patched(model), Float64():
        loss = model(batch["input_ids"], None, batch["position_ids"], labels=batch["labels"]).loss
    torch.testing.assert_close(loss.detach(), truth["loss"])


@pytest.mark.parametrize("average", ["tokens", None, 1])
def test_an_unknown_average_is_an_error(average: Any) -> None:
    with pytest.raises(ValueError, match=r'loss_average must be "token" or "sequence", got'):
        apply_patch(make_model(), loss_average=average)
