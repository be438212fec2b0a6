"""`schema/v1/` and the code say the same, in both directions; the worked examples of `SPEC.md` are true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from pydantic import BaseModel

from rollgen.config import digest
from rollgen.format import schema as code
from rollgen.format.failures import Failure
from rollgen.format.journal import JournalLine
from rollgen.format.manifest import Attempt, Manifest, Retry, RoutedExperts, Run
from rollgen.format.rewards import PartRecord, ScorerRecord
from rollgen.prompts.planned import planless_numbers
from rollgen.rollouts import sample_seed

SCHEMA = Path(__file__).parents[2] / "schema"
SPEC = (SCHEMA / "SPEC.md").read_text(encoding="utf-8")
COLUMNS = json.loads((SCHEMA / "v1" / "columns.json").read_text(encoding="utf-8"))
MANIFEST_SCHEMA = json.loads((SCHEMA / "v1" / "manifest.schema.json").read_text(encoding="utf-8"))
ADDED = {"retries", "plan_sha256", "weight_versions", "routed_experts", "runs"}
"""By a MINOR."""
SCALARS = {
    "bool": pa.bool_(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
}


def parse_type(text: str) -> pa.DataType:
    """Arrow's type notation, `list<element: T not null>`, back to a type."""
    if text in SCALARS:
        return SCALARS[text]
    element = text.removeprefix("list<element: ").removesuffix(">")
    inner = element.removesuffix(" not null")
    return pa.list_(pa.field("element", parse_type(inner), nullable=inner == element))


def declared(columns: list[dict[str, Any]], *, optional: bool) -> pa.Schema:
    chosen = [c for c in columns if optional or not c.get("optional", False)]
    return pa.schema([pa.field(c["name"], parse_type(c["type"]), nullable=c["nullable"]) for c in chosen])


@pytest.mark.parametrize("optional", [False, True])
def test_shard_columns_are_those_of_the_code(optional: bool) -> None:
    """Same names, order, types and nullability, with and without the optional column."""
    chosen = dict.fromkeys(code.OPTIONAL_COLUMNS, optional)
    assert declared(COLUMNS["shard"], optional=optional).equals(code.shard_schema(**chosen))


@pytest.mark.parametrize("minor", ["1.0", "1.1"])
def test_columns_of_an_older_minor_are_those_of_the_code(minor: str) -> None:
    """Without the columns that say a later `since`, in the same order."""
    then = [column for column in COLUMNS["shard"] if column.get("since", "1.0") <= minor]
    made = code.shard_schema(support_logprobs=True, generation=code.has_generation(minor))
    assert declared(then, optional=True).equals(made)


@pytest.mark.parametrize(
    ("table", "schema"),
    [("plan", code.PLAN_SCHEMA), ("retry", code.RETRY_SCHEMA), ("rewards", code.REWARD_SCHEMA)],
)
def test_other_columns_are_those_of_the_code(table: str, schema: pa.Schema) -> None:
    """Same names, order, types and nullability."""
    assert declared(COLUMNS[table], optional=True).equals(schema)


@pytest.mark.parametrize("table", ["shard", "plan", "retry", "rewards"])
def test_null_is_explained_where_it_is_allowed(table: str) -> None:
    """A column, or its inner lists, may be null exactly where `null` says what that means."""
    for column in COLUMNS[table]:
        nullable = column["nullable"] or re.search(r"list<element: list<.*>>$", column["type"]) is not None
        assert nullable == ("null" in column), column["name"]


def test_footer_keys_and_version_are_those_of_the_code() -> None:
    """Each FOOTER_ constant is listed, and nothing else."""
    keys = {value.decode() for name, value in vars(code).items() if name.startswith("FOOTER_")}
    assert {key["name"] for key in COLUMNS["footer"]} == keys
    assert (COLUMNS["format"], COLUMNS["format_version"]) == (code.FORMAT_NAME, code.FORMAT_VERSION)


