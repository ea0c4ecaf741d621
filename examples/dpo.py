"""DPO on the kernels of liger_patch: the model shall prefer docstrings to the same in capitals.

Model and tokenizer are made from scratch and nothing is downloaded; runs on the CPU in less than a
minute, or in bf16 on a GPU.

    python examples/dpo.py
    python examples/dpo.py --hidden_size 512 --max_steps 200 --per_device_train_batch_size 16

Takes the arguments below and all of TRL's DPOConfig; --use_liger_patch false trains on TRL's own
loss. Needs the extra trl.
"""

import copy
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from docstrings import Conversation, chat_tokenizer, conversations
from small_model import small_model
from transformers import set_seed
from trl import TrlParser

from liger_patch import patch_status
from liger_patch.integrations.trl_trainers import DPOConfig, DPOTrainer

ON_GPU = torch.cuda.is_available()
DEFAULTS = {
    "output_dir": "outputs/dpo",
    "use_liger_patch": True,
    "max_steps": 30,
    "max_length": 128,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-4,
    "logging_steps": 5,
    "save_strategy": "no",
    "report_to": "none",
    "gradient_checkpointing": False,  # TRL's default: True
    "bf16": ON_GPU,
    "use_cpu": not ON_GPU,
    "dataloader_pin_memory": ON_GPU,
}


@dataclass
class ScriptArguments:
    model_type: str = field(default="qwen3", metadata={"help": "architecture of the model"})
    vocab_size: int = field(default=4096, metadata={"help": "most tokens in the vocabulary"})
    hidden_size: int = field(default=128, metadata={"help": "features; a multiple of 64"})
    layers: int = field(default=4, metadata={"help": "decoder layers"})
    conversations: int = field(default=1000, metadata={"help": "most pairs"})


def main() -> None:
    parser = TrlParser((ScriptArguments, DPOConfig))
    parser.set_defaults(**DEFAULTS)
    script, args = parser.parse_args_and_config()

    data = conversations(script.conversations)
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
    pairs = [
        {"prompt": each["prompt"], "chosen": each["completion"], "rejected": in_capitals(each)}
        for each in data
    ]
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),  # TRL would load it by the model's name
        args=args,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    trainer.train()
    print(patch_status(trainer.model))


def in_capitals(conversation: Conversation) -> list[dict[str, str]]:
    return [each | {"content": each["content"].upper()} for each in conversation["completion"]]


if __name__ == "__main__":
    main()
