"""The blocks of code of a Markdown page, by the number of their section: what a reader of the page would run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]


class Block(NamedTuple):
    section: str
    """The heading above, `2. Generate`."""
    language: str
    code: str


def blocks(page: str) -> list[Block]:
    """Those of a page of the repository, `docs/tutorial.md`."""
    found, section = [], ""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for heading, language, code in re.findall(r"^## ([^\n]*)$|^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if heading:
            section = heading
        else:
            found.append(Block(section, language, code))
    return found
