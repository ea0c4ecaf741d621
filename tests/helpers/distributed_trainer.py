"""One of several processes that train a patched model together, for test_sequence_averages.

Leaves its weights in the folder, under its rank.
"""

import os
import sys
from pathlib import Path

import torch
from gloo_group import join, leave
from packed_samples import make_model
from packed_trainer import weights_after

from liger_patch import apply_patch


def main(average: str, folder: Path) -> None:
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(f"{folder}/group", rank, processes)
    model = apply_patch(make_model(), loss_average=average)
    weights = weights_after(model, folder, per_device=4 // processes, accumulated=1)
    torch.save(weights, folder / f"weights{rank}.pt")
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
