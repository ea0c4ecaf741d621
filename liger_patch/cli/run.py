"""Run a training script with its models patched, as ``python Script`` would run it.

In this process alone, ``transformers.Trainer`` patches its model when it begins to train or to
evaluate: TRL's trainers have added their head by then, and nothing is wrapped yet. Models of a
script without a Trainer are patched as ``from_pretrained`` returns them.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel, Trainer, TrainerCallback

from liger_patch.apply import apply_patch, revert_patch
from liger_patch.cli.compare import NO_MODEL
from liger_patch.estimate.model import described
from liger_patch.kernels.backend import serves_triton_device
from liger_patch.patch.forward import record_of
from liger_patch.patch.settings import LossSettings
from liger_patch.readers.wrapped_model import transformers_model
from liger_patch.status import loss_rows, patch_status

DEFAULTS = loss_rows(LossSettings())  # rows that say nothing of a script
AT_LOAD = "_liger_patch_settings_at_load"  # of what from_pretrained returns, and its deep copies


class _Enough(BaseException):
    """The steps that were asked for have run: end the script."""


class Patcher:
    """Patches the models of a script, and says so once."""

    patches = True

    def __init__(self) -> None:
        # with the settings, which a script replaces where it calls apply_patch itself
        self.patched: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self.notes: list[str] = []
        self.has_trainer = False

    def watch(self) -> None:
        """Patch what trains from now on in this process."""
        _wrap(Trainer, "__init__", self._construct)
        _wrap(Trainer, "train", self._begin)
        _wrap(Trainer, "evaluate", self._begin)
        _wrap(Trainer, "predict", self._begin)
        _wrap(Trainer, "call_model_init", self._model_init)
        _wrap(PreTrainedModel, "from_pretrained", self._load)

    def patch(self, model: nn.Module, how: str, trainer: Any = None) -> None:
        """Patch a model; leave one that cannot be patched as it is, and say why."""
        if not self.patches or model in self.patched:
            return
        name = type(model).__name__
        try:
            target = transformers_model(model)
            record = record_of(target)
            if record is not None and vars(target).get(AT_LOAD) is record.settings:
                revert_patch(target)  # a deep copy, made before there was a Trainer
                record = None
            if record is None:
                _apply(model, target, trainer)
                self.note(f"{name} is patched {how}")
            else:
                self.note(f"the script patches {name} itself: as it is, it is patched too")
        except (RuntimeError, TypeError, ValueError) as error:
            self.note(f"{name} is not patched: {error}")
        else:
            self.patched[model] = _settings(model)

    def note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)
            if self.has_trainer:  # before, one may come and take the note back
                _say(words)

    def _construct(self, construct: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not self.has_trainer:  # a head that TRL adds to a patched model is not fused
            for model, settings in list(self.patched.items()):
                if _settings(model) is settings:
                    revert_patch(model)
            self.patched.clear()
            self.notes.clear()
        self.has_trainer = True
        construct(trainer, *args, **kwargs)

    def _begin(self, begin: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.patches and getattr(trainer.args, "use_liger_kernel", False):
            trainer.args.use_liger_kernel = False
            self.note("use_liger_kernel=True is off where liger_patch patches")
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                self.patch(model, f"in {type(trainer).__name__}", trainer)
        return begin(trainer, *args, **kwargs)

    def _model_init(self, make: Callable, *args: Any, **kwargs: Any) -> Any:
        model = make(*args, **kwargs)
        self.patch(model, "where model_init has made it")
        return model

    def _load(self, load: Callable, *args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with loading_info
        if not self.has_trainer and model.get_output_embeddings() is not None:
            self.patch(model, "at from_pretrained: no Trainer came")
            vars(model)[AT_LOAD] = self.patched.get(model)
        return loaded


class Measurer(Patcher, TrainerCallback):
    """Measures the steps of a script's first training, as it is or patched, and ends the script
    behind the last. Trainer's steps are those of this callback; without a Trainer they are those of
    the first optimizer.
    """

    def __init__(self, steps: int, patches: bool) -> None:
        super().__init__()
        self.steps, self.patches = steps, patches
        self.models: list[nn.Module] = []  # kept until they are asked what ran
        self.trainer: Any = None
        self.optimizer: Any = None
        self.losses: list[list[Any]] = [[]]  # the last: of the step that runs
        self.ends: list[float] = []
        self.error: str | None = None  # that ended the script

    def watch(self) -> None:
        super().watch()
        _wrap(Trainer, "training_step", self._training_step)
        _wrap(torch.Tensor, "backward", self._backward)
        register_optimizer_step_post_hook(self._optimizer_step)

    def patch(self, model: nn.Module, how: str, trainer: Any = None) -> None:
        self.models.append(model)
        super().patch(model, how, trainer)
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def _begin(self, begin: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if begin.__name__ == "train":
            if self.ends:
                self.note("the first training alone is counted: the script begins another")
                raise _Enough
            self.trainer = trainer
            trainer.args.eval_on_start = False
            if self not in trainer.callback_handler.callbacks:
                trainer.add_callback(self)
        result = super()._begin(begin, trainer, *args, **kwargs)
        self._stop_if_enough()
        return result

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_step()
        control.should_training_stop |= len(self.ends) >= self.steps
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_evaluate = False

    def _optimizer_step(self, optimizer: Any, *_: Any) -> None:
        self.optimizer = self.optimizer or optimizer
        if self.trainer is None and optimizer is self.optimizer:
            self._end_step()
            self._stop_if_enough()

    def _end_step(self) -> None:
        if len(self.ends) >= self.steps:  # the script caught _Enough
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.losses.append([])

    def _stop_if_enough(self) -> None:
        if len(self.ends) >= self.steps:
            raise _Enough

    def _training_step(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        self.losses[-1].append(loss.detach().clone())
        return loss

    def _backward(self, backward: Callable, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if self.trainer is None and loss.numel() == 1:
            self.losses[-1].append(loss.detach().clone())
        return backward(loss, *args, **kwargs)

    def report(self) -> dict[str, Any]:
        """Return what was measured, for JSON."""
        losses = self.losses[: len(self.ends)]
        statuses = [patch_status(model) for model in self.models if model in self.patched]
        used = [each for each in statuses if each.fused is not None] or statuses
        rows = used[0].rows if used else ()
        device = next((each.device for model in self.models for each in model.parameters()), None)
        return {
            "trainer": self.trainer and type(self.trainer).__name__,
            "device": str(device),
            "triton": device is not None and serves_triton_device(torch.empty(0, device=device)),
            "milliseconds": [1e3 * (after - before) for before, after in pairwise(self.ends)],
            "peak_bytes": _peak_bytes(),
            "losses": [sum(map(float, each)) if each else None for each in losses],
            "status": [r for r in rows if r not in DEFAULTS and "unset" not in r[1]] or None,
            "fused": used[0].fused if used else None,
            "notes": self.notes,
            "error": self.error,
        }


def run(script: str, arguments: Sequence[str]) -> int:
    """Patch what a script trains, and run it to its end."""
    patcher = Patcher()
    patcher.watch()
    try:
        _run_script(script, arguments)
    finally:  # scripts end with sys.exit() too
        if not patcher.notes or not patcher.has_trainer:
            for words in patcher.notes or [f"nothing was patched: {NO_MODEL}"]:
                _say(words)
    return 0


def measure(file: str, steps: str, way: str, script: str, *arguments: str) -> None:
    """Run a script for some steps, and write what was measured to a file."""
    transformers.set_seed(0)
    measurer = Measurer(int(steps), patches=way == "patched")
    measurer.watch()
    try:
        _run_script(script, arguments)
    except _Enough:
        pass
    except Exception as error:
        measurer.error = described(error)
        raise
    finally:
        Path(file).write_text(json.dumps(measurer.report()), encoding="utf-8")


def _say(words: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"liger_patch: {words}", file=sys.stderr, flush=True)


def _run_script(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # of Python 3.11
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _apply(model: nn.Module, target: PreTrainedModel, trainer: Any) -> None:
    if "trl" in sys.modules and trainer is not None:
        from liger_patch.integrations import trl, trl_head

        if trl_head.trls_head(target) is not None:
            is_sft = any(cls.__name__ == "SFTTrainer" for cls in type(trainer).__mro__)
            same = is_sft and trainer.args.loss_type == "nll"
            trl.apply_trl_patch(model, same_gradient=same)
            return
    apply_patch(model)


def _settings(model: nn.Module) -> Any:
    return getattr(record_of(transformers_model(model)), "settings", None)


def _wrap(cls: Any, name: str, around: Callable) -> None:
    is_of_class = isinstance(vars(cls)[name], classmethod)
    original = getattr(cls, name).__func__ if is_of_class else getattr(cls, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(cls, name, classmethod(wrapped) if is_of_class else wrapped)


def _peak_bytes() -> int | None:
    """Return CUDA's peak; without CUDA that of the process, where the system tells it."""
    if torch.cuda.is_initialized():
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
