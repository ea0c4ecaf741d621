"""One rank of two runs out of memory, and the other waits for it: for test_distributed_step."""

import torch
from torch import distributed


def run_out_of_memory(rank: int, _: object, ranks: int, folder: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks
    )
    if rank == 1:
        raise torch.OutOfMemoryError("made up")
    distributed.barrier()
