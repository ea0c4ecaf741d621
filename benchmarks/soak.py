"""Train small models for thousands of steps with and without the patch: does memory stay flat, and
do the losses stay together?

    python -m benchmarks soak
    python -m benchmarks soak --run DPO --contender liger_patch

Trainer: 10,000 steps with two batches each, two adapters in turns, evaluation with metrics, and
checkpoints; a new model and Trainer resume from the one in the middle. DPO, and a mixture with
adapters on its experts: 1,000 steps each. Contenders are eager, eager from weights moved
within rounding, and liger_patch. Memory is what is allocated behind a step, every 100 steps.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from examples.corpus import Corpus, build_corpus
from examples.small_model import move_within_rounding, small_model
from liger_patch import apply_patch, patch_status

from .benchmark import Benchmark, Cases
from .names import EAGER, OURS

ROUNDED = f"{EAGER}, rounded"
CONTENDERS = EAGER, ROUNDED, OURS
STEPS = {"Trainer": 10_000, "mixture": 1_000, "DPO": 1_000}
MODEL_TYPES = {"Trainer": "qwen3", "mixture": "qwen3_moe", "DPO": "llama"}
SECOND = "second"  # adapter
LENGTH, VOCABULARY = 128, 8192  # tokens
EVERY = 100  # steps between two readings of memory


class Watch(TrainerCallback):
    """Reads memory, switches adapters, and stops in the middle."""

    def __init__(self, model: Any, steps: int, stop: int | None) -> None:
        self.model, self.switch_every, self.stop = model, steps // 20, stop
        self.mib: list[float] = []

    def on_step_end(self, args, state, control, **_: Any) -> None:
        if state.global_step % EVERY == 0 and torch.cuda.is_available():
            self.mib.append(round(torch.cuda.memory_allocated() / 2**20, 2))
        if SECOND in self.model.peft_config and state.global_step % self.switch_every == 0:
            is_second = self.model.active_adapter == SECOND
            self.model.set_adapter("default" if is_second else SECOND)
        control.should_training_stop |= state.global_step == self.stop


def soak(run: str, contender: str, steps: int, device: str) -> dict:
    """Train one contender; return losses, memory, and whether its last loss was fused."""
    corpus = _corpus()
    found: dict[str, Any] = {"model": run, "contender": contender, "steps": steps}
    history: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        train = _dpo if run == "DPO" else _train
        stops = [steps // 2, None] if run == "Trainer" else [None]
        for stop in stops:
            model = _model(run, contender, corpus).to(device)
            watch = Watch(model, steps, stop)
            trainer = train(model, contender, corpus, folder, steps, watch)
            trainer.train(resume_from_checkpoint=None if stop == stops[0] else True)
            growth = max(watch.mib) - watch.mib[0] if watch.mib else 0.0
            found["growth_mib"] = max(growth, found.get("growth_mib", 0.0))
            history = trainer.state.log_history
            status = patch_status(model)
            found["fused"] = status.fused if status.patched else None
            if contender == OURS and not status.fused:
                raise RuntimeError(f"{run} was not fused: {status.reason}")
            del model, trainer, watch
            gc.collect()
    losses = [entry["loss"] for entry in history if "loss" in entry]
    held_out = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    return found | {"training": losses, "held_out": held_out}


def _model(run: str, contender: str, corpus: Corpus) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "layers": 2, "length": LENGTH}
    base = small_model(MODEL_TYPES[run], **sizes, eos_token_id=corpus.end_of_file_id)
    if contender == ROUNDED:
        move_within_rounding(base, torch.bfloat16)
    experts = ["experts.gate_up_proj", "experts.down_proj"] if run == "mixture" else None
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    names += [] if experts else ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=names, target_parameters=experts)
    model: Any = get_peft_model(base, config)
    if run == "Trainer":
        model.add_adapter(SECOND, config)
    return model


def _arguments(folder: str, steps: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "logging_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": steps // 4,
        "save_strategy": "steps",
        "save_steps": steps // 4,
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,  # TRL's default: True
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def _train(
    model: Any, contender: str, corpus: Corpus, folder: str, steps: int, watch: Watch
) -> Trainer:
    if contender == OURS:
        apply_patch(model)
    both = [weight for name, weight in model.named_parameters() if "lora_" in name]
    return Trainer(
        model,
        TrainingArguments(**_arguments(folder, steps), gradient_accumulation_steps=2),
        train_dataset=_rows(corpus.train),
        eval_dataset=_rows(corpus.evaluation[:32]),
        compute_metrics=_accuracy,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
        optimizers=(torch.optim.AdamW(both, 1e-3), None),
        callbacks=[watch],
    )


def _dpo(
    model: Any, contender: str, corpus: Corpus, folder: str, steps: int, watch: Watch
) -> Trainer:
    from liger_patch.integrations.trl_trainers import DPOConfig, DPOTrainer

    data = _pairs(corpus.train), _pairs(corpus.evaluation[:32])
    tokenizer = _tokenizer()
    return DPOTrainer(
        model,
        args=DPOConfig(**_arguments(folder, steps), use_liger_patch=contender == OURS),
        train_dataset=data[0],
        eval_dataset=data[1],
        processing_class=tokenizer,
        callbacks=[watch],
    )


def _pairs(blocks: Tensor) -> Any:
    """Return prompts of text, each with its continuation and the same backwards."""
    from datasets import Dataset

    def words(tokens: Tensor) -> str:
        return " ".join(map(str, tokens.tolist()))

    lengths = torch.randint(8, LENGTH // 2, (len(blocks), 2), generator=torch.Generator())
    rows = []
    for block, (prompt, answer) in zip(blocks[:4096], lengths.tolist(), strict=False):
        found = block[prompt : prompt + answer]
        texts = block[:prompt], found, found.flip(0)
        rows.append(dict(zip(("prompt", "chosen", "rejected"), map(words, texts), strict=True)))
    return Dataset.from_list(rows)


def _tokenizer() -> Any:
    """Return a tokenizer whose words are numbers of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1")


def _rows(blocks: Tensor) -> Any:
    return [{"input_ids": block, "labels": block} for block in blocks]


def _accuracy(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels).mean())}


@cache
def _corpus() -> Corpus:
    return build_corpus(VOCABULARY, LENGTH)


def cases(options: argparse.Namespace) -> Cases:
    """Return the runs, each with its contenders; eager is always one."""
    device = options.device or "cuda"

    def run(name: str) -> Iterator[dict]:
        for contender in CONTENDERS:
            if contender == EAGER or contender in (options.contender or CONTENDERS):
                yield soak(name, contender, options.steps or STEPS[name], device)

    return {"soaks": [partial(run, name) for name in options.run or STEPS]}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", action="append", choices=STEPS, help="only this one, or another")
    parser.add_argument(
        "--contender", action="append", choices=CONTENDERS, help="only eager and this one"
    )
    parser.add_argument("--steps", type=int, help="of each run (default 10,000 and 1,000)")
    parser.add_argument("--device", choices=("cpu",), help="to try it without a GPU")


BENCHMARK = Benchmark(
    packages=("transformers", "peft", "trl"),
    cases=cases,
    add_options=_add_options,
)
