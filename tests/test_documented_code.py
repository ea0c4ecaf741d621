"""Code and configurations in the documents: they parse, and what they name is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import DOCUMENTS, ROOT, Block, blocks

import liger_patch
from liger_patch.__main__ import _parser
from liger_patch.patch import flags

EXAMPLES = ROOT / "examples"
OMITTED = re.compile(r",\s*\.\.\.\s*(?=\))")  # "f(a=1, ...)", which is no Python


def wrong_names(tree: ast.AST, names: dict[str, Any]) -> list[str]:
    """Imports from liger_patch that fail, and arguments that its functions and classes do not take.

    Args:
        names: what the blocks in front of this one import; those of this one are added.
    """
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("liger_patch"):
            module = importlib.import_module(str(node.module))
            wrong += [each.name for each in node.names if not hasattr(module, each.name)]
            names |= {each.name: getattr(module, each.name, None) for each in node.names}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in calls:
        if isinstance(call.func, ast.Name) and (function := names.get(call.func.id)):
            given = dict.fromkeys(each.arg for each in call.keywords if each.arg)
            try:
                inspect.signature(function).bind_partial(**given)
            except TypeError as error:
                wrong.append(f"{call.func.id}: {error}")
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_the_documents_is_right(document: Path) -> None:
    names = {name: getattr(liger_patch, name) for name in liger_patch.__all__}
    for block in blocks("python"):
        if block.place.startswith(f"{document.name}:"):
            tree = ast.parse(OMITTED.sub("", block.code), block.place)
            if "liger_patch.integrations.trl" not in block.code or find_spec("trl"):
                assert wrong_names(tree, names) == [], block.place


def test_wrong_names_are_found() -> None:
    code = "from liger_patch import apply_patch, nothing\napply_patch(model, chunk=1, layers=False)"
    names: dict[str, Any] = {}
    missing, argument = wrong_names(ast.parse(code), names)
    assert missing == "nothing"
    assert argument.startswith("apply_patch: ")
    assert "'chunk'" in argument


def test_every_configuration_is_given_to_what_reads_it() -> None:
    """By tests of test_other_trainers and trl/test_patching, which find it by its first key."""
    first = [next(iter(yaml.safe_load(block.code))) for block in blocks("yaml")]
    assert sorted(first) == ["kernel_config", "plugins", "use_liger_patch"]
    assert {block.language for block in blocks()} == {"bash", "python", "yaml"}


def test_variables_in_the_documents_are_those_that_are_read() -> None:
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    named = {name for text in texts for name in re.findall(r"\bLIGER_PATCH_[A-Z_]+\b", text)}
    assert named == set(flags._KEYS)


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.place)
def test_commands_in_the_documents_start_what_is_there(block: Block) -> None:
    for line in block.code.splitlines():
        words = shlex.split(line, comments=True)
        for first, second in pairwise(words):
            if first == "-m" and second.split(".")[0] in ("liger_patch", "benchmarks"):
                assert find_spec(second) is not None, line
            if first == "python" and second.startswith("examples/"):
                assert (ROOT / second).exists(), line
        if words[1:3] == ["-m", "liger_patch"]:
            _parser().parse_args(words[3:])  # exits where one is unknown


def test_every_example_has_a_line() -> None:
    """But of the modules that others import."""
    scripts = {path.stem: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    imported = {
        name for code in scripts.values() for name in re.findall(r"^from (\w+)", code, re.M)
    }
    own = {f"{name}.py" for name in scripts.keys() - imported}
    own |= {path.name for path in EXAMPLES.glob("*.ipynb")}
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `.*?examples/(\w+\.(?:py|ipynb))\b.*?` \|", text, re.M))
    assert named == own
