"""Which of the datasets that are merged gives the merged one its tokenizer, and what of it is taken.

All have the same `tokenizer_sha256`, so all files should do the same; but that is what the manifests say, and the files
are only there to decode. Taken are those that can be shown to be the manifest's. Where none can, because another
library saved them or they were edited, they are taken if all agree, byte by byte, and told. Names are those that a
tokenizer is saved under, of files in the dataset itself: what is behind a link is not of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollgen.format.files import write_durably
from rollgen.format.layout import TOKENIZER_CONFIG, TOKENIZER_FILE, TOKENIZER_FILES
from rollgen.format.schema import TOKENIZER_DIR
from rollgen.prompts.fingerprint import StoredTokenizer, read_tokenizer_file, stored_tokenizer

if TYPE_CHECKING:
    from rollgen.curate.sources import Source


@dataclass(frozen=True, slots=True)
class Chosen:
    """A tokenizer."""

    place: Path | None
    """The dataset that it is of; None for no tokenizer."""
    note: str | None = None
    """What is worth knowing of it."""


def choose_tokenizer(sources: Sequence[Source]) -> Chosen:
    """That of the first of them that has the one which its manifest says. Raises DatasetError for an unlikely file."""
    found = {source: stored for source in sources if (stored := _stored(source.place)) is not None}
    loaded = [source for source, stored in found.items() if stored.sha256 is not None]
    if not loaded:
        there = any(os.path.lexists(source.place / TOKENIZER_DIR / TOKENIZER_FILE) for source in sources)
        note = "no tokenizer was copied: what there is of one is damaged or behind links"
        return Chosen(None, note if there else None)
    shown = next((source for source in loaded if found[source].sha256 == source.manifest.tokenizer_sha256), None)
    if shown is None and len({found[source].content for source in loaded}) > 1:
        return Chosen(None, "no tokenizer was copied: the datasets have different ones, and which is right is open")
    chosen = shown or loaded[0]
    says = "as its manifest says" if shown else "which cannot be shown to be the one of its manifest"
    others = [str(source.place) for source, stored in found.items() if stored.content != found[chosen].content]
    note = f"the tokenizer is that of {chosen.place}, {says}"
    note += f"; others have: {', '.join(others)}" if others else ""
    return Chosen(chosen.place, note if others or not shown else None)


def copy_tokenizer(chosen: Chosen, target: Path) -> None:
    """Its files, into this directory. Raises OSError, and DatasetError as `choose_tokenizer` does."""
    if chosen.place is None:
        return
    target.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        content = read_tokenizer_file(chosen.place, name) if _is_own(chosen.place, name) else None
        if content is not None:
            write_durably(target / name, content)


def _stored(dataset: Path) -> StoredTokenizer | None:
    """That of a dataset, if both of its files are the dataset's own."""
    if not all(_is_own(dataset, name) for name in (TOKENIZER_FILE, TOKENIZER_CONFIG)):
        return None
    return stored_tokenizer(dataset)


def _is_own(dataset: Path, name: str) -> bool:
    """Whether a file of the tokenizer is not there, or is a file in the dataset itself."""
    directory = dataset / TOKENIZER_DIR
    path = directory / name
    return not directory.is_symlink() and not path.is_symlink() and (path.is_file() or not path.exists())
