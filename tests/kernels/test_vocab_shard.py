"""The operators on a head whose vocabulary is distributed over ranks, in groups of processes. The
checks are in ``sharded_head`` and, of the form on Hopper, in ``sharded_odds``.
"""

from pathlib import Path

import pytest
import torch
from gloo_group import run
from kernel_forms import FORMS, INTERPRETED
from slow_cases import slow_but

KERNELS = "losses", "shapes", "log_probs_of_labels", "ties"  # what differs between the forms
OTHERS = "reductions", "double", "no_label", "backward_twice", "errors", "collectives"


SLOW_INTERPRETER = pytest.param(
    "cpu", id="interpreter", marks=(pytest.mark.interpreter, pytest.mark.slow)
)


@pytest.mark.parametrize("device", [FORMS[0], SLOW_INTERPRETER, FORMS[2]])
def test_two_ranks(device: str, tmp_path: Path) -> None:
    others = () if INTERPRETED else OTHERS
    run("sharded_head.py", str(tmp_path / "group"), device, *KERNELS, *others)


ODDS = {
    "gradients": ("options", "adapters", "reductions", "shapes"),
    "numbers": ("beyond_60_nats", "nan_and_inf", "statistics", "ties"),
    "calls": (
        *("no_label", "backward_twice", "errors", "collectives"),
        "memory_that_fits_no_descriptor",
    ),
}


@pytest.fixture
def odds_device(request: pytest.FixtureRequest) -> str:
    """Where odds are computed: Triton's interpreter or a Hopper GPU."""
    from liger_patch.kernels.descriptors import TensorDescriptor, is_hopper

    if TensorDescriptor is None:
        pytest.skip("Triton < 3.4")
    if request.param == "cuda" and not is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    return request.param


@pytest.mark.parametrize("odds_device", FORMS[1:], indirect=True)
@pytest.mark.parametrize("processes", slow_but([2], [1, 2, 3]))
@pytest.mark.parametrize("checks", slow_but(["gradients", "calls"], list(ODDS)))
def test_odds(checks: str, processes: int, odds_device: str, tmp_path: Path) -> None:
    """On a GPU, one for all ranks."""
    group = str(tmp_path / "group")
    run("sharded_odds.py", group, odds_device, "gloo", *ODDS[checks], processes=processes)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("odds_device", ["cuda"], indirect=True)
def test_odds_on_two_gpus(odds_device: str, tmp_path: Path) -> None:
    checks = [name for names in ODDS.values() for name in names]
    run("sharded_odds.py", str(tmp_path / "group"), odds_device, "nccl", *checks)
