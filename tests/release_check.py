"""Check what would be released: `make release-check`. Not a test that pytest collects.

Builds the sdist, and the wheel from it. For the oldest and the newest versions that are promised,
a new environment gets the wheel and nothing else that is not on its list of requirements; there
the quick start of the README runs, in a folder from which the checkout cannot be imported, the
self-test of ``python -m liger_patch doctor``, and a type checker over the public names. Then the
sdist is installed in the wheel's place.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICK_START = "apply_patch.py"
PINS = {"oldest": "constraints-oldest.txt", "newest": "constraints.txt"}


def main() -> None:
    """Run every check; the first that fails ends the program with its reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="+", choices=PINS, default=list(PINS))
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("--output", type=Path, help="a new folder for the sdist and the wheel")
    options = parser.parse_args()
    python = shutil.which(options.python)
    if python is None:
        parser.error(f"argument --python: expected an interpreter, got {options.python!r}")
    with tempfile.TemporaryDirectory(prefix="liger_patch_release_") as folder:
        place = Path(folder)
        sdist, wheel = build(place)
        check_files(sdist, wheel)
        for versions in options.versions:
            check_installed(python, place / versions, versions, sdist, wheel)
        if options.output is not None:
            shutil.copytree(sdist.parent, options.output)
    print("ready for a release")


def build(place: Path) -> tuple[Path, Path]:
    """Build a copy of the checkout: old build folders would leave their files in the wheel."""
    tree, output = place / "tree", place / "dist"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "outputs")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=unwanted)
    run(sys.executable, "-m", "build", "--outdir", str(output), str(tree), cwd=place)
    (sdist,), (wheel,) = output.glob("*.tar.gz"), output.glob("*.whl")
    return sdist, wheel


def check_files(sdist: Path, wheel: Path) -> None:
    """Check version, changelog, license and type information of what was built."""
    text = (ROOT / "liger_patch" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', text, re.M)
    expect(len(version) == 1, f"one __version__ in liger_patch/__init__.py, got {version}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\S+)", changelog, re.M)[:2]
    expect(sections == ["Unreleased", version[0]], f"{version[0]} in CHANGELOG.md, got {sections}")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    expect(f"\nversion: {version[0]}\n" in citation, f"{version[0]} in CITATION.cff")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    expect(fields["Version"] == version[0], f"a wheel of {version[0]}, got {fields['Version']}")
    license = fields["License-Expression"]
    expect(license == "Apache-2.0", f"License-Expression Apache-2.0, got {license}")
    expect(any(name.endswith("/licenses/LICENSE") for name in names), "LICENSE in the wheel")
    expect("liger_patch/py.typed" in names, "liger_patch/py.typed in the wheel")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", *PINS.values()}
    wanted |= {f"examples/{QUICK_START}", "liger_patch/py.typed"}
    expect(wanted <= files, f"{sorted(wanted - files)} in the sdist")


def check_installed(python: str, place: Path, versions: str, sdist: Path, wheel: Path) -> None:
    """Install into a new environment, run the quick start there, and count unknown types."""
    print(f"-- {versions} versions, {python}", flush=True)
    elsewhere = place / "elsewhere"
    elsewhere.mkdir(parents=True)
    run(python, "-m", "venv", str(place / "venv"), cwd=elsewhere)
    own = place / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [str(own), "-m", "pip", "install", "--quiet"]
    pins = ["-c", str(ROOT / PINS[versions])]
    run(*pip, *pins, f"{wheel}[accelerate]", cwd=elsewhere)
    run(str(own), "-m", "pip", "check", cwd=elsewhere)
    shutil.copy(ROOT / "examples" / QUICK_START, elsewhere)
    printed = run(str(own), QUICK_START, cwd=elsewhere)
    fused = re.search(r"last loss +fused", printed)
    expect(fused is not None, f"a fused loss from {QUICK_START}, got\n{printed}")
    run(str(own), "-m", "liger_patch", "doctor", cwd=elsewhere)
    check_types(own, elsewhere)
    run(*pip, "--no-deps", "--force-reinstall", str(sdist), cwd=elsewhere)
    place_of = "import liger_patch; print(liger_patch.__file__)"
    found = Path(run(str(own), "-c", place_of, cwd=elsewhere).strip())
    expect(place in found.parents, f"liger_patch of {place}, got {found}")


def check_types(python: Path, place: Path) -> None:
    """Check that a type checker knows what each public name is, from the installed package."""
    lines = ["import liger_patch", "from liger_patch.integrations import transformers"]
    printed = run(str(python), "-c", "import liger_patch; print(*liger_patch.__all__)", cwd=place)
    names = [f"liger_patch.{name}" for name in printed.split()]
    names.append("transformers.LigerPatchCallback")
    lines += [f"reveal_type({name})" for name in names]
    (place / "types_of.py").write_text("\n".join(lines), encoding="utf-8")
    pyright = sys.executable, "-m", "pyright", "--pythonpath", str(python), "types_of.py"
    printed = run(*pyright, cwd=place)
    found = printed.count('Type of "')
    expect(found == len(names), f"the types of {len(names)} names, got {found}\n{printed}")
    expect("Unknown" not in printed, f"no unknown type in the public interface, got\n{printed}")


def run(*command: str, cwd: Path) -> str:
    """Run a command that cannot import the checkout; return what it printed."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "LIGER_PATCH_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    expect(done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(is_right: bool, what: str) -> None:
    """End the program where something is not as it must be."""
    if not is_right:
        sys.exit(f"release-check: expected {what}")


if __name__ == "__main__":
    main()
