"""QLoRA with Transformers' Trainer, and an evaluation with metrics that needs no logits.

Without arguments: a small random model, on questions about Python's standard library and its
docstrings as answers, on the CPU in less than a minute, without a network. With a model's name, on
a GPU: the same on that model.

    python examples/qlora.py
    python examples/qlora.py --model meta-llama/Llama-3.2-1B --length 2048 --steps 500

Needs the extras accelerate, peft and bitsandbytes.
"""

import argparse
from pathlib import Path

import torch
from docstrings import Conversation, chat_tokenizer, conversations
from peft import LoraConfig, get_peft_model
from small_model import small_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

from liger_patch import apply_patch, patch_status
from liger_patch.integrations.metrics import compute_metrics, preprocess_logits_for_metrics

HELD_OUT = 64  # conversations that are kept for the evaluation
ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def main() -> None:
    options = parse_arguments()
    set_seed(0)
    data = conversations(options.conversations)
    folder = options.model or make_small_model(data, options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=DTYPE,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=DTYPE,
        ),
    )
    lora = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = apply_patch(get_peft_model(model, lora))

    rows = [tokenized(each, tokenizer, options.length) for each in data]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            gradient_checkpointing=ON_GPU,
            bf16=ON_GPU,
            use_cpu=not ON_GPU,
            dataloader_pin_memory=ON_GPU,
            logging_steps=max(1, options.steps // 10),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows[HELD_OUT:],
        eval_dataset=rows[:HELD_OUT],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    # on a CPU, bitsandbytes packs the base in an evaluation, and then gives wrong gradients
    before = trainer.evaluate() if ON_GPU else {}
    trainer.train()
    status = patch_status(model)
    after = trainer.evaluate()
    for name in ("loss", "perplexity", "accuracy", "entropy"):
        was = f"{before[f'eval_{name}']:>12.4f} ->" if before else ""
        print(f"held out {name:<12}{was}{after[f'eval_{name}']:>12.4f}")
    print(status)


def tokenized(conversation: Conversation, tokenizer, length: int) -> dict[str, list[int]]:
    """Question and answer; the loss is that of the answer."""
    (question,), (answer,) = conversation["prompt"], conversation["completion"]
    prompt = tokenizer(f"{question['content']}\n").input_ids
    ids = prompt + tokenizer(answer["content"], add_special_tokens=False).input_ids
    ids = [*ids, tokenizer.eos_token_id][:length]
    return {"input_ids": ids, "labels": [-100] * len(prompt[:length]) + ids[len(prompt) :]}


def make_small_model(data: list[Conversation], options: argparse.Namespace) -> str:
    """Write a random model and its tokenizer, as from_pretrained reads them."""
    tokenizer = chat_tokenizer(data, vocab_size=4096)
    model = small_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        layers=4,
        length=options.length,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = options.output / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="a name or a folder (default: a small random Llama)")
    add("--hidden-size", type=int, default=128, help="of the random model; a multiple of 64")
    add("--conversations", type=int, default=1000)
    add("--length", type=int, default=128, help="tokens of the longest row")
    add("--batch-size", type=int, default=8)
    add("--steps", type=int, default=40)
    add("--rank", type=int, default=16)
    add("--learning-rate", type=float, default=5e-3 if not ON_GPU else 2e-4)
    add("--output", type=Path, default=Path("outputs/qlora"))
    options = parser.parse_args()
    if options.length < 2:
        parser.error(f"--length must be 2 or more, got {options.length}")
    return options


if __name__ == "__main__":
    main()
