"""`rewards/<name>-<sequence>.parquet`: rewards of stored samples, beside the shards, which never change.

A reward belongs to a key (prompt_index, sample_index, generation) and to the tokens that it was computed from: each row
has their CRC-32, and where it is not that of the stored tokens the sample was made again, and has no reward. Of a key
that is there twice the later row counts: sequence by sequence, and row by row in each.

    name       of the rewards; any number of them lie side by side
    part       one file, committed as a shard is: fsynced, read back with checksums, linked to a name that is free
    scoring    1, 2, ...: one pass of one scorer over the dataset, over any number of runs and parts
    in force   of the scorings of a name the last one with a part that closes it, or else the first one. What is not in
               force is a rescoring that goes on, or what one has replaced: readers never see two scorers at a time

Each footer holds a PartRecord with its own SHA-256, so that with the page checksums every byte that decides a reward is
covered. This module reads; `reward_writer.py` writes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from rollgen.config import digest
from rollgen.errors import DatasetError, MissingFile
from rollgen.format.jsonlines import Count, parse_object
from rollgen.format.keys import Keys
from rollgen.format.manifest import check_format_version
from rollgen.format.parquet import CheckedParquet, open_parquet, translated
from rollgen.format.ragged import Ragged, ragged
from rollgen.format.reader import StoredShard, read_row_groups
from rollgen.format.schema import (
    FOOTER_CONFIG_DIGEST,
    FOOTER_FORMAT_VERSION,
    REWARD_SCHEMA,
    REWARDS_DIR,
    REWARDS_KEY,
)
from rollgen.rollouts import LARGEST_REWARD, REWARD

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

    Float64Array = npt.NDArray[np.float64]

UNREWARDABLE: Final = (
    "if they cannot have a reward, score with a function that returns 0, or leave them out with the filter= of "
    "RolloutStream or RolloutDataset"
)
"""What can be done about samples that a scorer fails on."""
MAX_FURTHER: Final = 64
"""Further values that a scorer may give over all answers: each is a column."""
_ERROR: Final = "error"
"""The column that says why there is none."""
_NAME: Final = re.compile(r"[A-Za-z0-9_]{1,100}")
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_PART_NAME: Final = re.compile(r"(?P<name>[A-Za-z0-9_]{1,100})-(?P<sequence>[0-9]{6,18})\.parquet")
_CHECKSUM: Final = "sha256"
"""Key of a record: SHA-256 of the canonical JSON of all its other keys."""
_FIX: Final = "remove it, and `rollgen score` makes the rewards again that were in it"


@dataclass(frozen=True, slots=True)
class ScorerRecord:
    """Who computed rewards. Rewards of one name are of one scorer: equal records."""

    function: str
    """`module:function`, or the name of a built-in scorer."""
    source_sha256: str | None
    """Of the module's file, or of the archive that it is in; None for a built-in, and where the module has no file."""
    field: str | None = None
    """Of a built-in: the field of the metadata that it compares with."""
    extract: str | None = None
    """Of a built-in: the regular expression that finds the answer in the text."""

    @property
    def options(self) -> str:
        """Those of `rollgen score` that mean this scorer."""
        told = {"with": self.function, "field": self.field, "extract": self.extract}
        return " ".join(f"--{name} {shlex.quote(value)}" for name, value in told.items() if value is not None)


@dataclass(frozen=True, slots=True)
class PartRecord:
    """What a file of rewards says of itself."""

    name: str
    sequence: Count
    scoring: Count
    closes: bool
    """Whether its scoring has a reward for every sample, and takes the place of those before."""
    rows: Count
    columns: list[str]
    """The further ones, in order."""
    scorer: ScorerRecord

    @property
    def file(self) -> str:
        """Name inside `rewards/`."""
        return f"{self.name}-{self.sequence:06d}.parquet"

    def to_json(self) -> bytes:
        """The footer's value."""
        said = asdict(self)
        return json.dumps(said | {_CHECKSUM: digest(said)}).encode()


class Part(NamedTuple):
    """A file of rewards, and what it says."""

    path: Path
    record: PartRecord


