"""Merged datasets: what is verified of them beyond what is of any, what is mended, and which rows a model recomputes.

`merged` has the runs `base` and `step-1` of the same six prompts, two samples each, of 8 and 9 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgen.errors import UsageError
from rollgen.format.journal import list_shards
from rollgen.format.manifest import Manifest, ModelRecord, Retry, read_manifest, replace_manifest
from rollgen.verify.dataset import verify_dataset
from rollgen.verify.merged import sampled_by
from rollgen.verify.repair import repair_dataset

RETRY = Retry(generation=1, started_at="2026-01-02T03:04:05+00:00", where={}, max_tokens=9, samples=1)


@pytest.fixture
def edit(merged: Path, rewrite: Callable[..., None]) -> Callable[..., Path]:
    """`edit(**changes)`: the merged dataset, whose first row says something else. Its journal is that of `w0`."""
    (merged / "journal" / "merge.jsonl").rename(merged / "journal" / "w0.jsonl")

    def change(**changes: Any) -> Path:
        rewrite(list_shards(merged)[0], lambda rows: [rows[0] | changes, *rows[1:]])
        return merged

    return change


def test_it_is_clean(merged: Path) -> None:
    """Without a plan, with rows of two models."""
    outcome = verify_dataset(merged)
    assert (outcome.is_clean, outcome.rows, outcome.samples, outcome.notes) == (True, 24, None, ())


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"run": "other"}, "unplanned", "run 'other' is not one of those that the manifest names"),
        ({"run": "step-1"}, "mismatch", "prompt_index is not the number of its run and prompt_id"),
        ({"prompt_id": "p99"}, "mismatch", "prompt_index is not the number of its run and prompt_id"),
        ({"generation": 1}, "unplanned", "of a retry that the manifest, which has 0, does not know"),
    ],
)
def test_rows_that_are_of_no_run(edit: Callable[..., Path], changes: dict[str, Any], kind: str, expected: str) -> None:
    """What a row says of where it is from must fit its number and the manifest."""
    directory = edit(run="base", prompt_index=0) if changes == {"run": "step-1"} else edit(**changes)
    found = verify_dataset(directory)
    assert expected in [finding.problem for finding in found.findings if finding.kind == kind]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"context_length": 8}, r"\d+ tokens, more than the model's context of 8"),
        ({"allow_unreplayable": False}, "replayable is false, the manifest's allow_unreplayable too"),
    ],
)
def test_rows_against_what_their_run_said(
    tmp_path: Path, make_run: Callable[..., Path], said: dict[str, Any], expected: str
) -> None:
    """The context and the settings are those of each run, not of the whole."""
    from rollgen.config import digest
    from rollgen.curate.merge import merge

    changes: dict[str, Any] = {}
    if "context_length" in said:
        model = ModelRecord(name="m", revision=None, fingerprint="m", dtype="float32", context_length=8)
        changes = {"said": {"model": model}}
    else:
        identity = {"seed": 9, **said}
        changes = {"said": {"identity": identity, "config_digest": digest(identity)}, "replayable": False}
    merge([make_run(tmp_path / "a", 0), make_run(tmp_path / "b", 1, **changes)], tmp_path / "out")
    found = verify_dataset(tmp_path / "out")
    [finding] = found.findings
    assert (finding.kind, finding.count) == ("mismatch", 12)
    import re

    assert re.search(expected, finding.problem)


MANIFESTS: dict[str, tuple[Callable[[Manifest], dict[str, Any]], str]] = {
    "an older version": (lambda m: {"format_version": "1.2"}, "there are runs, which format 1.2 has not"),
    "a run twice": (lambda m: {"runs": [m.runs[0], *m.runs]}, "runs: two have the same name"),
    "a name": (
        lambda m: {"runs": [m.runs[0].model_copy(update={"name": "a b"}), m.runs[1]]},
        "runs.0.name is 'a b'",
    ),
    "a digest": (
        lambda m: {"runs": [m.runs[0].model_copy(update={"identity": {}}), m.runs[1]]},
        "runs.0.config_digest is not that of its identity",
    ),
    "a run too few": (lambda m: {"runs": m.runs[:1]}, "identity is not that of a dataset merged from its runs"),
    "a time": (
        lambda m: {"runs": [m.runs[0].model_copy(update={"created_at": "now"}), m.runs[1]]},
        "runs.0.created_at is not an RFC 3339 time",
    ),
    "retries": (lambda m: {"retries": [RETRY]}, "there are retries, though a merged dataset has none of its own"),
}


@pytest.mark.parametrize(("change", "expected"), MANIFESTS.values(), ids=MANIFESTS)
def test_what_the_manifest_says_of_runs(
    merged: Path, change: Callable[[Manifest], dict[str, Any]], expected: str
) -> None:
    """Each contradiction is told."""
    manifest = read_manifest(merged)
    replace_manifest(merged, manifest.model_copy(update=change(manifest)))
    assert expected in [finding.problem for finding in verify_dataset(merged).findings if finding.kind == "manifest"]


def test_samples_that_were_lost(merged: Path) -> None:
    """A shard that is damaged is set aside; nothing is owed, so what was in it is told as a note from then on."""
    with list_shards(merged)[0].open("r+b") as file:
        file.seek(60)
        file.write(b"damage")
    assert verify_dataset(merged).by_kind
    repaired = repair_dataset(merged)
    assert [change.action for change in repaired.changes] == ["quarantined"]
    assert repaired.verification is not None
    assert repaired.verification.is_clean
    [note] = [note for note in repaired.verification.notes if "merged" in note]
    assert note == "samples that were merged and are not here any more: 24; merge again to have them back"


def test_more_samples_of_a_run_than_were_merged(merged: Path) -> None:
    """One run has three too many, the other lacks as many: each is told of for itself."""
    manifest = read_manifest(merged)
    runs = [run.model_copy(update={"samples": count}) for run, count in zip(manifest.runs, (9, 15), strict=True)]
    replace_manifest(merged, manifest.model_copy(update={"runs": runs}))
    found = verify_dataset(merged)
    assert [finding.problem for finding in found.findings] == ["runs.0.samples is 9, but 12 are stored"]
    assert found.notes == ("samples that were merged and are not here any more: 3; merge again to have them back",)


def test_a_lost_line_is_made_again(merged: Path) -> None:
    """By the rule of runs: to `repair` the rows are sound."""
    (merged / "journal" / "merge.jsonl").write_text("")
    repaired = repair_dataset(merged)
    assert [change.action for change in repaired.changes] == ["journalled"]
    assert repaired.is_settled


def test_runs_that_a_model_sampled(merged: Path, tiny_model: Path) -> None:
    """Those of its fingerprint; of other models the runs are named, and so is what differs between several."""
    from rollgen.prompts.fingerprint import directory_fingerprint

    manifest = read_manifest(merged)
    with pytest.raises(
        UsageError, match=r"sampled none of the runs .* base \(model-0, float32\), step-1 \(model-1, fl"
    ):
        sampled_by(manifest, str(tiny_model), flag="--recompute")
    fingerprint = directory_fingerprint(tiny_model)

    def of_tiny(number: int, **changes: Any) -> Any:
        run = manifest.runs[number]
        return run.model_copy(update={"model": run.model.model_copy(update={"fingerprint": fingerprint} | changes)})

    one = manifest.model_copy(update={"runs": [manifest.runs[0], of_tiny(1)]})
    found = sampled_by(one, str(tiny_model), flag="--recompute")
    assert (found.runs, found.manifest) == (("step-1",), one.of_run(one.runs[1]))
    both = manifest.model_copy(update={"runs": [of_tiny(0), of_tiny(1)]})
    found = sampled_by(both, str(tiny_model), flag="--recompute")
    assert (found.runs, len(found.manifest.attempts)) == (("base", "step-1"), 2)
    differ = manifest.model_copy(update={"runs": [of_tiny(0), of_tiny(1, dtype="bfloat16")]})
    with pytest.raises(
        UsageError, match="but with different dtypes or sampling arguments; recompute the datasets that"
    ):
        sampled_by(differ, str(tiny_model), flag="--recompute")
