"""Trains a small model whose layers and head are split over the processes (tensor parallelism),
unpatched and patched, and prints both losses.

Transformers' own plan says which process gets which rows of each weight. The head's logits are
neither held nor gathered once the model is patched.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import argparse
import os
import sys
import tempfile

import torch
from corpus import build_corpus
from small_model import small_model
from torch import distributed
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from liger_patch import apply_patch, patch_status

LENGTH, BATCH_SIZE = 256, 8  # tokens of a sequence; sequences of a step, the same on every process
PRINTED = 5  # lines of losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n    torchrun")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")

    corpus = build_corpus(options.vocab_size, LENGTH)
    config = DistributedConfig(tp_size=distributed.get_world_size())
    losses = {}
    with tempfile.TemporaryDirectory() as own_folder:
        folder = save_model(own_folder, options.vocab_size, corpus.end_of_file_id)
        for name in ("unpatched", "patched"):
            model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
            if name == "patched":
                apply_patch(model)
            losses[name] = train(model, corpus.train, options.steps)
        distributed.barrier()  # the folder is the first process's
    status = patch_status(model)
    if distributed.get_rank() == 0:
        print(f"{'step':>6s}{'unpatched':>12s}{'patched':>12s}")
        for step in range(0, options.steps, -(-options.steps // PRINTED)):
            print(f"{step + 1:6d}" + "".join(f"{each[step]:12.6f}" for each in losses.values()))
        print(status)
    distributed.destroy_process_group()
    return 0 if status.fused else 1


def save_model(folder: str, vocab_size: int, end_of_file_id: int) -> str:
    """Saves a model with random weights in the first process's folder, and returns its path."""
    if distributed.get_rank() == 0:
        torch.manual_seed(0)
        model = small_model(
            "llama",
            vocab_size=vocab_size,
            hidden_size=128,
            layers=4,
            length=LENGTH,
            eos_token_id=end_of_file_id,
        )
        model.save_pretrained(folder)
    folders = [folder]
    distributed.broadcast_object_list(folders)  # which waits until it is saved
    return folders[0]


def train(model: LlamaForCausalLM, blocks: torch.Tensor, steps: int) -> list[float]:
    """The loss of each step; every process gets the same batches."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    model.train()
    losses = []
    for step in range(steps):
        first = step * BATCH_SIZE % (len(blocks) - BATCH_SIZE)
        batch = blocks[first : first + BATCH_SIZE].to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(main())
