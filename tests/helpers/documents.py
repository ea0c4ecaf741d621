"""Documents: their blocks of code, and their generated parts. UPDATE_README=1 writes these."""

from __future__ import annotations

import os
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


def table_of(lines: list[list[str]]) -> str:
    """A table in Markdown, the first line its heading. What follows one another and differs in
    its first cell alone is one line.
    """
    grouped: list[list[str]] = []
    for line in lines:
        if grouped and grouped[-1][1:] == line[1:]:
            grouped[-1][0] += f"<br>{line[0]}"
        else:
            grouped.append(list(line))
    heading, *rest = grouped
    return "\n".join(f"| {' | '.join(x)} |" for x in [heading, ["---"] * len(heading), *rest])


def check_section(document: Path, name: str, expected: str) -> None:
    """Between its two comments, the document has what is expected there."""
    text = document.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    assert start in text, f"{document.name} has no line {start}"
    assert end in text, f"{document.name} has no line {end}"
    before, rest = text.split(start, 1)
    updated = f"{before}{start}\n{expected}\n{end}{rest.split(end, 1)[1]}"
    if os.environ.get("UPDATE_README") == "1":
        document.write_text(updated, encoding="utf-8")
        return
    assert text == updated, (
        f"{document.name}, section {name}, must be (UPDATE_README=1 writes it):\n\n{expected}"
    )
