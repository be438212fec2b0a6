"""Parquet files of prompts: each row becomes the text of a JSON object, and is then a prompt like any other.

Lists, structs, maps with text keys, numbers, booleans, text and nulls have a JSON form of their own; timestamps,
dates, times and decimals become text. Binary values, durations and maps with other keys have none: their columns are
refused by name before the first row is read. A struct gives every row all members that any row has, as nulls: null
members are left out again, or the template would be told of tool parameters and variables that the row does not have.
Memory holds 256 rows at a time and the pages they come from; fewer where they may come to much (`bounds.py`). A row of
more than 64 MiB, counting text, names and 8 bytes for every value, is refused before it becomes Python's.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollgen.errors import DatasetError, UsageError
from rollgen.format.parquet import open_parquet
from rollgen.prompts.bounds import safe_batches
from rollgen.prompts.streams import MAX_ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from rollgen.format.parquet import CheckedParquet

_BUFFER = 1 << 20
"""Bytes of a column that are read from the file at a time, and not all that it has in a row group."""
_VALUE_BYTES = 8
_AS_TEXT = (
    pa.types.is_timestamp,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_decimal,
    pa.types.is_string_view,
)
_AS_THEY_ARE = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
)
_TEXTS = (pa.types.is_string, pa.types.is_large_string)
_LISTS = (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
_LARGE_LISTS = (pa.types.is_large_list, pa.types.is_large_list_view)


def read_rows(path: Path, label: str) -> Iterator[bytes]:
    """Each row as the UTF-8 text of a JSON object; NaN and infinity as such, for the reader of JSON to refuse.

    Raises UsageError, naming `label`, for damage and for columns whose values have no JSON form.
    """
    first = 0
    try:
        with open_parquet(path) as file:
            schema = _json_schema(file.schema, label)
            for batch in _batches(file):
                for rows in _parts(batch, label, first):
                    place = f"{label}: rows {first} to {first + len(rows) - 1}"
                    for row in _to_objects(rows.cast(schema), place):
                        yield json.dumps(row, ensure_ascii=False).encode()
                    first += len(rows)
    except (OSError, ValueError, DatasetError, pa.ArrowException) as error:  # also for names that are not UTF-8
        if isinstance(error, UsageError):
            raise
        reason = str(error).split("\n", 1)[0]
        raise UsageError(f"{label}: not readable as Parquet ({reason}); copy or write the file again") from None


def _batches(file: CheckedParquet) -> Iterator[pa.RecordBatch]:
    """The rows, as many at a time as are sure not to fill the memory."""
    current: tuple[str, ...] | None = None
    with ExitStack() as resources:
        for index, group in enumerate(file.groups):
            rows, dictionaries = safe_batches(file, index) if group.rows else (1, ())
            if dictionaries != current:
                resources.close()
                reader = pq.ParquetFile(
                    pa.OSFile(str(file.path)),
                    read_dictionary=list(dictionaries),
                    page_checksum_verification=True,
                    pre_buffer=False,
                    buffer_size=_BUFFER,
                )
                resources.callback(reader.close, force=True)
                current = dictionaries
            yield from reader.iter_batches(rows, row_groups=[index], use_threads=False)


def _parts(batch: pa.RecordBatch, label: str, first: int) -> Iterator[pa.RecordBatch]:
    """A batch, cut so that no part comes to more than a row may. Raises UsageError naming a row that comes to more."""
    weights = _weights(batch.to_struct_array())
    if weights.max(initial=0) > MAX_ROW_BYTES:
        row = int(np.argmax(weights > MAX_ROW_BYTES))
        raise UsageError(
            f"{label}: row {first + row}: {int(weights[row]) >> 20} MiB; the limit is {MAX_ROW_BYTES >> 20} MiB, "
            "which no prompt needs; remove the row"
        )
    start = size = 0
    for row, weight in enumerate(weights.tolist()):
        if size + weight > MAX_ROW_BYTES:
            yield batch.slice(start, row - start)
            start, size = row, 0
        size += weight
    yield batch.slice(start)


def _weights(values: pa.Array) -> npt.NDArray[np.int64]:
    """int64 [values]: bytes of text of each, names of members included, and some for every value at any depth."""
    kind = values.type
    if isinstance(values, pa.ExtensionArray):
        return _weights(values.storage)
    if pa.types.is_string_view(kind):
        return _weights(values.cast(pa.large_string()))
    weights = np.full(len(values), _VALUE_BYTES, np.int64)
    if isinstance(values, pa.DictionaryArray):
        texts = _weights(values.dictionary)
        if len(texts):
            weights = texts[values.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    elif any(matches(kind) for matches in _TEXTS):
        weights += pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    elif pa.types.is_struct(kind):
        weights += sum(len(field.name) for field in kind)
        for member in values.flatten():
            weights += _weights(member)
    elif pa.types.is_map(kind):
        offsets = values.offsets.to_numpy()
        used = slice(offsets[0], offsets[-1])
        weights += _sums(_weights(values.keys[used]) + _weights(values.items[used]), np.diff(offsets))
    elif any(matches(kind) for matches in (*_LISTS, *_LARGE_LISTS)):
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        weights += _sums(_weights(values.flatten()), lengths)
    return weights


def _sums(weights: npt.NDArray[np.int64], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """int64 [lengths]: the sums of consecutive stretches of so many weights."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = np.zeros(len(weights) + 1, np.int64)
    np.cumsum(weights, out=total[1:])
    sums: npt.NDArray[np.int64] = total[ends] - total[ends - lengths]
    return sums