class Rewards(NamedTuple):
    """M rows, in the order of parts and rows: the last one of a key counts."""

    scorer: ScorerRecord | None
    """None where there are no parts."""
    keys: Keys
    tokens_crc32: Int64Array
    values: dict[str, Float64Array]
    """float64 [M] by column, NaN where there is none."""

    def of(self, keys: Keys, tokens_crc32: Int64Array) -> dict[str, Float64Array]:
        """float64 [N] by column: those of the samples with these keys and these tokens, NaN where there is none."""
        row = self.rows_of(keys)
        stands = row >= 0
        stands[stands] = self.tokens_crc32[row[stands]] == tokens_crc32[stands]
        return {name: self._at(values, row, stands) for name, values in self.values.items()}

    def rows_of(self, keys: Keys) -> Int64Array:
        """int64 [N]: the row that counts of each of these keys, -1 for one that has none."""
        return self.keys.last_rows_of(keys)

    @staticmethod
    def _at(values: Float64Array, row: Int64Array, stands: npt.NDArray[np.bool_]) -> Float64Array:
        result = np.full(len(row), np.nan)
        result[stands] = values[row[stands]]
        return result


def is_name(text: str) -> bool:
    """Whether rewards may have this name."""
    return _NAME.fullmatch(text) is not None


def is_column(text: str) -> bool:
    """Whether a further column may have this name."""
    return _COLUMN.fullmatch(text) is not None and text not in REWARD_SCHEMA.names


def part_schema(columns: Sequence[str]) -> pa.Schema:
    """The columns of a file with these further ones."""
    further = [pa.field(name, pa.float64()) for name in columns]
    return pa.schema([*REWARD_SCHEMA, *further])


def reward_names(directory: Path) -> list[str]:
    """The names of all rewards of a dataset, sorted."""
    return sorted({match["name"] for path, match in _parts(directory)})


def list_parts(directory: Path, name: str) -> list[Path]:
    """The files of one name, in the order of their sequence."""
    found = [(int(match["sequence"]), path) for path, match in _parts(directory) if match["name"] == name]
    return [path for _, path in sorted(found)]


def _parts(directory: Path) -> list[tuple[Path, re.Match[str]]]:
    paths = (directory / REWARDS_DIR).glob("*-*.parquet")
    return [(path, match) for path in paths if (match := _PART_NAME.fullmatch(path.name))]


def read_parts(directory: Path, name: str, config_digest: str) -> list[Part]:
    """What all files of a name say, in order. Raises DatasetError for one that is damaged or of another dataset."""
    return [read_part(path, config_digest) for path in list_parts(directory, name)]


def in_force(parts: Sequence[Part]) -> list[Part]:
    """Those whose rewards readers hand out."""
    closed = [part.record.scoring for part in parts if part.record.closes]
    scoring = max(closed) if closed else min((part.record.scoring for part in parts), default=0)
    return [part for part in parts if part.record.scoring == scoring]


def rewards_in_force(directory: Path, name: str, config_digest: str, columns: Sequence[str] | None = ()) -> Rewards:
    """All rows of the scoring that is in force, with these further columns (None: all).

    Also while a rescoring takes its place. Raises DatasetError for damage and for rewards of another dataset.
    """
    while True:
        paths = list_parts(directory, name)
        try:
            return read_rewards(in_force([read_part(path, config_digest) for path in paths]), columns)
        except MissingFile:
            if list_parts(directory, name) == paths:
                raise


def read_rewards(parts: Sequence[Part], columns: Sequence[str] | None = ()) -> Rewards:
    """All rows of parts of one scoring, with these further columns (None: all) as far as any part has them.

    Raises DatasetError for damage, and for parts of different scorers.
    """
    check_same_scorer(parts)
    further = dict.fromkeys(name for part in parts for name in part.record.columns)
    names = [REWARD, *(name for name in further if columns is None or name in columns)]
    fixed = ("prompt_index", "sample_index", "generation", "tokens_crc32")
    tables = [REWARD_SCHEMA.empty_table().select([*fixed, REWARD])]
    tables += [_read_table(part, [*fixed, *names]) for part in parts]
    table = pa.concat_tables(tables, promote_options="default")
    keys = Keys.of(table)
    values = {name: _floats(table[name]) for name in names}
    return Rewards(parts[0].record.scorer if parts else None, keys, table["tokens_crc32"].to_numpy(), values)


def check_same_scorer(parts: Sequence[Part]) -> None:
    """Raise DatasetError unless these parts of one scoring are by one scorer."""
    for part in parts:
        if part.record.scorer != parts[0].record.scorer:
            raise DatasetError(
                f"{part.path}: by {part.record.scorer.function}, the files before it by another scorer; put the files "
                "of one of the two elsewhere"
            )


