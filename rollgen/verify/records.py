"""The records of a dataset against `schema/SPEC.md`: manifest, journal, plan, retry lists, failures, rewards.

Readers stop at the first damage of a record; here what can still be read is read, so that one damaged line does not
hide what else is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.config import digest
from rollgen.errors import DatasetError, MissingFile, Unreadable
from rollgen.format.failures import Failure
from rollgen.format.journal import JournalLine, file_sha256, parse_shard_name
from rollgen.format.jsonlines import line_files, parse_lines
from rollgen.format.manifest import RUN_NAME, Manifest, merged_identity, read_manifest
from rollgen.format.retries import RetryList, read_retries
from rollgen.format.rewards import Part, check_same_scorer, list_parts, read_part, read_rewards, reward_names
from rollgen.format.schema import (
    FAILURES_DIR,
    JOURNAL_DIR,
    MANIFEST_FILE,
    PLAN_FILE,
    has_extras,
    has_generation,
    has_runs,
    retry_file,
)
from rollgen.prompts.plan import Plan
from rollgen.prompts.planned import Planned
from rollgen.verify.rows import is_json_object

if TYPE_CHECKING:
    from rollgen.verify.findings import Findings, Kind

_VERSION = re.compile(r"1\.[0-9]+")
_Line = TypeVar("_Line", JournalLine, Failure)


class JournalContent(NamedTuple):
    """What can be read of all journals: `format.journal.Journal`, and of whom something cannot."""

    committed: dict[str, JournalLine]
    """By file name, retired ones left out."""
    retired: dict[str, JournalLine]
    """By file name."""
    damaged: frozenset[str]
    """Writers of whose lines some cannot be read."""


def check_manifest(directory: Path, findings: Findings) -> Manifest | None:
    """The manifest; None when it cannot be read."""
    path = directory / MANIFEST_FILE
    try:
        manifest = read_manifest(directory)
    except DatasetError as error:
        findings.add("manifest", path, error)
        return None
    for problem in _manifest_problems(manifest):
        findings.add("manifest", path, problem)
    return manifest


def _manifest_problems(manifest: Manifest) -> Iterator[str]:
    said_again = {
        "model_fingerprint": manifest.model.fingerprint,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "max_model_len": manifest.model.context_length,
        "dtype": manifest.model.dtype,
        "capture": manifest.capture,
        "support_logprobs": manifest.support_logprobs,
    }
    for key, value in said_again.items():
        if manifest.identity.get(key, value) != value:
            yield f"identity.{key} is {manifest.identity[key]!r}, elsewhere it is {value!r}"
    if not _VERSION.fullmatch(manifest.format_version):
        yield f"format_version is {manifest.format_version!r}"
    elif manifest.retries and not has_generation(manifest.format_version):
        yield f"there are retries, which format {manifest.format_version} has not"
    if (manifest.weight_versions or manifest.routed_experts) and not has_extras(manifest.format_version):
        yield f"there are weight versions or routed experts, which format {manifest.format_version} has not"
    yield from _run_problems(manifest)
    for name in ("vocab_size", "tokenizer_vocab_size"):
        if getattr(manifest, name) < 1:
            yield f"{name} is {getattr(manifest, name)}"
    if not manifest.page_checksums:
        yield "page_checksums is false: damage would go unseen"
    times = {"created_at": manifest.created_at}
    times |= {f"attempts.{number}.started_at": attempt.started_at for number, attempt in enumerate(manifest.attempts)}
    times |= {f"retries.{number}.started_at": retry.started_at for number, retry in enumerate(manifest.retries)}
    for number, run in enumerate(manifest.runs):
        times |= {f"runs.{number}.created_at": run.created_at}
    for name, time in times.items():
        if not _is_time(time):
            yield f"{name} is not an RFC 3339 time"


def _run_problems(manifest: Manifest) -> Iterator[str]:
    """What a merged dataset says of its runs."""
    if not manifest.runs:
        return
    names = manifest.run_names
    if not has_runs(manifest.format_version):
        yield f"there are runs, which format {manifest.format_version} has not"
    if len(set(names)) < len(names):
        yield "runs: two have the same name"
    for number, run in enumerate(manifest.runs):
        if not RUN_NAME.fullmatch(run.name):
            yield f"runs.{number}.name is {run.name[:80]!r}"
        if digest(run.identity) != run.config_digest:
            yield f"runs.{number}.config_digest is not that of its identity"
    if manifest.identity != merged_identity(manifest.runs):
        yield "identity is not that of a dataset merged from its runs"
    if manifest.retries:
        yield "there are retries, though a merged dataset has none of its own"


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def check_journal(directory: Path, findings: Findings) -> JournalContent:
    """All lines that can be read."""
    committed: dict[str, JournalLine] = {}
    retired: dict[str, JournalLine] = {}
    damaged: set[str] = set()
    retirements: list[tuple[Path, str, JournalLine]] = []
    for path in line_files(directory / JOURNAL_DIR):
        for place, line in _lines(path, JournalLine, "journal", findings):
            if line is None:
                damaged.add(path.stem)
            elif parse_shard_name(line.file) is None:
                damaged.add(path.stem)
                findings.add("journal", path, f"{line.file!r} is not the name of a shard", place)
            elif line.retired:
                retirements.append((path, place, line))
            elif committed.setdefault(line.file, line) != line:
                findings.add("journal", path, f"{line.file} has another line, which says something else", place)
    for path, place, line in retirements:  # the commit may be in a journal that comes later
        retired[line.file] = line
        if (commit := committed.get(line.file)) and replace(line, retired=False) != commit:
            findings.add("journal", path, f"retires {line.file}, but is not the line of its commit otherwise", place)
    for name in retired:
        committed.pop(name, None)
    return JournalContent(committed, retired, frozenset(damaged))


def _lines(path: Path, kind: type[_Line], finding: Kind, findings: Findings) -> Iterator[tuple[str, _Line | None]]:
    """Place and line; None for what cannot be read, which is a finding already."""
    try:
        for number, line in parse_lines(path, kind):
            if line is None:
                findings.add(finding, path, "damaged: not a line of such a file", f"line {number}")
            yield f"line {number}", line
    except (OSError, DatasetError) as error:
        findings.add(finding, path, error)
        yield "", None


def check_planned(directory: Path, manifest: Manifest, findings: Findings) -> Planned | None:
    """Plan and retry lists; None without a plan, or when it cannot be read."""
    path = directory / PLAN_FILE
    if manifest.is_planless:
        if path.exists():
            findings.add("plan", path, "there is a plan, but the manifest says that there is none")
        return None
    try:
        plan = Plan(path)
        if manifest.plan_sha256 is not None and file_sha256(path) != manifest.plan_sha256:
            problem = "not the file that the manifest vouches for: damaged, or a start was interrupted (--resume mends)"
            findings.add("plan", path, problem)
        for place, problem in _plan_problems(plan, manifest.vocab_size):
            findings.add("plan", path, problem, place)
    except (OSError, DatasetError) as error:
        findings.add("plan", path, error)
        return None
    return Planned(plan, _check_retries(directory, manifest, plan, findings))


def _plan_problems(plan: Plan, vocab_size: int) -> Iterator[tuple[str, str]]:
    first, ids = 0, []
    for batch in plan.batches():
        for problem, bad in _batch_problems(batch, vocab_size):
            if bad.any():
                yield f"row {first + int(bad.argmax())}", problem
        ids.append(batch.column("prompt_id").cast(pa.large_string()))  # together they may pass 2 GiB
        first += batch.num_rows
    prompt_ids = pa.chunked_array(ids)
    if pc.count_distinct(prompt_ids).as_py() != len(prompt_ids):
        counts = pc.value_counts(prompt_ids)
        twice = pc.index(pc.greater(counts.field("counts"), 1), True).as_py()
        yield "", f"prompt_id {counts.field('values')[twice].as_py()[:80]!r} is there twice"


def _batch_problems(batch: pa.RecordBatch, vocab_size: int) -> Iterator[tuple[str, Any]]:
    """What must hold for each row, and the rows (bool [N]) for which it does not."""
    tombstone = batch.column("error").is_valid().to_numpy(zero_copy_only=False)
    lengths = pc.list_value_length(batch.column("prompt_token_ids")).to_numpy()
    columns = {name: batch.column(name).to_numpy() for name in ("temperature", "top_p", "min_p", "top_k", "max_tokens")}
    yield "no prompt tokens, and not skipped", (lengths == 0) & ~tombstone
    yield "prompt tokens, though skipped", (lengths > 0) & tombstone
    yield "temperature is not above 0", ~((columns["temperature"] > 0) & np.isfinite(columns["temperature"]))
    yield "top_p is not in (0, 1]", ~((columns["top_p"] > 0) & (columns["top_p"] <= 1))
    yield "min_p is not in [0, 1]", ~((columns["min_p"] >= 0) & (columns["min_p"] <= 1))
    yield "top_k is below 0", columns["top_k"] < 0
    yield "max_tokens is below 1", columns["max_tokens"] < 1
    yield "seed is below 0", batch.column("seed").to_numpy() < 0
    metadata = (text.as_py() for text in batch.column("metadata"))  # one at a time: each may be large
    valid = (text is None or is_json_object(text) for text in metadata)
    yield "metadata is no JSON object", ~np.fromiter(valid, np.bool_, batch.num_rows)
    tokens = batch.column("prompt_token_ids").flatten().to_numpy()
    outside = np.zeros(batch.num_rows, np.bool_)
    outside[np.repeat(np.arange(batch.num_rows), lengths)[(tokens < 0) | (tokens >= vocab_size)]] = True
    yield f"a prompt token is outside the model's vocabulary of {vocab_size}", outside


def _check_retries(directory: Path, manifest: Manifest, plan: Plan, findings: Findings) -> tuple[RetryList, ...]:
    """The lists that can be read and belong to the plan; none of those after one that cannot."""
    lists: list[RetryList] = []
    for number in range(1, len(manifest.retries) + 1):
        path = directory / retry_file(number)
        try:
            retries = read_retries(directory, manifest.model_copy(update={"retries": manifest.retries[:number]}))[-1]
            retries.numbers(plan.offsets)
        except DatasetError as error:
            findings.add("retries", path, error)
            break
        lists.append(retries)
    return tuple(lists)


def check_failures(directory: Path, planned: Planned | None, findings: Findings) -> int:
    """Lines of failures, and that they do not contradict the plan. Returns how many tombstones have none."""
    told = set[int]()
    for path in line_files(directory / FAILURES_DIR):
        for place, failure in _lines(path, Failure, "failures", findings):
            if failure and planned and (problem := failure_problem(failure, planned)):
                findings.add("failures", path, problem, place)
            elif failure and failure.stage == "input":
                told.add(failure.prompt_index)
    return 0 if planned is None else int(planned.plan.tombstone.sum()) - len(told)


def check_rewards(directory: Path, manifest: Manifest, findings: Findings) -> None:
    """That readers take each file of rewards. A sample that has none is nothing wrong."""
    parts: dict[tuple[str, int], Part] = {}
    for path in (path for name in reward_names(directory) for path in list_parts(directory, name)):
        try:
            part = read_part(path, manifest.config_digest)
            first = parts.setdefault((part.record.name, part.record.scoring), part)
            read_rewards([part], None)
            check_same_scorer([first, part])
        except MissingFile as error:
            if path.is_symlink():  # else a rescoring has just taken its place
                findings.add("rewards", path, error)
        except Unreadable as error:
            findings.add_error(path, error)
        except DatasetError as error:
            findings.add("rewards", path, error)


def failure_problem(failure: Failure, planned: Planned) -> str | None:
    """What a line of failures says that the plan does not."""
    if not 0 <= failure.prompt_index < planned.plan.prompts:
        return f"prompt_index {failure.prompt_index} is not in the plan"
    if (failure.stage == "input") != planned.plan.tombstone[failure.prompt_index]:
        was = "not skipped" if failure.stage == "input" else "skipped"
        return f"stage {failure.stage}, of a prompt that the plan says was {was}"
    return None
