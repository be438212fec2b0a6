"""The dataset card, written at the start of a run and refreshed at its end, unless someone has edited it since."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rollgen.directory import CARD_FILE
from rollgen.inspect.card import dataset_card
from rollgen.inspect.stats import dataset_stats

_MARK = "\n<!-- Written by rollgen, which replaces this card as long as nobody edits it. {} -->\n"


def write_card(directory: Path) -> None:
    """Atomically write `directory/README.md` from what the dataset holds now; an edited one is left alone."""
    card = directory / CARD_FILE
    if card.exists() and not _is_ours(card.read_text(encoding="utf-8", errors="replace")):
        return
    text = dataset_card(dataset_stats(directory))
    temporary = directory / f".tmp-{CARD_FILE}-{os.getpid()}"
    temporary.write_text(text + _mark(text), encoding="utf-8")
    os.replace(temporary, card)


def _mark(text: str) -> str:
    return _MARK.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def _is_ours(content: str) -> bool:
    text = content[: -len(_mark(""))]
    return content == text + _mark(text)
