"""Imports run one way, as CONTRIBUTING says."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "liger_patch"
TOP, LEAVES = {"__init__", "__main__"}, {"registry", "subclass"}  # import all; import no other


def arrows() -> set[tuple[str, str]]:
    """Return (a, b) where a may import b, by the paragraph of the folders."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text.split("### Folders")[1].split("Within `kernels`")[0].replace("\n", " ")
    found: set[tuple[str, str]] = set()
    for chain in re.findall(r"`\w+`(?:, `\w+`)*(?: -> `\w+`)+", text):
        groups = [re.findall(r"\w+", group) for group in chain.split(" -> ")]
        for above, below in itertools.pairwise(groups):
            found |= set(itertools.product(above, below))
    while further := {(a, d) for a, b in found for c, d in found if b == c} - found:
        found |= further
    return found


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield the file, its folder or module, and that of each import of this package."""
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("liger_patch."):
                yield path.name, own, (node.module or "").split(".")[1]


def test_no_import_runs_upwards() -> None:
    allowed = arrows()
    assert not any(a == b for a, b in allowed)
    found = {each for each in imports() if each[1] != each[2] and each[1] not in TOP}
    assert len(found) > 100
    upwards = {each for each in found if each[2] not in LEAVES and each[1:] not in allowed}
    assert not upwards
