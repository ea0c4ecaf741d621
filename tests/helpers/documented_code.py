"""Code blocks of the documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    place: str  # document and heading
    language: str
    code: str


def blocks(language: str | None = None) -> list[Block]:
    """All in this language, or in any, in the order of the documents."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            *_, heading = ["", *re.findall(r"^#+ (.*)$", text[: match.start()], re.M)]
            found.append(Block(f"{document.name}: {heading}", match[1], match[2]))
    return [block for block in found if language in (None, block.language)]


def configuration(key: str) -> dict[str, Any]:
    """What the one block of YAML says that has this key in front."""
    parsed = [yaml.safe_load(block.code) for block in blocks("yaml")]
    (found,) = [each for each in parsed if next(iter(each)) == key]
    return found