def shape(schema: dict[str, Any]) -> Any:
    """A JSON Schema reduced to what both sides must agree on: properties, types, constants, required keys."""
    if "anyOf" in schema:
        return {"type": sorted(option.get("type") or option["$ref"] for option in schema["anyOf"])}
    reduced = {key: schema[key] for key in ("type", "const", "enum", "$ref") if key in schema}
    if isinstance(reduced.get("type"), list):
        reduced["type"] = sorted(reduced["type"])
    if "items" in schema:
        reduced["items"] = shape(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        reduced["values"] = shape(schema["additionalProperties"])
    if "properties" in schema:
        reduced["properties"] = {key: shape(value) for key, value in schema["properties"].items()}
    return reduced


def test_manifest_schema_is_that_of_the_code() -> None:
    """Property by property, in every section."""
    generated = Manifest.model_json_schema()
    on_disk = shape(MANIFEST_SCHEMA)
    assert on_disk["properties"].pop("sha256") == {"type": "string"}  # of the file: nothing that the code keeps
    assert on_disk == shape(generated)
    assert MANIFEST_SCHEMA["$defs"].keys() == generated["$defs"].keys()
    for name, section in MANIFEST_SCHEMA["$defs"].items():
        assert shape(section) == shape(generated["$defs"][name])
        assert section["required"] == generated["$defs"][name]["required"]


def test_manifest_requires_every_key() -> None:
    """Writers write all keys, also those that the code could default; those of a later MINOR stay optional."""
    assert MANIFEST_SCHEMA["required"] == [name for name in Manifest.model_fields if name not in ADDED]


@pytest.fixture(params=["masks", "generations", "extras", "runs"])
def golden_manifest(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A manifest as it is on disk, of format 1.0 to 1.3."""
    path = SCHEMA / "conformance" / "golden" / request.param / "rollgen.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def test_real_manifest_is_valid(golden_manifest: dict[str, Any]) -> None:
    """The JSON Schema is one, and accepts what the writer writes."""
    jsonschema.Draft202012Validator.check_schema(MANIFEST_SCHEMA)
    jsonschema.validate(golden_manifest, MANIFEST_SCHEMA)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "parquet"),
        ("format_version", "2.0"),
        ("config_digest", "abc"),
        ("capture", "guess"),
        ("vocab_size", 0),
        ("vocab_size", "64"),
        ("model", {"name": "m"}),
        ("attempts", [{}]),
        ("retries", [{"generation": 0}]),
        ("weight_versions", 1),
        ("routed_experts", {"layers": 0, "top_k": 2, "experts": 4}),
        ("runs", [{"name": "a b"}]),
    ],
)
def test_wrong_manifest_is_invalid(golden_manifest: dict[str, Any], key: str, value: object) -> None:
    """Each wrong value is refused at its place."""
    with pytest.raises(jsonschema.ValidationError) as caught:
        jsonschema.validate(golden_manifest | {key: value}, MANIFEST_SCHEMA)
    assert caught.value.absolute_path[0] == key


def test_unknown_manifest_keys_are_valid(golden_manifest: dict[str, Any]) -> None:
    """A later MINOR may add keys anywhere."""
    golden_manifest["new"] = golden_manifest["model"]["new"] = 1
    jsonschema.validate(golden_manifest, MANIFEST_SCHEMA)


@pytest.mark.parametrize("kind", [JournalLine, Failure])
def test_spec_names_every_key_of_a_line(kind: type) -> None:
    """Journal and failure lines are described key by key."""
    for key in kind.__dataclass_fields__:  # type: ignore[attr-defined]
        assert f"`{key}`" in SPEC


@pytest.mark.parametrize("kind", [PartRecord, ScorerRecord])
def test_spec_names_every_key_of_a_record(kind: type) -> None:
    """What a file of rewards says of itself."""
    for key in kind.__dataclass_fields__:  # type: ignore[attr-defined]
        assert f"`{key}`" in SPEC


@pytest.mark.parametrize("kind", [Manifest, Attempt, Retry, RoutedExperts, Run])
def test_spec_names_every_key_of_the_manifest(kind: type[BaseModel]) -> None:
    """The prose leaves none out."""
    for key in kind.model_fields:
        assert f"`{key}`" in SPEC


@pytest.mark.parametrize(
    "column", [c["name"] for table in ("shard", "plan", "retry", "rewards") for c in COLUMNS[table]]
)
def test_spec_names_every_column(column: str) -> None:
    """The prose leaves none out."""
    assert f"`{column}`" in SPEC


def test_seed_vectors_of_the_spec() -> None:
    """Each row of the table `s | prompt_id | k | seed`."""
    rows = re.findall(r"^\| (\d+) \| `(.+?)` \| (\d+) \| (\d+) \|$", SPEC, flags=re.MULTILINE)
    assert len(rows) == 3
    for seed, prompt_id, sample_index, expected in rows:
        assert sample_seed(int(seed), prompt_id, int(sample_index)) == int(expected)


def test_number_of_a_prompt_of_a_run_in_the_spec() -> None:
    """The worked example of section 15."""
    (number,) = planless_numbers(pa.chunked_array([["p0"]]), pa.chunked_array([["base"]]))
    assert f"the prompt `p0` of the run `base` has the number {number}" in SPEC


def test_digest_vector_of_the_spec() -> None:
    """The worked example of canonical JSON."""
    assert digest({"top_p": 1.0, "model": "é"}) in SPEC
