"""What agrees with itself, checksums and all, and not with what else the dataset says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import read_manifest, replace_manifest
from rollgen.prompts.plan import PlanWriter
from rollgen.rollouts import Prompt
from rollgen.verify.dataset import verify_dataset
from rollgen.verify.rows import is_json_object

FIRST = "data/part-w0-000000.parquet"
RECORD = "journal/replacement.json"


def said(directory: Path) -> list[tuple[str, str]]:
    return [(finding.kind, finding.problem) for finding in verify_dataset(directory).findings]


def seal(directory: Path, **changes: Any) -> None:
    """Change the manifest, all of its hashes right."""
    path = directory / "rollgen.json"
    content = json.loads(path.read_text()) | changes
    content["config_digest"] = digest(content["identity"])
    del content["sha256"]
    path.write_text(json.dumps(content | {"sha256": digest(content)}))


@pytest.mark.parametrize(("allowed", "kinds"), [(False, ["mismatch"]), (True, []), (None, [])])
def test_rows_that_cannot_be_replayed(
    tmp_path: Path, make_dataset: Callable[..., Path], allowed: bool | None, kinds: list[str]
) -> None:
    """Where the configuration refused what makes them so, there are none."""
    directory = make_dataset(tmp_path / "run", shards=1, replayable=False)
    manifest = read_manifest(directory)
    if allowed is not None:
        identity = manifest.identity | {"allow_unreplayable": allowed}
        replace_manifest(
            directory, manifest.model_copy(update={"identity": identity, "config_digest": digest(identity)})
        )
        kinds = ["foreign"]  # the shard has the digest of before
    assert [kind for kind, _ in said(directory)] == kinds


def test_an_unreplayable_row_against_the_manifest(directory: Path, rewrite: Any) -> None:
    """The manifest says that what makes rows unreplayable was refused."""
    manifest = read_manifest(directory)
    identity = manifest.identity | {"allow_unreplayable": False}
    replace_manifest(directory, manifest.model_copy(update={"identity": identity, "config_digest": digest(identity)}))
    footer = {b"rollgen.config_digest": digest(identity).encode()}
    rewrite(directory / FIRST, lambda rows: [rows[0] | {"replayable": False}, *rows[1:]], footer=footer)
    rewrite(directory / "data/part-w0-000001.parquet", footer=footer)
    assert said(directory) == [("mismatch", "replayable is false, the manifest's allow_unreplayable too")]


def test_more_tokens_than_the_context(directory: Path) -> None:
    """Prompt and response were in one context."""
    model = read_manifest(directory).model.model_copy(update={"context_length": 9})
    replace_manifest(directory, read_manifest(directory).model_copy(update={"model": model}))
    (first, *_) = verify_dataset(directory).findings
    assert (first.kind, first.problem) == ("mismatch", "10 tokens, more than the model's context of 9")


@pytest.mark.parametrize("version", ["1.banana", "1", "1.", "1.1.1"])
def test_a_version_that_is_none(directory: Path, version: str) -> None:
    """MAJOR.MINOR."""
    seal(directory, format_version=version)
    assert ("manifest", f"format_version is {version!r}") in said(directory)


def test_a_list_of_retries_that_the_manifest_does_not_know(directory: Path, add_retry: Callable[[Path], Path]) -> None:
    """An older copy of the manifest was put back: the rows accuse it, and the list is noted."""
    before = (directory / "rollgen.json").read_bytes()
    add_retry(directory)
    (directory / "rollgen.json").write_bytes(before)
    verification = verify_dataset(directory)
    assert set(verification.by_kind) == {"unplanned"}
    text = "is not in the manifest: a retry that never began, or the manifest is an older copy"
    assert verification.notes == (f"retry-1.parquet {text}",)


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": -1}, "seed is below 0"),
    "metadata": ({"metadata": "[1]"}, "metadata is no JSON object"),
    "metadata cut": ({"metadata": '{"a": }'}, "metadata is no JSON object"),
}


@pytest.mark.parametrize(("changes", "problem"), PLANS.values(), ids=PLANS)
def test_a_plan_that_could_not_be_made(
    directory: Path, make_prompt: Callable[..., Prompt], changes: dict[str, Any], problem: str
) -> None:
    """Its hash is the manifest's."""
    prompts = [make_prompt(index, n=2) for index in range(6)]
    with PlanWriter(directory / "plan.parquet") as plan:
        plan.write([*prompts[:5], replace(prompts[5], **changes)])
    seal(directory, plan_sha256=file_sha256(directory / "plan.parquet"))
    findings = [one for one in verify_dataset(directory).findings if one.kind == "plan"]
    assert [(one.place, one.problem) for one in findings] == [("row 5", problem)]


@pytest.mark.parametrize(
    ("stage", "problems"), [("input", ["stage input, of a prompt that the plan says was not skipped"]), ("engine", [])]
)
def test_failures_against_the_plan(directory: Path, stage: str, problems: list[str]) -> None:
    """Only a skipped prompt has the stage `input`, and no other."""
    line = {"prompt_id": "p1", "prompt_index": 1, "sample_index": 0, "stage": stage, "error": "", "time": ""}
    (directory / "failures").mkdir(exist_ok=True)
    (directory / "failures/w0.jsonl").write_text(json.dumps(line) + "\n")
    assert [problem for _, problem in said(directory)] == problems


def test_a_skipped_row_without_its_line_is_noted(directory: Path, make_prompt: Callable[..., Prompt]) -> None:
    """Nothing is wrong with a run whose start was interrupted: of rows 6 and 7, one has its line."""
    bad = {"token_ids": np.zeros(0, np.int32), "error": "no prompt"}
    prompts = [make_prompt(index, n=2) for index in range(6)]
    with PlanWriter(directory / "plan.parquet") as plan:
        plan.write([*prompts, *(replace(make_prompt(index, n=2), **bad) for index in (6, 7))])
    seal(directory, plan_sha256=file_sha256(directory / "plan.parquet"))
    FailureLog(directory, "w0").record("p7", 7, 0, "input", "no prompt")
    verification = verify_dataset(directory)
    assert verification.is_clean
    assert verification.notes == ("skipped input rows without a line in failures/, which --resume adds: 1",)


def test_json_is_parsed_up_to_a_size() -> None:
    """Of what would take gigabytes as objects, the braces are looked at."""
    assert is_json_object(' {"a": 1} ')
    assert not is_json_object('{"a": 1')
    assert not is_json_object('{"a": [}')
    text = '{"a": [' + "{}," * 2_000_000 + "}"  # 6 MB, and not JSON
    assert is_json_object(text)


def test_large_metadata_is_looked_at_one_by_one(directory: Path, rewrite: Any) -> None:
    """All rows have their own: memory holds one of them as objects."""
    rewrite(directory / FIRST, lambda rows: [row | {"metadata": f'{{"{n}": 1}}'} for n, row in enumerate(rows)])
    before = pa.total_allocated_bytes()
    assert {kind for kind, _ in said(directory)} == {"mismatch"}
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_live_replacement_is_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who replaces shards needs an instant for it, and holds a lock; one that is dead is not waited for."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            (directory / RECORD).unlink()

    monkeypatch.setattr("rollgen.verify.dataset.time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    (directory / RECORD).write_text("{}")
    assert [kind for kind, _ in said(directory)] == ["replacement"]
    with WriterSlot(directory, "other", afresh=True):
        assert verify_dataset(directory).is_clean
    assert len(slept) == 3
