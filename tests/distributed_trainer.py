"""One of several processes that train a patched model together, for test_sequence_averages.

Leaves its weights in the folder, under its rank.
"""

import os
import sys
from pathlib import Path

import torch
from packed_samples import make_model
from test_sequence_averages import weights_after

from liger_patch import apply_patch


def main(average: str, folder: str) -> None:
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = apply_patch(make_model(), loss_average=average)
    weights = weights_after(model, Path(folder), per_device=4 // processes, accumulated=1)
    torch.save(weights, Path(folder) / f"weights{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
