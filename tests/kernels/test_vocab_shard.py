"""The operators on a head whose vocabulary is distributed over ranks, in groups of processes. The
checks are in ``sharded_head``.
"""

from pathlib import Path

from gloo_group import run


def test_two_ranks(tmp_path: Path) -> None:
    checks = "losses double reductions shapes no_label log_probs_of_labels ties"
    others = "backward_twice errors collectives"
    run("sharded_head.py", str(tmp_path / "group"), *checks.split(), *others.split())
