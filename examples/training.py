"""One training run: a small model from scratch through `transformers.Trainer`, and its figures."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Semaphore

import torch
from corpus import Corpus
from peak_memory import PeakMemory
from small_model import move_within_rounding, small_model
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ProgressCallback

from liger_patch import apply_patch, patch_status

UNTIMED_STEPS = 2  # the first steps also allocate memory and compile kernels
turns: list[Semaphore] = []  # this process's own, and that of the process whose turn is next


@dataclass(frozen=True)
class Settings:
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    length: int
    batch_size: int
    gradient_accumulation_steps: int
    steps: int
    learning_rate: float
    chunk_mib: float
    device: str  # "cpu" or "cuda"
    dtype: str  # "float32" or "bfloat16"
    seed: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.length * self.gradient_accumulation_steps


@dataclass(frozen=True)
class Run:
    parameters: int
    loss: list[float]  # of each step
    grad_norm: list[float]  # of each step, before clipping
    evaluation_loss: float
    tokens_per_second: float  # of the median step
    step_seconds: list[float]  # of all steps but the first
    peak_memory_mib: float  # over the weights: gradients, optimizer, activations, logits
    ordinary_because: str | None  # why the last loss was not fused; None where it was


def take_turns(own: Semaphore, following: Semaphore) -> None:
    """Lets processes train one step each in turn: what slows the machine then slows all alike."""
    turns[:] = own, following


def train(settings: Settings, corpus: Corpus, variant: str) -> Run:
    """Trains one model, after `take_turns`. `variant` is

    - "unpatched": Transformers as it is;
    - "patched": the same weights and the same batches, after apply_patch;
    - "control": unpatched, each initial weight moved by at most half an eps of the training dtype:
      a difference that this precision cannot tell from none.
    """
    set_seed(settings.seed)
    model = small_model(
        settings.model_type,
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        length=settings.length,
        eos_token_id=corpus.end_of_file_id,
    )
    if variant == "patched":
        apply_patch(model, chunk_mib=settings.chunk_mib)
    if variant == "control":
        move_within_rounding(model, getattr(torch, settings.dtype))

    clock = StepClock()
    bar = LossBar(variant)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=settings.steps,
                per_device_train_batch_size=settings.batch_size,
                per_device_eval_batch_size=settings.batch_size,
                gradient_accumulation_steps=settings.gradient_accumulation_steps,
                learning_rate=settings.learning_rate,
                warmup_steps=settings.steps // 10,
                bf16=settings.dtype == "bfloat16",
                use_cpu=settings.device == "cpu",
                dataloader_pin_memory=settings.device == "cuda",
                seed=settings.seed,
                logging_steps=1,
                logging_nan_inf_filter=False,
                prediction_loss_only=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=False,
            ),
            train_dataset=[{"input_ids": block, "labels": block} for block in corpus.train],
            eval_dataset=[{"input_ids": block, "labels": block} for block in corpus.evaluation],
            callbacks=[clock],
        )
        trainer.remove_callback(ProgressCallback)
        if variant != "unpatched":  # whose steps are those of the bar of "patched"
            trainer.add_callback(bar)
        memory = PeakMemory(settings.device)
        trainer.train()
        peak_memory_mib = memory.over_start_mib()
        trainer.remove_callback(LossBar)
        evaluation_loss = trainer.evaluate()["eval_loss"]

    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(
        parameters=model.num_parameters(),
        loss=[entry["loss"] for entry in logged],
        grad_norm=[entry["grad_norm"] for entry in logged],
        evaluation_loss=evaluation_loss,
        tokens_per_second=settings.tokens_per_step / statistics.median(clock.seconds),
        step_seconds=clock.seconds,
        peak_memory_mib=peak_memory_mib,
        ordinary_because=patch_status(model).reason if variant == "patched" else "not patched",
    )


class StepClock(TrainerCallback):
    """The seconds of each step, from its turn to its logged loss, which waits for the device."""

    def __init__(self):
        self.start = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        turns[0].acquire()
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            if state.global_step > UNTIMED_STEPS:
                self.seconds.append(time.perf_counter() - self.start)
            turns[1].release()


class LossBar(ProgressCallback):
    """Trainer's progress bar with the run's name and loss, instead of a printed line per step."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:  # the first process has one
            self.training_bar.set_description(f"{self.name:>9}")

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs and self.training_bar is not None:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}")
