"""The texts of tokens on a page: what each id stands for, where a token does not stand for that, and what of a text is
spelled out."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from rollgen.inert import plain, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rollgen.inspect.decoding import Decoder

TOKEN: Final = 512
"""Characters of one token that are shown."""


class Names(dict[int, str]):
    """What each id stands for by itself, decoded when first asked for."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._decoder = decoder

    def __missing__(self, token_id: int) -> str:
        self[token_id] = shorten(self._decoder.name(token_id), TOKEN)
        return self[token_id]


def cell_texts(part: Sequence[int], before: Sequence[int], decoder: Decoder, names: Names) -> Iterator[tuple[int, str]]:
    """Places in `part` and texts of the tokens that are not what `names` says; `before` are those in front of it."""
    for cell in decoder.cells(part, before):
        if cell.stop - cell.start > 1 or cell.text != names[part[cell.start]]:
            yield cell.start, shorten(cell.text, TOKEN)
            yield from ((place, "") for place in range(cell.start + 1, cell.stop))


def parts_of_names(ids: Sequence[int], decoder: Decoder, names: Names) -> Iterator[tuple[int, list[str]]]:
    """`spelled` of the names of these ids, by place; all of a name that is no text is spelled out."""
    for place, token_id in enumerate(ids) if decoder.has_tokenizer else ():
        if decoder.is_text(token_id):
            yield from spelled([(place, names[token_id])])
        else:
            yield place, ["", names[token_id]]


def spelled(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Of the texts that the page has to spell some of, the parts: as they are and spelled out, in turn."""
    for place, text in texts:
        runs = [(boxed, "".join(run)) for boxed, run in groupby(text, _is_spelled)]
        if any(boxed for boxed, _ in runs):
            yield place, [*([""] if runs[0][0] else []), *(run for _, run in runs)]


def _is_spelled(character: str) -> bool:
    return character != "\n" and len(plain(character)) > 1
