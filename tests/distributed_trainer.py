"""One of several processes that train a patched model together, for test_sequence_averages.

Leaves its weights in the folder, under its rank.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from packed_samples import make_model
from test_sequence_averages import weights_after
from torch import distributed as dist

from liger_patch import apply_patch


def main(average: str, folder: Path) -> None:
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # a peer that failed is not waited for until gloo's own half hour is over
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=processes,
        timeout=timedelta(minutes=2),
    )
    model = apply_patch(make_model(), loss_average=average)
    weights = weights_after(model, folder, per_device=4 // processes, accumulated=1)
    torch.save(weights, folder / f"weights{rank}.pt")
    # Trainer leaves the group's threads running: one of them may abort the interpreter's exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
