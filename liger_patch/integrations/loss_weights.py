"""The column ``loss_weights`` of a data set: a weight for the loss of each token, in Trainers.

A weight must stay with its label while other code, which does not know the column, cuts, packs,
pads and batches the rows. So both are kept in one whole number of the column ``labels``:

    bits 0 to 30: the label; bit 31: 1; bits 32 to 62: the weight, a float32 that is not negative

After the collator has run, they are separated again. Ignored labels stay -100, and weigh nothing.
The model is given the bits of the weights as int32: mixed precision would round floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from liger_patch.apply import transformers_model
from liger_patch.patch.forward import record_of
from liger_patch.patch.packing import IGNORE_INDEX, next_labels, why_sequences_are_split
from liger_patch.patch.token_weights import LOSS_WEIGHTS, WEIGHT_BITS, sum_of_weights

if TYPE_CHECKING:
    from transformers import Trainer as TransformersTrainer
else:
    TransformersTrainer = object

IS_JOINED = 1 << 31
LABEL_MASK = IS_JOINED - 1


class WeightedTokens(TransformersTrainer):
    """What a Trainer needs for data sets with a column ``loss_weights``. For other data sets it
    changes nothing.

    The mean of a step is divided by the sum of the weights of its supervised tokens. If the model's
    class takes no ``num_items_in_batch``, the step is the mean of its forward passes' means.
    """

    @property
    def takes_loss_weights(self) -> bool:
        """Return whether this Trainer reads the column."""
        return True

    def get_train_dataloader(self) -> Any:
        """Return Transformers' loader, whose batches have the weights."""
        return self._with_weights(super().get_train_dataloader)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return Transformers' loader, whose batches have the weights."""
        return self._with_weights(super().get_eval_dataloader, *args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return Transformers' loader, whose batches have the weights."""
        return self._with_weights(super().get_test_dataloader, *args, **kwargs)

    def _with_weights(self, get_loader: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        collator: Any = self.data_collator
        if self.takes_loss_weights:
            self.data_collator = WeightedCollator(collator)
        try:
            return get_loader(*args, **kwargs)
        finally:
            self.data_collator = collator

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns
        if columns is not None and self.takes_loss_weights and LOSS_WEIGHTS not in columns:
            self._signature_columns = [*columns, LOSS_WEIGHTS]

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Any]:
        """Return the batches of a step, and the sum of their weights as the number of items."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        weighted = [WEIGHT_BITS in batch for batch in batches]
        if any(weighted) and not all(weighted):
            raise ValueError(
                f"{sum(weighted)} of {len(weighted)} batches of a step have the column "
                f"{LOSS_WEIGHTS!r}: give it to all samples"
            )
        if num_items is not None and any(weighted):
            total = torch.stack([sum_of_weights(batch).to(device) for batch in batches]).sum()
            if self.args.average_tokens_across_devices and self.args.world_size > 1:
                # as num_items_in_batch: devices that share a batch count it once
                gathered: Any = self.accelerator.gather(total)
                total = gathered.sum() / self.get_tp_size()
            num_items = total.item()  # no tensor: mixed precision would round it
        return batches, num_items

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss; in an evaluation, the weighted mean over one batch."""
        if WEIGHT_BITS in inputs:
            self._check_weights_reach_the_loss()
            # only ``get_batch_samples`` gives a float; in an evaluation it is a number of tokens
            if not isinstance(num_items_in_batch, float):
                num_items_in_batch = None
        trainers: Any = super()
        return trainers.compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _check_weights_reach_the_loss(self) -> None:
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if record_of(transformers_model(model)) is None:
            reason = "the model is not patched: call apply_patch(model)"
        elif self.label_smoother is not None or self.compute_loss_func is not None:
            reason = (
                f"label_smoothing_factor={self.args.label_smoothing_factor} and compute_loss_func="
                f"{self.compute_loss_func} compute the loss outside the model"
            )
        elif self.args.n_gpu > 1:
            reason = "one process drives several GPUs: use torchrun or accelerate launch"
        else:
            split = why_sequences_are_split()
            if split is None:
                return
            reason = f"{split} splits sequences"
        raise ValueError(f"a data set has the column {LOSS_WEIGHTS!r}, but {reason}")


@dataclass
class WeightedCollator:
    """A collator around another one. Its batches have the weights of their labels, if the samples
    have weights.
    """

    collator: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Any:
        weighted = [isinstance(sample, Mapping) and LOSS_WEIGHTS in sample for sample in samples]
        if not any(weighted):
            return self.collator(samples)
        if not all(weighted):
            raise ValueError(
                f"a batch has the column {LOSS_WEIGHTS!r} in {sum(weighted)} of {len(samples)} "
                "samples: give it to all of them, 1.0 where a token weighs as any other"
            )
        batch = self.collator([joined(sample) for sample in samples])
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or bool(((labels >= 0) & (labels < IS_JOINED)).any()):
            raise ValueError(
                f"a data set has the column {LOSS_WEIGHTS!r}, but its collator, of type "
                f"{type(self.collator).__name__}, does not keep the column 'labels'. Use one that "
                "does, as DataCollatorForSeq2Seq or DataCollatorWithFlattening"
            )
        batch["labels"] = torch.where(labels < 0, labels, labels & LABEL_MASK)
        batch[WEIGHT_BITS] = (labels.clamp(min=0) >> 32).to(torch.int32)
        return batch


def joined(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample whose labels carry their weights.

    Raises:
        ValueError: no labels, or not one weight >= 0 for each.
    """
    if "labels" not in sample:
        raise ValueError(f"the column {LOSS_WEIGHTS!r} needs a column 'labels' beside it, got none")
    labels = np.asarray(sample["labels"])
    if labels.size and (labels.dtype.kind not in "iu" or labels.max() > LABEL_MASK):
        raise ValueError(
            f"labels must be whole numbers below 2^31 beside {LOSS_WEIGHTS!r}, got "
            f"{labels.dtype} {labels.max()}"
        )
    labels = labels.astype(np.int64)
    if sample[LOSS_WEIGHTS] is None:
        raise ValueError(f"{LOSS_WEIGHTS} must be given to all samples, got None in one")
    given = np.asarray(sample[LOSS_WEIGHTS])
    if given.shape != labels.shape or given.dtype.kind not in "fiub":
        raise ValueError(
            f"{LOSS_WEIGHTS} must be numbers in the shape of the labels {labels.shape}, got "
            f"{given.dtype} {given.shape}"
        )
    with np.errstate(over="ignore"):
        weights = given.astype(np.float32)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"{LOSS_WEIGHTS} must be finite and >= 0 in float32, got {given.flat[first]} for token "
            f"{first}"
        )
    bits = (weights + np.float32(0.0)).view(np.int32).astype(np.int64)  # + 0.0: -0.0 has a sign
    codes = np.where(labels == IGNORE_INDEX, labels, labels | IS_JOINED | bits << 32)
    others = {name: value for name, value in sample.items() if name != LOSS_WEIGHTS}
    return {**others, "labels": codes.tolist()}


def with_normalized_weights(inputs: Mapping[str, Any], total: float | None) -> dict[str, Any]:
    """Return the inputs of a call with weights that already contain the division by their sum.

    TRL's trainer divides the loss itself: by ``num_items_in_batch``, which is then 1, or by the
    number of this call's supervised tokens.

    Args:
        total: the sum of the weights of the whole step: the new weights are divided by it. None:
            the new weights have a mean of 1 over this call's supervised tokens.
    """
    if total is None:
        count = (next_labels(inputs["labels"], IGNORE_INDEX) != IGNORE_INDEX).sum()
        own_total = sum_of_weights(inputs)
        factor = count / own_total.masked_fill(own_total == 0, 1.0)
    else:
        factor = 1 / (total or 1.0)
    bits = inputs[WEIGHT_BITS].clone()
    bits.view(torch.float32).mul_(factor)
    return {**inputs, WEIGHT_BITS: bits}


def separated(sample: Mapping[str, Any]) -> dict[str, list]:
    """Return labels and weights of a sample that ``joined`` has made."""
    codes = np.asarray(sample["labels"], dtype=np.int64)
    weights = (np.maximum(codes, 0) >> 32).astype(np.int32).view(np.float32)
    labels = np.where(codes < 0, codes, codes & LABEL_MASK)
    return {"labels": labels.tolist(), LOSS_WEIGHTS: weights.tolist()}
