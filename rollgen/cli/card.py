"""The dataset card, written at the start of a run and refreshed at its end."""

from __future__ import annotations

import os
from pathlib import Path

from rollgen.directory import CARD_FILE
from rollgen.inspect.card import dataset_card
from rollgen.inspect.stats import dataset_stats


def write_card(directory: Path) -> None:
    """Atomically write `directory/README.md` from what the dataset holds now."""
    temporary = directory / f".tmp-{CARD_FILE}-{os.getpid()}"
    temporary.write_text(dataset_card(dataset_stats(directory)), encoding="utf-8")
    os.replace(temporary, directory / CARD_FILE)
