"""Lay out the operators as a kernel of Hugging Face's ``kernels``: `make hub-kernel`. Not a test.

The package is ``build/torch-universal/liger_patch``: the modules of ``liger_patch/kernels`` that
the operators need, with relative imports. Its operators of ``torch.library`` have a namespace of
their own, so that one process may load it beside ``liger_patch``, and two versions of it.

Layout: that of kernels 0.17.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "liger_patch" / "kernels"
OPERATORS = (
    "linear_cross_entropy",
    "linear_log_probs",
    "cross_entropy",
    "rms_norm",
    "rotary",
    "gated",
)
VERSION = 1  # the Hub's: raised where callers of the one before would break
LICENSE = "Apache-2.0"
BUILD = f"""\
[general]
name = "liger-patch"
version = {VERSION}
edition = 5
license = "{LICENSE}"
backends = ["cuda", "rocm", "xpu", "cpu"]

[torch-noarch]
"""
CARD = f"""\
---
library_name: kernels
license: {LICENSE.lower()}
---

# liger-patch

Fused operators for training, in Triton; on a CPU, in PyTorch operations:
{", ".join(f"`{name}`" for name in OPERATORS)}. The losses hold no logits.
"""
IMPORT = re.compile(r"^( *)from liger_patch\.kernels((?:\.\w+)*) import ", re.M)


def main() -> None:
    """Write the folder that is uploaded, in place of the one before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "hub-kernel")
    print(lay_out(parser.parse_args().output))


def lay_out(output: Path) -> Path:
    """Write the repository of the kernel into a folder, and return its variant's folder."""
    sources = {path: path.read_text(encoding="utf-8") for path in modules()}
    digest = hashlib.sha256("".join(sources.values()).encode()).hexdigest()[:12]
    name = f"_liger_patch_{digest}"  # of the loaded module, and of the namespace
    shutil.rmtree(output, ignore_errors=True)
    variant = output / "build" / "torch-universal"
    for path, text in sources.items():
        target = variant / "liger_patch" / path.relative_to(SOURCES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(relative(text, path, name), encoding="utf-8")
    lines = ['"""Fused operators for training, of the package liger-patch."""', ""]
    lines += [f"from .{each} import {each}" for each in OPERATORS]
    lines += ["", f"__all__ = {sorted(OPERATORS)}", ""]
    (variant / "liger_patch" / "__init__.py").write_text("\n".join(lines), encoding="utf-8")
    metadata = {
        "id": name,
        "name": "liger-patch",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],  # triton comes with torch
        "backend": {"type": "cuda"},  # one must be named; a universal variant is loaded on any
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    (output / "build.toml").write_text(BUILD, encoding="utf-8")
    (output / "README.md").write_text(CARD, encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", output)
    return variant


def modules() -> list[Path]:
    """Return the modules that the operators import, directly or not, also within functions."""
    found: set[Path] = set()
    waiting = [SOURCES / f"{name}.py" for name in OPERATORS]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("liger_patch.kernels"):
                place = SOURCES.joinpath(*module.split(".")[2:])
                names = [place.with_suffix(".py"), *(place / f"{e.name}.py" for e in node.names)]
                waiting += [each for each in names if each.is_file()]
    return sorted(found)


def relative(text: str, path: Path, namespace: str) -> str:
    """Return a module's text as that of the kernel's package."""
    dots = "." * len(path.relative_to(SOURCES).parts)
    text = IMPORT.sub(lambda found: f"{found[1]}from {dots}{found[2][1:]} import ", text)
    text = text.replace("liger_patch::", f"{namespace}::")
    return text.replace("torch.ops.liger_patch", f"torch.ops.{namespace}")


if __name__ == "__main__":
    main()
