"""One of several processes that train a patched model together, for test_sequence_averages.

Leaves its weights in the folder, under its rank.
"""

from pathlib import Path

import torch
from gloo_group import each_case
from packed_samples import make_model
from packed_trainer import weights_after
from torch import distributed as dist

from liger_patch import apply_patch


def check(average: str, folder: Path, _: str) -> None:
    rank, processes = dist.get_rank(), dist.get_world_size()
    model = apply_patch(make_model(), loss_average=average)
    weights = weights_after(model, folder, per_device=4 // processes, accumulated=1)
    torch.save(weights, folder / f"weights{rank}.pt")


if __name__ == "__main__":
    each_case(check)
