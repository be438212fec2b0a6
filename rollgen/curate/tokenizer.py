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
from typing import TYPE_CHECKING, Final

from rollgen.errors import Unreadable
from rollgen.format.files import read_regular, write_durably
from rollgen.format.layout import TOKENIZER_CONFIG, TOKENIZER_FILE, TOKENIZER_FILES
from rollgen.format.schema import TOKENIZER_DIR
from rollgen.prompts.fingerprint import saved_tokenizer_sha256

if TYPE_CHECKING:
    from rollgen.curate.sources import Source

_MAX_BYTES: Final = 64 << 20
"""Of a file: what can be decoded with (`inspect/decoding.py`)."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A tokenizer."""

    place: Path | None
    """Where its files are; None for no tokenizer."""
    note: str | None = None
    """What is worth knowing of it."""


def choose_tokenizer(sources: Sequence[Source]) -> Chosen:
    """That of the first of them that has the one which its manifest says. Raises DatasetError for an unlikely file."""
    found = {source: _content(source.place / TOKENIZER_DIR, TOKENIZER_FILE) for source in sources}
    hashes = {source: _sha256(source.place / TOKENIZER_DIR, content) for source, content in found.items()}
    loaded = [source for source in sources if hashes[source] is not None]
    if not loaded:
        there = any(os.path.lexists(source.place / TOKENIZER_DIR / TOKENIZER_FILE) for source in sources)
        note = "no tokenizer was copied: what there is of one is damaged or behind links"
        return Chosen(None, note if there else None)
    shown = next((source for source in loaded if hashes[source] == source.manifest.tokenizer_sha256), None)
    if shown is None and len({found[source] for source in loaded}) > 1:
        return Chosen(None, "no tokenizer was copied: the datasets have different ones, and which is right is open")
    chosen = shown or loaded[0]
    says = "as its manifest says" if shown else "which cannot be shown to be the one of its manifest"
    others = [str(source.place) for source in sources if found[source] not in (None, found[chosen])]
    note = f"the tokenizer is that of {chosen.place}, {says}"
    note += f"; others have: {', '.join(others)}" if others else ""
    return Chosen(chosen.place / TOKENIZER_DIR, note if others or not shown else None)


def copy_tokenizer(chosen: Chosen, target: Path) -> None:
    """Its files, into this directory. Raises OSError, and DatasetError as `choose_tokenizer` does."""
    if chosen.place is None:
        return
    target.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        content = _content(chosen.place, name)
        if content is not None:
            write_durably(target / name, content)


def _sha256(directory: Path, tokenizer: bytes | None) -> str | None:
    """As the manifest has it; None for no tokenizer, and for what is none."""
    settings = _content(directory, TOKENIZER_CONFIG)
    return None if tokenizer is None else saved_tokenizer_sha256(tokenizer, settings or b"{}")


def _content(directory: Path, name: str) -> bytes | None:
    """Of a file; None where it is not there, or not a file of the dataset that a tokenizer's could be."""
    path = directory / name
    if directory.is_symlink() or path.is_symlink() or not path.is_file():
        return None
    try:
        return read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise Unreadable(f"{path}: this machine could not read it: {error}; mend that, and try again") from None
