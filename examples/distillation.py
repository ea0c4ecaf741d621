"""Distils a small model from a larger one in Trainer, without the logits of either.

Offline, on random models, in less than a minute: a teacher learns sequences in which each token
follows from the one before with a probability, then a student learns from the teacher.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from liger_patch import apply_patch, deferred_logits, distillation_loss, patch_status

VOCAB_SIZE, LENGTH = 256, 32


def model_of(hidden_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return apply_patch(LlamaForCausalLM(config))


def sequences(rows: int) -> list[dict[str, torch.Tensor]]:
    steps = torch.randint(1, 4, (rows, LENGTH)).cumsum(1)  # the next token is one of three
    ids = (torch.randint(VOCAB_SIZE, (rows, 1)) + steps) % VOCAB_SIZE
    return [{"input_ids": row, "labels": row} for row in ids]


class DistillationTrainer(Trainer):
    """Trainer of a student; ``teacher``: of the same tokenizer, on the same device."""

    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        with deferred_logits():
            outputs = model(**inputs)
            with torch.no_grad():
                teacher_outputs = self.teacher(**inputs)
        loss = distillation_loss(
            outputs,
            teacher_outputs,
            labels,
            divergence="jsd",
            ce_weight=0.1,
            num_items_in_batch=num_items_in_batch,
        )
        return (loss, outputs) if return_outputs else loss


def arguments(steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir="outputs/distillation",
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
    )


@torch.no_grad()
def divergence(student: LlamaForCausalLM, teacher: LlamaForCausalLM, rows: list) -> float:
    ids = torch.stack([row["input_ids"] for row in rows]).to(student.device)
    with deferred_logits():
        outputs, teacher_outputs = student.eval()(ids), teacher(ids)
    student.train()
    return distillation_loss(outputs, teacher_outputs, ids).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    data, held_out = sequences(2000), sequences(50)
    teacher, student = model_of(128), model_of(32)
    Trainer(teacher, arguments(200), train_dataset=data).train()
    trainer = DistillationTrainer(student, arguments(200), train_dataset=data, teacher=teacher)
    before = divergence(student, teacher, held_out)
    trainer.train()
    after = divergence(student, teacher, held_out)
    print(f"held out KL {before:.3f} -> {after:.3f} nats per token")
    print(patch_status(student))