def _to_objects(batch: pa.RecordBatch, place: str) -> list[dict[str, Any]]:
    try:
        rows = list(batch.to_pylist(maps_as_pydicts="strict"))
        return [{field.name: _without_nulls(row[field.name], field.type) for field in batch.schema} for row in rows]
    except KeyError:
        raise UsageError(f"{place}: a map holds a key twice; keep one") from None
    except UnicodeDecodeError:
        raise UsageError(f"{place}: text that is not UTF-8; store it as such") from None


def _without_nulls(value: Any, kind: pa.DataType) -> Any:
    """The value without null members of structs, at any depth; entries of maps and items of lists stay."""
    if value is None or not pa.types.is_nested(kind):
        return value
    if pa.types.is_struct(kind):
        members = ((field, value[field.name]) for field in kind)
        return {field.name: _without_nulls(item, field.type) for field, item in members if item is not None}
    if pa.types.is_map(kind):
        return {key: _without_nulls(item, kind.item_type) for key, item in value.items()}
    return [_without_nulls(item, kind.value_type) for item in value]


def _json_schema(schema: pa.Schema, label: str) -> pa.Schema:
    """The schema in which every value has a JSON form. Raises UsageError naming the column that has none."""
    repeated = [name for name, count in Counter(schema.names).items() if count > 1]
    if repeated:
        raise UsageError(f"{label}: column {repeated[0]} occurs twice; rename one")
    try:
        return pa.schema([pa.field(field.name, _json_type(field.name, field.type)) for field in schema])
    except TypeError as error:
        raise UsageError(f"{label}: column {error}, which JSON cannot hold; drop it or store it as text") from None


def _json_type(name: str, kind: pa.DataType) -> pa.DataType:
    """The type to cast to. Raises TypeError saying which field of which type has no JSON form."""
    if isinstance(kind, pa.BaseExtensionType):
        return _json_type(name, kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _json_type(name, kind.value_type)
    if any(matches(kind) for matches in _AS_TEXT):
        return pa.string()
    if any(matches(kind) for matches in _AS_THEY_ARE):
        return kind
    if any(matches(kind) for matches in _LISTS):
        return pa.list_(_json_type(f"{name}[]", kind.value_type))
    if any(matches(kind) for matches in _LARGE_LISTS):
        return pa.large_list(_json_type(f"{name}[]", kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _json_type(f"{name}.{field.name}", field.type)) for field in kind])
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return pa.map_(kind.key_type, _json_type(f"{name}{{}}", kind.item_type))
    raise TypeError(f"{name} is of type {kind}")
