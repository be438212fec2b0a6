"""`rollgen.json`: what a dataset is. Created exclusively, so that two starters can never both believe they are first.

The manifest says which configuration made the data (`identity`, with its digest), with which model, tokenizer and
engine, and how supports were captured. By hashes it vouches for itself, the plan and the retry lists, as the journal
does for shards. It carries no environment value, no credential and no absolute path: a dataset travels. JSON shape:
`schema/v1/manifest.schema.json`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollgen.config import canonical_json, digest
from rollgen.errors import DatasetError, ResumeRefused, Unreadable
from rollgen.format.files import link, read_regular, write_durably
from rollgen.format.journal import list_shards
from rollgen.format.jsonlines import Count, Count32, parse_object
from rollgen.format.schema import (
    FORMAT_NAME,
    FORMAT_VERSION,
    GENERATION_VERSION,
    MANIFEST_FILE,
    MAX_EXPERTS,
    has_generation,
)

PLANLESS: Final = "planless"
"""Key of `identity`, true where prompts come one by one, so that there is no plan and nothing is owed."""
RUN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
"""What a run of a merged dataset may be called."""
_CHECKSUM: Final = "sha256"
"""Key of the manifest: SHA-256 of the canonical JSON of all its other keys."""
MAX_MANIFEST_BYTES: Final = 16 << 20
"""A start adds some 2 KB."""
_FIX = "put it back from a copy: the shards are untouched"


class _Section(BaseModel):
    """Unknown keys are kept: a later MINOR version may add some."""

    model_config = ConfigDict(extra="allow", frozen=True)


class PromptSource(_Section):
    """One input file, by name only."""

    name: str
    bytes: Count
    sha256: str


class ModelRecord(_Section):
    """The model that sampled. `fingerprint` tells a checkpoint overwritten in place from the one before."""

    name: str
    revision: str | None
    fingerprint: str
    dtype: str
    context_length: Count32


class EngineRecord(_Section):
    """The engine that sampled; `versions` are those of the packages that decide numbers."""

    name: str
    version: str
    device: str
    versions: dict[str, str]
    processors: str
    """Order in which the engine truncates; supports must never be derived again from (k, p)."""


class Attempt(_Section):
    """One start of `rollgen generate` on this directory: operational keys and growth, as they were then."""

    started_at: str
    rollgen_version: str
    n: Count32
    limit: Count | None
    prompts: list[PromptSource]
    operational: dict[str, Any]
    engine: EngineRecord


class Retry(_Section):
    """Samples that were made again with a larger max_tokens; `retry-<generation>.parquet` lists them."""

    generation: Count32
    """1, 2, ...: of the rows that this retry stores."""
    started_at: str
    where: dict[str, str]
    """Which samples were chosen: `{"finish_reason": "length"}`."""
    max_tokens: Count32
    """As asked for; the list has the effective ones."""
    samples: Count
    """Rows of the list."""
    sha256: str | None = None
    """Of the list's file; None in a dataset of an older writer."""


class RoutedExperts(_Section):
    """What numbers of experts mean in a dataset that stores them."""

    layers: Annotated[int, Field(ge=1, lt=1 << 31)]
    """Of the model, those without experts among them."""
    top_k: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    """Experts that a token is sent to in a layer."""
    experts: Annotated[int, Field(ge=1, le=MAX_EXPERTS)] | None
    """Of a layer; None where the engine does not say."""

    @property
    def ids(self) -> int:
        """Numbers of experts of a token."""
        return self.layers * self.top_k


class Run(_Section):
    """A run of a merged dataset: what its own manifest said, but for what is the same in all of them."""

    name: str
    """In the column `run`."""
    samples: Count
    """That were merged: current ones."""
    superseded: Count
    """Rows that were not merged, because a retry had made their samples again."""
    owed: Count | None
    """Samples that it wanted and did not have when it was merged; None without a plan."""
    format_version: str
    created_at: str
    config_digest: str
    identity: dict[str, Any]
    capture: Literal["native", "logprobs", "none"]
    support_logprobs: bool
    """Whether it stored them; the merged dataset may not."""
    model: ModelRecord
    plan_sha256: str | None
    attempts: list[Attempt]
    retries: list[Retry]
    weight_versions: bool
    routed_experts: RoutedExperts | None


class Manifest(_Section):
    """The parsed `rollgen.json`."""

    format: Literal["rollgen"] = FORMAT_NAME
    format_version: str = FORMAT_VERSION
    created_at: str
    config_digest: str
    """SHA-256 of the canonical JSON of `identity`; also in each shard's footer."""
    identity: dict[str, Any]
    """Every key that decides the data. A resumed run must match it key by key."""
    capture: Literal["native", "logprobs", "none"]
    """How supports were read; `none` for a run that never truncates (all supports null)."""
    support_logprobs: bool
    vocab_size: Count32
    """Of the model: mask ids lie below it. May exceed the tokenizer's."""
    tokenizer_vocab_size: Count32
    model: ModelRecord
    tokenizer_sha256: str
    plan_sha256: str | None = None
    """Of `plan.parquet`; None without a plan, and in a dataset of an older writer."""
    page_checksums: bool = True
    """Readers refuse a shard whose pages carry none: pyarrow would pass it silently."""
    attempts: list[Attempt]
    retries: list[Retry] = []
    """Oldest first."""
    weight_versions: bool = False
    """Whether shards say which weights sampled which tokens."""
    routed_experts: RoutedExperts | None = None
    """None: they are not stored."""
    runs: list[Run] = []
    """What a merged dataset is made of; empty in any other."""

    @property
    def optional_columns(self) -> dict[str, bool]:
        """Keyword arguments of `schema.shard_schema`: which of the optional columns shards have."""
        return {
            "support_logprobs": self.support_logprobs,
            "weight_versions": self.weight_versions,
            "routed_experts": self.routed_experts is not None,
            "run": bool(self.runs),
        }

    @property
    def is_planless(self) -> bool:
        """Whether its prompts come one by one, so that there is no plan and nothing is owed."""
        return bool(self.identity.get(PLANLESS))

    @property
    def run_names(self) -> tuple[str, ...]:
        """Of a merged dataset, the values of the column `run`; none of any other."""
        return tuple(run.name for run in self.runs)

    def with_retry(self, retry: Retry) -> Manifest:
        """This dataset with one more retry: its shards have the column `generation` from now on."""
        version = self.format_version if has_generation(self.format_version) else GENERATION_VERSION
        return self.model_copy(update={"format_version": version, "retries": [*self.retries, retry]})

    def of_run(self, run: Run) -> Manifest:
        """What the dataset of one of the runs said of itself."""
        own = {name: getattr(run, name) for name in Run.model_fields if name in type(self).model_fields}
        return self.model_copy(update=own | {"runs": []})


