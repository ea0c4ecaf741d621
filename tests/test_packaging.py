"""What is built, what an import finds, and the versions that are promised."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from slow_cases import slow_but

import liger_patch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "liger_patch"
NAMESPACES = ("kernels", "integrations")
TOP, LEAVES = {"__init__", "__main__"}, {"registry", "subclass"}  # import all; import no other
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The oldest Python that constraints.txt works on.
TESTED_ON = {"python_version": "3.11", "sys_platform": "linux"}


def _python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    finished = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.strip()


def _build_wheel(source: str, directory: Path) -> Path:
    pytest.importorskip("build", reason="the extra `test` brings it")
    tree, output = directory / "tree", directory / "output"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "outputs")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=unwanted)
    if source == "checkout without links":
        for name in NAMESPACES:
            (tree / name).unlink(missing_ok=True)
            (tree / name).write_text(f"liger_patch/{name}")  # git, where it cannot make links
    # `build` without --wheel makes the wheel from the sdist that it has just made.
    kind = [] if source == "sdist" else ["--wheel"]
    _python("-m", "build", "--no-isolation", *kind, "--outdir", str(output), str(tree), cwd=tree)
    (wheel,) = output.glob("*.whl")
    return wheel


@pytest.mark.parametrize(
    "source", slow_but(["checkout"], ["checkout", "checkout without links", "sdist"])
)
def test_wheel_holds_the_package_only(source: str, tmp_path: Path):
    wheel = _build_wheel(source, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")

    names = zipfile.ZipFile(wheel).namelist()
    files = {name for name in names if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert files == sources | {"liger_patch/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.parametrize("name", NAMESPACES)
def test_root_link_never_hides_a_package_of_its_name(name: str, tmp_path: Path):
    """Whoever stands in the checkout must still import Hugging Face's `kernels`."""
    for folder in (PACKAGE, ROOT / "tests"):
        assert not (folder / name / "__init__.py").exists()
    package = tmp_path / name / "__init__.py"
    package.parent.mkdir()
    package.touch()
    found = _python("-c", f"import {name}; print({name}.__file__)", cwd=ROOT, path=tmp_path)
    assert Path(found).resolve() == package.resolve()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.10.1"),
    reason="is_kernels_available() fails on any folder named kernels before Transformers 5.10.1",
)
def test_transformers_finds_the_same_kernels_from_the_root(tmp_path: Path):
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    assert _python("-c", code, cwd=ROOT) == _python("-c", code, cwd=tmp_path)


def _requirements(*extras: str) -> list[Requirement]:
    lines = PROJECT["dependencies"] + [
        line for extra in extras for line in PROJECT["optional-dependencies"][extra]
    ]
    requirements = [Requirement(line) for line in lines]
    return [each for each in requirements if each.name != PROJECT["name"]]


def _pins(file_name: str) -> dict[str, Version]:
    lines = (ROOT / file_name).read_text(encoding="utf-8").splitlines()
    pins = {}
    for requirement in (Requirement(line) for line in lines if line and not line.startswith("#")):
        (pin,) = requirement.specifier
        assert pin.operator == "==", f"{file_name}: {requirement}"
        pins[canonicalize_name(requirement.name)] = Version(pin.version)
    return pins


def test_oldest_pins_are_the_promised_lower_bounds():
    pins = _pins("constraints-oldest.txt")
    for requirement in _requirements("accelerate", "peft", "examples"):
        (lower,) = (each for each in requirement.specifier if each.operator == ">=")
        assert pins[requirement.name] == Version(lower.version), requirement


def test_tested_pins_lie_in_the_promised_ranges():
    pins = _pins("constraints.txt")
    for requirement in _requirements(*PROJECT["optional-dependencies"]):
        if requirement.marker is None or requirement.marker.evaluate(TESTED_ON):
            assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_every_file_is_python_3_10():
    assert PROJECT["requires-python"] == ">=3.10"
    for folder in ("liger_patch", "tests", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            ast.parse(text, filename=str(path), feature_version=(3, 10))


def test_version_of_changelog_and_citation_is_that_of_the_package():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\S+)", changelog, re.M)
    assert sections[:2] == ["Unreleased", liger_patch.__version__]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == liger_patch.__version__
    assert (citation["license"], citation["authors"]) == (PROJECT["license"], PROJECT["authors"])


def test_the_makefile_names_test_files_that_are_there() -> None:
    """pytest runs nothing at all where one of the files that it is given is gone."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Makefile").read_text(encoding="utf-8"))
    lists = re.findall(r"addprefix ([\w/]+),([\w/. ]+)\)", text)
    files = [f"{prefix}{name}" for prefix, names in lists for name in names.split()]
    assert len(files) > 5
    assert not [file for file in files if not (ROOT / file).exists()]


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
