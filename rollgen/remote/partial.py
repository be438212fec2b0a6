"""Parts of a shard in object storage: a local file of its full size in which only what was asked for is in place.

The rest of such a file is holes, which take no room. Whoever opens it with `rollgen.format.reader` sees the shard: size
and footer are checked as ever, and so are the page headers and checksums of what is read. A hole is no page: reading
past what was fetched is an error, never zeros.

Costs one request for the footer, which is asked for with some of what lies before it, because its length is not known,
and one for each stretch of the columns: neighbours, and those with little between them, come together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from rollgen.errors import DatasetError
from rollgen.format.files import new_file
from rollgen.format.footer import MAX_FOOTER_BYTES
from rollgen.format.journal import JournalLine
from rollgen.format.parquet import CheckedParquet, open_parquet, translated
from rollgen.format.schema import DATA_DIR
from rollgen.remote.cache import keeping
from rollgen.remote.objects import ObjectStore

_TAIL_BYTES: Final = 32 << 10
"""Asked for first of the end of an object: a footer takes 2 to 4 KB for a row group, and most shards have a few."""
_LENGTH_BYTES: Final = 8
"""At the very end: the footer's length and the magic bytes."""
_GAP_BYTES: Final = 32 << 10
"""Fetched though not wanted, to save a request: far less than what arrives in the time that a request takes."""
_PIECE_BYTES: Final = 32 << 20
"""Most bytes of a request: what memory holds."""
_EVERYWHERE: Final = "prompt_index"
"""The column that says how many rows there are, where a shard has none of those that are asked for."""
_FIX: Final = "`rollgen generate --resume` sets the shard aside and makes its samples again"

Range = tuple[int, int]
"""From a byte to the one behind the last."""


class Part(NamedTuple):
    """What of a shard is wanted."""

    columns: tuple[str, ...] | None = None
    """None: all of them. Those that the shard does not have are passed over."""
    row_group: int | None = None
    """None: all of them."""


def fetch_columns(store: ObjectStore, line: JournalLine, columns: Sequence[str], path: Path) -> None:
    """Make a file at `path` that holds these columns of a committed shard, for `open_shard` and `read_columns`.

    Raises MissingFile and Unreadable, and DatasetError when the object has no Parquet footer.
    """
    name = f"{DATA_DIR}/{line.file}"
    size = store.size(name)
    footer = fetch_footer(store, name, size)
    with keeping(path.parent, "make room there"):
        fetch_part(store, name, size, footer, Part(tuple(columns)), path)


def fetch_footer(store: ObjectStore, name: str, size: int) -> bytes:
    """The footer of an object of this size, with its length and the magic bytes: what the journal has the hash of.

    Raises DatasetError when there is none.
    """
    tail = store.read_range(name, max(0, size - _TAIL_BYTES), size)
    wanted = int.from_bytes(tail[-_LENGTH_BYTES:][:4], "little") + _LENGTH_BYTES
    if len(tail) < wanted <= min(size, MAX_FOOTER_BYTES):
        tail = store.read_range(name, size - wanted, size - len(tail)) + tail
    footer = tail[-wanted:]
    if size < wanted or not footer.endswith(b"PAR1") or len(footer) < wanted:
        raise DatasetError(f"{store.url}/{name}: no Parquet footer: truncated or damaged; {_FIX}")
    return footer


def fetch_part(store: ObjectStore, name: str, size: int, footer: bytes, part: Part, path: Path) -> None:
    """Make a file at `path` that holds this footer, and of an object of this size what is wanted.

    Nothing in the footer is believed but where to look, and not beyond the end of the object. Raises MissingFile,
    Unreadable and DatasetError, naming the URL, and OSError for what is wrong with the local disk.
    """
    with new_file(path) as file:
        _put(file, size - len(footer), footer)
        with translated(f"{store.url}/{name}", "damaged or not a shard", _FIX), open_parquet(path) as parquet:
            wanted = joined(_ranges(parquet, part))
        for start, stop in _pieces(wanted, size - len(footer)):
            _put(file, start, store.read_range(name, start, stop))


def joined(ranges: Sequence[Range]) -> list[Range]:
    """The same bytes in fewer ranges, rising, with gaps that are not worth a request filled in."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start - found[-1][1] <= _GAP_BYTES:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _ranges(parquet: CheckedParquet, part: Part) -> list[Range]:
    """Where the pages of the columns are."""
    columns = parquet.leaves.keys() if part.columns is None else {*part.columns, _EVERYWHERE} & parquet.leaves.keys()
    leaves = sorted(chain.from_iterable(parquet.leaves[name] for name in columns))
    groups = parquet.groups if part.row_group is None else parquet.groups[part.row_group : part.row_group + 1]
    chunks = [group.chunk(leaf) for group in groups for leaf in leaves]
    return [(chunk.start, chunk.start + chunk.bytes) for chunk in chunks]


def _pieces(ranges: Sequence[Range], end: int) -> Iterator[Range]:
    """The same bytes in requests of bounded size, none of them beyond `end`."""
    for start, stop in ranges:
        for at in range(max(0, start), min(stop, end), _PIECE_BYTES):
            yield at, min(at + _PIECE_BYTES, stop, end)


def _put(file: BinaryIO, at: int, content: bytes) -> None:
    file.seek(at)
    file.write(content)
    file.flush()