def merged_identity(runs: Sequence[Run]) -> dict[str, Any]:
    """The `identity` of a dataset that is merged from these runs."""
    return {PLANLESS: True, "runs": [{"name": run.name, "config_digest": run.config_digest} for run in runs]}


def read_manifest(directory: Path) -> Manifest:
    """Parse and check `directory/rollgen.json`. Raises DatasetError when missing, damaged or of a later version."""
    path = directory / MANIFEST_FILE
    try:
        raw = parse_object(read_regular(path, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        if list_shards(directory):
            raise DatasetError(f"{directory}: holds shards but no {MANIFEST_FILE}; {_FIX}") from None
        raise DatasetError(f"{path}: not found; {directory} is not a rollgen dataset") from None
    except OSError as error:
        raise Unreadable(f"{path}: this machine could not read it: {error}; mend that, and try again") from None
    except ValueError as error:
        raise DatasetError(f"{path}: not readable as JSON: {error}; {_FIX}") from None
    if raw.get("format") != FORMAT_NAME:
        raise DatasetError(f'{path}: not a rollgen manifest: "format" is not "{FORMAT_NAME}"; {_FIX}')
    check_format_version(str(raw.get("format_version")), path)
    checksum = raw.pop(_CHECKSUM, None)
    vouched = checksum is not None or has_generation(str(raw["format_version"]))  # 1.0 had no such key
    if vouched and checksum != digest(raw):
        raise DatasetError(f"{path}: {_CHECKSUM} is not that of its content: edited or damaged; {_FIX}")
    try:
        manifest = Manifest.model_validate_json(canonical_json(raw), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise DatasetError(f"{path}: {place}: {problem['msg']}; {_FIX}") from None
    if digest(manifest.identity) != manifest.config_digest:
        raise DatasetError(f"{path}: config_digest does not match identity: the manifest was edited or damaged; {_FIX}")
    if any(retry.generation != number for number, retry in enumerate(manifest.retries, 1)):
        raise DatasetError(f"{path}: retries: generations do not count 1, 2, ...: edited or damaged; {_FIX}")
    return manifest


def check_format_version(version: str, place: Path | str) -> None:
    """Refuse a MAJOR this code does not know. Raises DatasetError."""
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise DatasetError(f"{place}: format version {version} is not readable here (1.x is); upgrade rollgen")


def create_manifest(directory: Path, manifest: Manifest) -> bool:
    """Write the manifest if there is none. Returns False, having written nothing, when another starter was first."""
    temporary = _write_temporary(directory, manifest)
    try:
        link(temporary, directory / MANIFEST_FILE)  # fails if it exists: exclusive and complete in one step
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    fsync_directory(directory)
    return True


def replace_manifest(directory: Path, manifest: Manifest) -> None:
    """Atomically replace the manifest (a new attempt, growth). The caller holds the writer's lock."""
    os.replace(_write_temporary(directory, manifest), directory / MANIFEST_FILE)
    fsync_directory(directory)


def check_identity(stored: Manifest, identity: dict[str, Any]) -> None:
    """Raise ResumeRefused naming every identity key whose value differs from the stored run's."""
    if digest(identity) == stored.config_digest:
        return
    changed = [
        f"{key} ({_short(stored.identity.get(key))} -> {_short(identity.get(key))})"
        for key in sorted(stored.identity.keys() | identity.keys())
        if stored.identity.get(key) != identity.get(key)
    ]
    longer = stored.identity.get("max_tokens") != identity.get("max_tokens")
    raise ResumeRefused(
        f"{MANIFEST_FILE}: this run was made with other settings: {', '.join(changed)}; "
        "repeat the first command with --resume, or write to another --out"
        + ("; samples that were cut are made longer by --retry" if longer else "")
    )


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of `rollgen.json`. More than MAX_MANIFEST_BYTES of it no reader takes."""
    content = manifest.model_dump()
    text = json.dumps(content | {_CHECKSUM: digest(content)}, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def fsync_directory(directory: Path) -> None:
    """Make renames inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_temporary(directory: Path, manifest: Manifest) -> Path:
    temporary = directory / f".tmp-{MANIFEST_FILE}-{os.getpid()}"
    write_durably(temporary, manifest_bytes(manifest))
    return temporary


def _short(value: object) -> str:
    text = canonical_json(value)
    return text if len(text) <= 80 else text[:77] + "..."
