"""Code and configurations in the documents: they parse, and what they name is there.

The first block of Python of each page runs, on a tiny model.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from documents import DOCUMENTS, ROOT, Block, blocks
from tiny_models import tiny_batch, tiny_model
from tiny_text import prompts_and_completions, tiny_tokenizer
from trainers import QUIET, samples_of

import liger_patch
from liger_patch.__main__ import _parser
from liger_patch.patch import flags

EXAMPLES = ROOT / "examples"
OMITTED = re.compile(r",\s*\.\.\.\s*(?=\))")  # "f(a=1, ...)", which is no Python


def wrong_names(code: str, place: str, names: dict[str, Any]) -> list[str]:
    """Imports from liger_patch that fail, and arguments that its functions and classes do not take.

    Args:
        names: what the blocks in front of this one import; those of this one are added.
    """
    tree, wrong = ast.parse(code, place), []
    if "liger_patch.integrations.trl" in code and not find_spec("trl"):
        return []
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
            assert wrong_names(OMITTED.sub("", block.code), block.place, names) == [], block.place


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_python_in_a_notebook_is_right(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    names = {name: getattr(liger_patch, name) for name in liger_patch.__all__}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        lines = [line for line in cell["source"] if not line.startswith(("%", "!"))]
        compile("".join(lines), cell["id"], "exec")
        assert wrong_names("".join(lines), cell["id"], names) == [], cell["id"]


FIRST = {block.place.partition(":")[0]: block for block in reversed(blocks("python"))}


@pytest.mark.parametrize("page", sorted(FIRST))
@pytest.mark.filterwarnings("ignore")  # of the libraries in these blocks
def test_the_first_block_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: Any) -> None:
    """With the names that it does not define: a model, a batch, data and what trains."""
    code = FIRST[page].code
    for part, library in {"trl": "trl", "peft": "peft", "BitsAndBytes": "bitsandbytes"}.items():
        if part in code:
            pytest.importorskip(library)
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained("model").train()
    data = samples_of(tiny_batch(model, batch=4))
    if "SFTTrainer" in code:
        datasets = pytest.importorskip("datasets")
        data = prompts_and_completions(8)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    names: dict[str, Any] = {
        "model": model,
        "batch": tiny_batch(model),
        "dataset": data,
        "args": transformers.TrainingArguments("outputs", max_steps=1, **QUIET),
        "Trainer": transformers.Trainer,
    }
    on_a_cpu = "use_liger_patch=True, use_cpu=True, bf16=False, max_steps=1"
    code = re.sub(r"Qwen/Qwen3-[\d.]+B", "model", code.replace("use_liger_patch=True", on_a_cpu))
    exec(compile(code, page, "exec"), names)
    trained = names["trainer"].model if "trainer" in names else names["model"]
    if "revert_patch(model)" not in code:
        assert liger_patch.patch_status(trained).reason is None


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_a_page_says_when_to_use_it_and_what_does_not_work(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.match(r"# .+\n\nUse this when ", text)
    assert re.findall(r"^## (.+)$", text, re.M)[-1] == "What does not work"
    assert any(block.place.startswith(f"{page.name}:") for block in blocks())


def test_every_configuration_is_given_to_what_reads_it() -> None:
    """By tests of test_other_trainers and trl/test_patching, which find it by its first key."""
    first = [next(iter(yaml.safe_load(block.code))) for block in blocks("yaml")]
    assert sorted(first) == ["plugins", "use_liger_patch"]
    assert {block.language for block in blocks()} == {"bash", "python", "yaml"}


def test_variables_in_the_documents_are_those_that_are_read() -> None:
    documents = [each for each in DOCUMENTS if each.name != "CHANGELOG.md"]  # of those removed too
    texts = [document.read_text(encoding="utf-8") for document in documents]
    named = {name for text in texts for name in re.findall(r"\bLIGER_PATCH_[A-Z_]+\b", text)}
    assert named == set(flags.NAMES)


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
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `.*?examples/(\w+\.(?:py|ipynb))\b.*?` \|", text, re.M))
    assert named == own
