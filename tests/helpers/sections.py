"""Parts of documents that are generated. UPDATE_README=1 writes them."""

from __future__ import annotations

import os
from pathlib import Path


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
