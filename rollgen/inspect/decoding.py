"""Token ids as text, a cell at a time, with the dataset's own tokenizer: offline, and never with code from elsewhere.

Of a tokenizer only what decodes is taken: the vocabulary, the added tokens and the decoder of its `tokenizer.json`. No
other file is looked at, because transformers builds whatever class `tokenizer_config.json` names, models included; and
normalizers, which end in a panic when they are hostile, are for encoding.

A token is not always text: a byte-level vocabulary splits one character over several tokens, and a SentencePiece one
falls back to bytes. Such neighbours become one `Cell`, the shortest run that decodes. Cells are decoded behind the cell
before them, as a streaming detokenizer does, because some decoders drop the space in front of a first word. What never
becomes text (broken bytes) is shown as its bytes, like `\\xec\\x95`; an id that the tokenizer lacks as `<49160>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollgen.errors import DatasetError
from rollgen.format.layout import TOKENIZER_FILE
from rollgen.format.schema import TOKENIZER_DIR
from rollgen.prompts.fingerprint import read_tokenizer_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"
"""What decoders put where bytes are not (yet) UTF-8."""
_MAX_ID: Final = (1 << 32) - 1
"""The largest id that a tokenizer can have."""
_LONGEST_CELL: Final = 12
"""Tokens. A character has at most 4 bytes, but a token may end one and begin the next."""
_WORD_START: Final = "\u2581"
"""SentencePiece's mark of a space."""
_FALLBACK_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Cell:
    """Neighbouring tokens `start` to `stop - 1` and their text: the fewest that decode."""

    text: str
    start: int
    stop: int


class Decoder:
    """Decodes with a tokenizer; without one, every id is shown as its number."""

    def __init__(self, tokenizer: Tokenizer | None, source: Path = Path(TOKENIZER_FILE)) -> None:
        """`source` is the file that errors name."""
        self._tokenizer = tokenizer
        self._source = source
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts are texts, and not numbers."""
        return self._tokenizer is not None

    def text(self, token_ids: Sequence[int]) -> str:
        """All ids decoded together, special tokens as themselves."""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids))
        if all(self._piece(token_id) is not None for token_id in token_ids):
            return self._decode(list(token_ids))
        return "".join(cell.text for cell in self.cells(token_ids))

    def name(self, token_id: int) -> str:
        """One id by itself."""
        if self._tokenizer is None:
            return str(token_id)
        piece = self._piece(token_id)
        if piece is None:
            return f"<{token_id}>"
        if (text := self._text(token_id, piece)) is not None:
            return text
        return piece if token_id in self._special else _bytes_of(piece)

    def is_text(self, token_id: int) -> bool:
        """Whether `name` is text that was generated, and does not stand for what is none: a special token, broken
        bytes, an id that the tokenizer lacks."""
        piece = self._piece(token_id)
        return piece is not None and self._text(token_id, piece) is not None

    def _text(self, token_id: int, piece: str) -> str | None:
        """Of one id by itself; None where it has none."""
        if token_id in self._special:
            return None
        text = self._decode([token_id])
        if piece.startswith(_WORD_START) and not text.startswith(" "):
            text = f" {text}"
        return None if not text or REPLACEMENT in text else text

    def cells(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[Cell]:
        """Cut `token_ids` into cells that cover them; `before` are the tokens in front of them."""
        cells: list[Cell] = []
        context = [token_id for token_id in before[-1:] if self._piece(token_id) is not None]
        start = 0
        while start < len(token_ids):
            cell = self._next_cell(token_ids, start, context)
            cells.append(cell)
            start = cell.stop
            context = [token_id for token_id in token_ids[cell.start : cell.stop] if self._piece(token_id) is not None]
        return cells

    def _next_cell(self, token_ids: Sequence[int], start: int, context: list[int]) -> Cell:
        alone = Cell(self.name(token_ids[start]), start, start + 1)
        shown = self._decode(context) if context else ""
        if REPLACEMENT in shown:  # broken bytes, which these tokens must not seem to complete
            context, shown = [], ""
        for stop in range(start + 1, min(start + _LONGEST_CELL, len(token_ids)) + 1):
            if not self._is_part(token_ids[stop - 1]):
                break
            text = self._decode([*context, *token_ids[start:stop]])
            added = text[len(shown) :]
            if added and text.startswith(shown) and REPLACEMENT not in added:
                return Cell(added, start, stop)
        return alone

    def _is_part(self, token_id: int) -> bool:
        """Whether the token may be text or a part of some: special tokens and unknown ids stand for themselves."""
        return token_id not in self._special and self._piece(token_id) is not None

    def _piece(self, token_id: int) -> str | None:
        """The vocabulary's entry; None for an id that only the model has, or that nothing has."""
        if self._tokenizer is None or not 0 <= token_id <= _MAX_ID:
            return None
        piece: str | None = self._tokenizer.id_to_token(token_id)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        with _tokenizer_errors(self._source):
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def load_decoder(directory: Path) -> Decoder:
    """The decoder of the dataset in `directory`; one that shows ids when it has no `tokenizer/tokenizer.json`.

    Raises DatasetError for one that cannot be read or decoded with.
    """
    path = directory / TOKENIZER_DIR / TOKENIZER_FILE
    content = read_tokenizer_file(directory, TOKENIZER_FILE)
    if content is None:
        return Decoder(None)
    with _tokenizer_errors(path):
        return Decoder(_load(json.loads(content)), path)


def _load(settings: dict[str, Any]) -> Tokenizer:
    """What decodes of a `tokenizer.json`: ids and their pieces, and the steps that make text of these.

    Raises all sorts of errors for anything else.
    """
    from tokenizers import Tokenizer

    vocab = settings["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: piece and score, by id
        vocab = {piece: token_id for token_id, (piece, _) in enumerate(vocab)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": ""}
    kept = {"version": "1.0", "added_tokens": settings["added_tokens"], "decoder": settings["decoder"], "model": model}
    return Tokenizer.from_str(json.dumps(kept))


@contextmanager
def _tokenizer_errors(path: Path) -> Iterator[None]:
    """Turn what reading or using a tokenizer raises into one line. Raises DatasetError."""
    try:
        yield
    except DatasetError:
        raise
    except BaseException as error:  # tokenizers raises a bare Exception, and for a panic of its Rust less than that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:240]
        raise DatasetError(
            f"{path}: cannot decode with the tokenizer ({type(error).__name__}: {reason}); "
            "put it back from a copy, or move it away to see ids"
        ) from None


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with (GPT-2, `bytes_to_unicode`)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES: Final = _byte_alphabet()


def _bytes_of(piece: str) -> str:
    """A vocabulary entry that is no text of its own, as the bytes it stands for; else the entry itself."""
    if match := _FALLBACK_BYTE.fullmatch(piece):
        return f"\\x{match[1].lower()}"
    if all(character in _BYTES for character in piece):
        return "".join(f"\\x{_BYTES[character]:02x}" for character in piece)
    return piece
