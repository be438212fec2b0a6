"""Parquet files of prompts: each row becomes the text of a JSON object, and is then a prompt like any other.

Lists, structs, maps with text keys, numbers, booleans, text and nulls have a JSON form of their own; timestamps,
dates, times and decimals become text. Binary values, durations and maps with other keys have none: their columns are
refused by name before the first row is read. A struct gives every row all members that any row has, as nulls: null
members are left out again, or the template would be told of tool parameters and variables that the row does not have.
Memory holds 256 rows at a time and the pages they come from.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BATCH_ROWS = 256
_AS_TEXT = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_time, pa.types.is_decimal)
_AS_THEY_ARE = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
)
_LISTS = (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
_LARGE_LISTS = (pa.types.is_large_list, pa.types.is_large_list_view)


def read_rows(path: Path, label: str) -> Iterator[bytes]:
    """Each row as the UTF-8 text of a JSON object; NaN and infinity as such, for the reader of JSON to refuse.

    Raises UsageError, naming `label`, for damage and for columns whose values have no JSON form.
    """
    first = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            schema = _json_schema(file.schema_arrow, label)
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in _to_objects(batch.cast(schema), f"{label}: rows {first} to {first + batch.num_rows - 1}"):
                    yield json.dumps(row, ensure_ascii=False).encode()
                first += batch.num_rows
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:  # names of columns may not be UTF-8 either
        reason = str(error).split("\n", 1)[0]
        raise UsageError(f"{label}: not readable as Parquet ({reason}); copy or write the file again") from None


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
