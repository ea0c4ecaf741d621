"""The operators on a head whose vocabulary is distributed over ranks, in groups of processes. The
checks are in ``sharded_head``.
"""

import pytest
from gloo_group import run
from kernel_forms import FORMS, INTERPRETED

KERNELS = "losses", "shapes", "log_probs_of_labels", "ties"  # what differs between the forms
OTHERS = "reductions", "no_label", "backward_twice", "errors", "collectives"


SLOW_INTERPRETER = pytest.param(
    "cpu", id="interpreter", marks=(pytest.mark.interpreter, pytest.mark.slow)
)


@pytest.mark.parametrize("device", [FORMS[0], SLOW_INTERPRETER, FORMS[2]])
def test_two_ranks(device, tmp_path):
    others = () if INTERPRETED else OTHERS
    run("sharded_head.py", str(tmp_path / "group"), device, *KERNELS, *others)
