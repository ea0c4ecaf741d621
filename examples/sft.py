"""Fine-tunes a small model with TRL's SFTTrainer, on TRL's loss or on that of liger_patch.

The conversations are questions about Python's standard library and its own docstrings as answers,
so nothing is downloaded; the loss counts the answers alone. Model and tokenizer are made from
scratch. Runs on the CPU in about a minute, or in bf16 on a GPU (CUDA_VISIBLE_DEVICES=0 where there
are several).

    python examples/sft.py                            # TRL's loss
    python examples/sft.py --use_liger_patch true     # that of liger_patch
    python examples/sft.py --use_liger_patch true --packing true --max_steps 50
    python examples/sft.py --config sft.yaml      # use_liger_patch: true, and so on, a line each

Takes the arguments below and all of TRL's SFTConfig; --help lists them. Needs the extra trl, and
peft for --lora true.
"""

import time
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from docstrings import chat_tokenizer, conversations
from peak_memory import PeakMemory
from small_model import small_model
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import TrlParser

from liger_patch import patch_status
from liger_patch.integrations.trl import SFTConfig, SFTTrainer

HELD_OUT_EVERY = 20  # one conversation in 20 is kept for the evaluation
ON_GPU = torch.cuda.is_available()
DEFAULTS = {
    "output_dir": "outputs/sft",
    "max_steps": 60,
    "max_length": 256,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "warmup_steps": 5,
    "logging_steps": 5,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,  # TRL's default: True
    "bf16": ON_GPU,
    "use_cpu": not ON_GPU,
    "dataloader_pin_memory": ON_GPU,
}


@dataclass
class ScriptArguments:
    model_type: str = field(default="qwen3", metadata={"help": "architecture of the model"})
    vocab_size: int = field(default=8192, metadata={"help": "most tokens in the vocabulary"})
    hidden_size: int = field(default=128, metadata={"help": "features; a multiple of 64"})
    layers: int = field(default=4, metadata={"help": "decoder layers"})
    conversations: int = field(default=4000, metadata={"help": "most conversations"})
    lora: bool = field(default=False, metadata={"help": "train adapters on all but the head"})


def main() -> None:
    parser = TrlParser((ScriptArguments, SFTConfig))
    parser.set_defaults(**DEFAULTS)
    script, args = parser.parse_args_and_config()

    data = conversations(script.conversations)
    held_out = data[::HELD_OUT_EVERY]
    del data[::HELD_OUT_EVERY]
    tokenizer = chat_tokenizer(data, script.vocab_size)
    set_seed(args.seed)
    model = small_model(
        script.model_type,
        vocab_size=len(tokenizer),
        hidden_size=script.hidden_size,
        layers=script.layers,
        length=args.max_length or 4096,
        eos_token_id=tokenizer.eos_token_id,
    )
    peft_config = None
    if script.lora:
        from peft import LoraConfig

        peft_config = LoraConfig(target_modules="all-linear")  # PEFT leaves the head out
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(held_out),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    labels = [label for row in trainer.train_dataset["labels"] for label in row]
    trained = sum(label != -100 for label in labels)
    print(
        f"{len(data):,} conversations, {len(held_out):,} held out; {len(labels):,} tokens, "
        f"{trained / len(labels):.0%} of them trained on; vocabulary {len(tokenizer):,}; "
        f"{trainer.model.num_parameters():,} parameters on {args.device}"
    )

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(LossTable())
    memory = PeakMemory("cuda") if args.device.type == "cuda" else None
    start = time.perf_counter()
    trainer.train()
    print(f"\ntrained in {time.perf_counter() - start:.1f} s", end="")
    print(f", peak memory {memory.over_start_mib():,.0f} MiB over the weights" if memory else "")
    trainer.evaluate()
    if args.use_liger_patch:
        print(f"\nWith use_liger_patch:\n{patch_status(trainer.model)}")
    else:
        print("\nTrained with TRL's own loss. For the fused loss of liger_patch, add:")
        print("    --use_liger_patch true")


class LossTable(TrainerCallback):
    """One line for each loss that is logged, with what TRL measures beside it."""

    def on_train_begin(self, args, state, control, **kwargs):
        print(f"\n{'step':>8}{'loss':>12}{'entropy':>12}{'accuracy':>10}")

    def on_log(self, args, state, control, logs, **kwargs):
        for prefix, name in (("", state.global_step), ("eval_", "held out")):
            if f"{prefix}loss" in logs:
                loss, entropy, accuracy = (
                    logs[f"{prefix}{each}"] for each in ("loss", "entropy", "mean_token_accuracy")
                )
                print(f"{name:>8}{loss:12.6f}{entropy:12.6f}{accuracy:10.2%}")


if __name__ == "__main__":
    main()
