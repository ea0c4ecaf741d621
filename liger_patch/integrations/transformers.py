"""Transformers' Trainer: a callback that patches its model, for scripts that only take callbacks,
and a Trainer for means of sequences over several forward passes.

    Trainer(model=model, callbacks=[LigerPatchCallback()], ...).train()

    from liger_patch.integrations.transformers import Trainer
    apply_patch(model, loss_average="sequence")
    Trainer(model=model, ...).train()

Transformers' own Trainer tells a model how many tokens the forward passes of one optimizer step
have, on all devices. This one also tells it how many sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from liger_patch.apply import apply_patch
from liger_patch.patch.forward import record_of
from liger_patch.patch.packing import (
    NUM_SEQUENCES,
    count_sequences,
    why_sequences_are_split,
)
from liger_patch.readers.wrapped_model import transformers_model
from liger_patch.status import patch_status


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` for means of sequences.

    Under gradient accumulation and on several devices, it is exact for
    ``apply_patch(model, loss_average="sequence")``. With any other model it behaves as
    Transformers' Trainer.

    Raises:
        ValueError: means of sequences, with a loss that is computed outside the model
            (``label_smoothing_factor``, ``compute_loss_func``), with several GPUs in one process
            (``torch.nn.DataParallel``), or with parallelism that splits sequences.
    """

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Return whether the model divides its loss by what is counted in the whole step. With
        means of sequences it does, also where its class says that it takes no number of tokens.
        """
        return self._accepts_loss_kwargs or self._averages_sequences()

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, accepts: bool) -> None:
        self._accepts_loss_kwargs = accepts

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Any]:
        """Return the batches of a step, each with the number of sequences in all of them."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if num_items is not None and batches and self._averages_sequences():
            count = torch.stack([count_sequences(batch).to(device) for batch in batches]).sum()
            if self.args.average_tokens_across_devices and self.args.world_size > 1:
                # as num_items_in_batch: devices that share a batch count it once
                gathered: Any = self.accelerator.gather(count)
                # a whole number: mixed precision casts arguments that are floating point
                count = gathered.sum() // self.get_tp_size()
            for batch in batches:
                batch[NUM_SEQUENCES] = count
        return batches, num_items

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute Transformers' loss; in an evaluation, the mean over one batch's sequences."""
        if NUM_SEQUENCES not in inputs and self._averages_sequences():
            num_items_in_batch = None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _averages_sequences(self) -> bool:
        model: Any = self.model
        try:
            model = self.accelerator.unwrap_model(model, keep_torch_compile=False)
            record = record_of(transformers_model(model))
        except TypeError:  # no model of Transformers
            return False
        if record is None or record.settings.loss_average != "sequence":
            return False
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError(
                'loss_average="sequence" is for the model\'s own loss, got label_smoothing_factor='
                f"{self.args.label_smoothing_factor} and compute_loss_func={self.compute_loss_func}"
                ": use apply_patch(label_smoothing=...) or leave loss_average out"
            )
        if self.args.n_gpu > 1:
            raise ValueError(
                'loss_average="sequence" needs one process for each GPU (torchrun or accelerate '
                f"launch), got one for {self.args.n_gpu}"
            )
        split = why_sequences_are_split()
        if split is not None:
            raise ValueError(f'loss_average="sequence" needs whole sequences, got {split}')
        return True


class LigerPatchCallback(transformers.TrainerCallback):
    """Calls ``apply_patch(model, **options)`` when the Trainer is built, before the model is
    wrapped for training.

    Args:
        options: of ``apply_patch``.

    Raises:
        ValueError, TypeError: as ``apply_patch`` does.
        ValueError: beside ``use_liger_patch=True`` of TRL's trainers, which patches the model too.
        RuntimeError: at the beginning of training, if the model is not patched: the callback came
            too late (``trainer.add_callback``), or ``model_init`` has made another model since.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "use_liger_patch", False):
            raise ValueError(
                "LigerPatchCallback and use_liger_patch=True both patch the model: leave the "
                "callback out"
            )
        apply_patch(kwargs["model"], **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not patch_status(_unwrapped(kwargs["model"])).patched:
            raise RuntimeError(
                "LigerPatchCallback found a model that is not patched, too late to patch it, as "
                "it may be wrapped. Give the callback to the Trainer as callbacks=[...]; if "
                "model_init makes the model, call apply_patch within model_init"
            )


def _unwrapped(model: Any) -> Any:
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model)