def token_checksums(tokens: Ragged) -> Int64Array:
    """int64 [N]: of each row the CRC-32 of its ids as little-endian int32."""
    ids = tokens.values.astype("<i4", copy=False)
    places = pairwise(tokens.offsets.tolist())
    return np.fromiter((crc32(ids[start:end].data) for start, end in places), np.int64, len(tokens.offsets) - 1)


def stored_checksums(shards: Sequence[StoredShard]) -> Int64Array:
    """`token_checksums` of all rows of these shards, one row group's ids in memory at a time. Raises DatasetError."""
    checksums = [np.zeros(0, np.int64)]
    for stored in shards:
        with stored.open() as shard:
            tables = read_row_groups(shard, ["token_ids"], use_threads=False)
            checksums.extend(token_checksums(ragged(table["token_ids"])) for table in tables)
    return np.concatenate(checksums)


def _floats(column: pa.ChunkedArray) -> Float64Array:
    """float64, NaN where it is null."""
    return np.asarray(column.to_numpy(), np.float64)


@cache
def _parser() -> TypeAdapter[PartRecord]:
    return TypeAdapter(PartRecord)


def read_part(path: Path, config_digest: str) -> Part:
    """What a file says. Raises DatasetError for one that is damaged or of another dataset."""
    with translated(str(path), "damaged, or no file of rewards", _FIX), open_parquet(path) as file:
        metadata = file.file.metadata.metadata or {}
        if REWARDS_KEY not in metadata:
            raise ValueError(f"its footer has no {REWARDS_KEY.decode()}")
        check_format_version(metadata.get(FOOTER_FORMAT_VERSION, b"").decode(), path)
        record = read_record(file)
        if record.file != path.name:
            raise ValueError(f"it says that it is {record.file}")
        stored_digest = metadata.get(FOOTER_CONFIG_DIGEST, b"").decode()
    if stored_digest != config_digest:
        raise DatasetError(f"{path}: rewards of another dataset (config digest {stored_digest[:12] or 'absent'})")
    return Part(path, record)


def read_record(file: CheckedParquet) -> PartRecord:
    """What an open file of rewards says of itself. Raises ValueError unless it has these rows and columns."""
    text = (file.file.metadata.metadata or {})[REWARDS_KEY]
    said = parse_object(text)
    if said.pop(_CHECKSUM, None) != digest(said):
        raise ValueError(f"its record does not fit its {_CHECKSUM}")
    record = _parser().validate_json(text, strict=True)
    if record.scoring < 1:
        raise ValueError("its record counts scorings from below 1")
    if len(set(record.columns)) < len(record.columns) or not all(map(is_column, record.columns)):
        raise ValueError("its record has a column that no file can have, or one twice")
    if sum(file.row_counts) != record.rows:
        raise ValueError(f"{sum(file.row_counts)} rows, its record says {record.rows}")
    if not file.schema.equals(part_schema(record.columns)):
        raise ValueError("its columns are not those of its record")
    return record


def check_values(table: pa.Table) -> None:
    """Raise ValueError unless each row has a reward or an error, and every number is one that a reader may hand out."""
    if pc.any(pc.equal(table[REWARD].is_null(), table[_ERROR].is_null())).as_py():
        raise ValueError("a row has a reward and an error, or neither")
    for name in table.schema.names:
        if table.schema.field(name).type == pa.float64():
            fits = pc.less_equal(pc.abs(table[name]), LARGEST_REWARD)  # not of what is no number
            if pc.any(pc.invert(fits)).as_py():
                raise ValueError(f"column {name!r} has a number that is not finite, or that float32 cannot hold")


def _read_table(part: Part, names: Sequence[str]) -> pa.Table:
    """Of the columns of these names those that the part has, every page verified."""
    schema = part_schema(part.record.columns)
    there = [name for name in names if name in schema.names]
    with translated(str(part.path), "damaged", _FIX), open_parquet(part.path) as file:
        groups = [_checked(file.read(index, [*there, _ERROR]), there) for index in range(len(file.groups))]
    return pa.concat_tables([pa.schema([schema.field(name) for name in there]).empty_table(), *groups])


def _checked(group: pa.Table, names: Sequence[str]) -> pa.Table:
    check_values(group)
    return group.select(names)
