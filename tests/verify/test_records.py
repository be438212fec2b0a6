"""Manifest, journal, plan, retry lists and failures: what can be read is read, what is wrong is said, nothing raises.

Datasets have two shards of six samples; `w0` wrote them.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.rewards import write_rewards
from models.spoilt import Spoil, as_directory, as_file, not_utf8, with_text

from rollgen.config import digest
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import read_manifest, replace_manifest
from rollgen.format.retries import RetryList
from rollgen.format.rewards import ScorerRecord
from rollgen.prompts.plan import Plan, PlanWriter
from rollgen.rollouts import Prompt
from rollgen.verify.dataset import verify_dataset
from rollgen.verify.findings import Findings
from rollgen.verify.records import check_failures, check_journal, check_manifest, check_planned

FIRST, SECOND = "part-w0-000000.parquet", "part-w0-000001.parquet"
JOURNAL = "journal/w0.jsonl"


def said(findings: Findings) -> list[tuple[str, str, str]]:
    return [(finding.file, finding.place, finding.problem) for finding in findings.kept]


def with_manifest(**changes: Any) -> Spoil:
    """A manifest that vouches for itself."""

    def make(directory: Path) -> None:
        manifest = read_manifest(directory)
        if identity := changes.get("identity"):
            changes["config_digest"] = digest(identity)
        replace_manifest(directory, manifest.model_copy(update=changes))

    return make


HOSTILE: dict[str, tuple[Spoil, set[str]]] = {
    "manifest is a directory": (as_directory("rollgen.json"), {"manifest"}),
    "manifest is a list": (with_text("rollgen.json", b"[]"), {"manifest"}),
    "manifest is not UTF-8": (with_text("rollgen.json", b'{"format": "rollgen\xff"}'), {"manifest"}),
    "manifest is nested": (with_text("rollgen.json", b"[" * 10**6), {"manifest"}),
    "manifest is empty": (with_text("rollgen.json", b""), {"manifest"}),
    "manifest says NaN": (
        with_text("rollgen.json", b'{"format": "rollgen", "format_version": "1.1", "sha256": "", "x": NaN}'),
        {"manifest"},
    ),
    "manifest holds half a character": (
        with_text("rollgen.json", b'{"format": "rollgen", "format_version": "1.1", "sha256": "", "x": "\\ud800"}'),
        {"manifest"},
    ),
    "format of another time": (
        with_text("rollgen.json", b'{"format": "rollgen", "format_version": "9"}'),
        {"manifest"},
    ),
    "no vocabulary": (
        with_manifest(vocab_size=0, tokenizer_vocab_size=0),
        {"manifest", "plan", "footer", "ids", "support"},
    ),
    "a huge vocabulary": (with_manifest(vocab_size=2**31 - 1, tokenizer_vocab_size=2**31 - 1), {"footer"}),
    "a vocabulary beyond all types": (with_manifest(vocab_size=10**30), {"manifest"}),
    "no checksums": (with_manifest(page_checksums=False), {"manifest"}),
    "no time": (with_manifest(created_at="yesterday"), {"manifest"}),
    "a time without an offset": (with_manifest(created_at="2026-01-02T03:04:05"), {"manifest"}),
    "support logprobs that are not stored": (with_manifest(support_logprobs=True), {"manifest", "footer"}),
    "another identity": (with_manifest(identity={"capture": "native"}), {"manifest", "foreign"}),
    "plan is a directory": (as_directory("plan.parquet"), {"plan"}),
    "plan is empty": (with_text("plan.parquet", b""), {"plan"}),
    "plan is text": (with_text("plan.parquet", b"no plan" * 100), {"plan"}),
    "plan is not UTF-8": (not_utf8("plan.parquet", "prompt_id"), {"plan"}),
    "plan's prompts are not UTF-8": (not_utf8("plan.parquet", "prompt"), {"plan"}),
    "journal is a file": (as_file("journal"), {"unjournalled"}),
    "a journal is a directory": (as_directory(JOURNAL), {"journal"}),
    "another journal is a directory": (as_directory("journal/w1.jsonl"), {"journal"}),
    "journal is binary": (with_text(JOURNAL, bytes(range(256)) * 10), {"journal"}),
    "journal has numbers beyond all types": (
        with_text(JOURNAL, b'{"file": "part-w0-000000.parquet", "bytes": 1' + b"0" * 5000 + b"}\n"),
        {"journal"},
    ),
    "journal names a path": (
        with_text(
            "journal/w1.jsonl",
            b'{"file":"../../etc/passwd","bytes":1,"sha256":"","footer_sha256":"","rows":1,"tokens":1,"mask_ids":1}\n',
        ),
        {"journal"},
    ),
    "journal has no lines": (with_text(JOURNAL, b""), {"unjournalled"}),
    "failures is a file": (as_file("failures"), set()),
    "failures is binary": (with_text("failures/w0.jsonl", b"\xff\n"), {"failures"}),
    "a failures file is a directory": (as_directory("failures/w0.jsonl"), {"failures"}),
    "a lock is a directory": (as_directory("journal/w1.lock"), set()),
    "quarantine is a file": (as_file("quarantine"), set()),
    "a record is a directory": (as_directory("journal/replacement.json"), {"replacement"}),
}


@pytest.mark.parametrize(("spoil", "kinds"), HOSTILE.values(), ids=HOSTILE)
def test_nothing_raises(directory: Path, spoil: Spoil, kinds: set[str]) -> None:
    """Whatever lies in the directory beside the shards: it is found, or it does not matter."""
    spoil(directory)
    verification = verify_dataset(directory)
    assert set(verification.by_kind) == kinds, verification.findings
    json.dumps(verification.to_json())


UNREADABLE: dict[str, tuple[str, int, set[str]]] = {
    "manifest": ("rollgen.json", 0, {"manifest"}),
    "plan": ("plan.parquet", 0, {"plan"}),
    "journal": (JOURNAL, 0, {"journal"}),
    "lock": ("journal/w0.lock", 0, set()),
    "shard": (f"data/{FIRST}", 0, {"unreadable"}),
    "names of shards": ("data", 0, {"unreadable"}),
    "all shards": ("data", 0o444, {"unreadable"}),
    "names of journals": ("journal", 0, {"journal"}),
    "all journals": ("journal", 0o444, {"journal"}),
    "names of failures": ("failures", 0, {"failures"}),
    "everything": (".", 0o444, {"manifest"}),
}


@pytest.mark.parametrize(("name", "mode", "kinds"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_must_not_be_read_is_said(directory: Path, nobody: Any, name: str, mode: int, kinds: set[str]) -> None:
    """A file hides nothing else. With a directory that is closed, nothing can be told."""
    with tempfile.TemporaryDirectory() as scratch:  # others may not even look into pytest's directories
        Path(scratch).chmod(0o755)
        copy = Path(shutil.copytree(directory, Path(scratch) / "run"))
        (copy / "failures").mkdir()
        (copy / name).chmod(mode)
        with nobody():
            verification = verify_dataset(copy)
        (copy / name).chmod(0o755)
    assert set(verification.by_kind) == kinds, verification.findings


MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "fingerprint": ({"model_fingerprint": "1"}, "identity.model_fingerprint is '1', elsewhere it is '0'"),
    "context": ({"max_model_len": 255}, "identity.max_model_len is 255, elsewhere it is 256"),
    "capture": ({"capture": "native"}, "identity.capture is 'native', elsewhere it is 'logprobs'"),
    "support_logprobs": ({"support_logprobs": True}, "identity.support_logprobs is True, elsewhere it is False"),
    "dtype": ({"dtype": "x" * 1000}, "identity.dtype is 'xxx"),
}


@pytest.mark.parametrize(("identity", "text"), MANIFESTS.values(), ids=MANIFESTS)
def test_what_a_manifest_says_twice(directory: Path, identity: dict[str, Any], text: str) -> None:
    """Must be the same; then the manifest can still be read, and is."""
    with_manifest(identity=read_manifest(directory).identity | identity)(directory)
    findings = Findings(directory)
    manifest = check_manifest(directory, findings)
    ((file, place, problem),) = said(findings)
    assert (file, place) == ("rollgen.json", "")
    assert problem.startswith(text)
    assert len(problem) <= 401
    assert manifest == read_manifest(directory)


def test_the_times_of_a_manifest(directory: Path) -> None:
    """Each is RFC 3339, with an offset."""
    manifest = read_manifest(directory)
    attempts = [manifest.attempts[0], manifest.attempts[0].model_copy(update={"started_at": "2026-01-02"})]
    with_manifest(attempts=attempts, created_at="2026-01-02T03:04:05Z")(directory)
    findings = Findings(directory)
    check_manifest(directory, findings)
    assert said(findings) == [("rollgen.json", "", "attempts.1.started_at is not an RFC 3339 time")]


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / JOURNAL).read_text().splitlines()]


def write_lines(path: Path, lines: Sequence[dict[str, Any] | str]) -> None:
    path.parent.mkdir(exist_ok=True)
    texts = (line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.write_text("".join(texts))


DAMAGED_LINES = {
    "not JSON": '{"file": "part-w0-000000.parquet"\n',
    "blank": "\n",
    "an array": "[]\n",
    "null": "null\n",
    "half a character": '"\\ud800"\n',
    "nested": "[" * 100_000 + "\n",
}


@pytest.mark.parametrize("line", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_a_damaged_journal_line_hides_no_other(directory: Path, line: str) -> None:
    """It is reported with its number; those before and after it count, and so does its writer."""
    first, second = lines_of(directory)
    write_lines(directory / JOURNAL, [first, line, second])
    findings = Findings(directory)
    journal = check_journal(directory, findings)
    assert said(findings) == [(JOURNAL, "line 2", "damaged: not a line of such a file")]
    assert journal.committed.keys() == {FIRST, SECOND}
    assert journal.damaged == {"w0"}


@pytest.mark.parametrize("value", [None, "1", 1.5, True, -1, [], 10**30])
@pytest.mark.parametrize("key", ["file", "bytes", "sha256", "rows", "retired"])
def test_a_journal_line_with_a_value_of_another_type(directory: Path, key: str, value: object) -> None:
    """Texts, counts and truth values are what they are and nothing like them."""
    first, second = lines_of(directory)
    write_lines(directory / JOURNAL, [first, second | {key: value}])
    fits = (key == "sha256" and value == "1") or (key == "retired" and value is True)
    findings = Findings(directory)
    journal = check_journal(directory, findings)
    assert findings.by_kind == ({} if fits else {"journal": 1})
    assert journal.damaged == (frozenset() if fits else {"w0"})


def test_two_lines_for_one_shard(directory: Path) -> None:
    """The same again is harmless, something else is not; the line of a later journal is the one that is reported."""
    first, second = lines_of(directory)
    write_lines(directory / JOURNAL, [first, second, first])
    write_lines(directory / "journal" / "w1.jsonl", [second | {"bytes": 5}])
    findings = Findings(directory)
    assert check_journal(directory, findings).committed[SECOND].bytes == second["bytes"]
    problem = f"{SECOND} has another line, which says something else"
    assert said(findings) == [("journal/w1.jsonl", "line 1", problem)]


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["after", "before"])
def test_a_retirement_is_final(directory: Path, order: slice) -> None:
    """Whichever line comes first, in whichever journal."""
    first, second = lines_of(directory)
    write_lines(directory / JOURNAL, [first, second, second | {"retired": True}][order])
    write_lines(directory / "journal" / "v0.jsonl", [first | {"retired": True}])
    findings = Findings(directory)
    journal = check_journal(directory, findings)
    assert (journal.committed, journal.retired.keys(), findings.total) == ({}, {FIRST, SECOND}, 0)


@pytest.mark.parametrize("key", ["bytes", "sha256", "rows"])
def test_a_retirement_that_is_not_of_the_commit(directory: Path, key: str) -> None:
    """It takes the shard out all the same, but one of the two lines is damaged."""
    first, second = lines_of(directory)
    another = first | {"retired": True} | {key: second[key] if key == "sha256" else first[key] + 1}
    write_lines(directory / JOURNAL, [first, second])
    write_lines(directory / "journal" / "v0.jsonl", [another])
    findings = Findings(directory)
    assert check_journal(directory, findings).committed.keys() == {SECOND}
    problem = f"retires {FIRST}, but is not the line of its commit otherwise"
    assert said(findings) == [("journal/v0.jsonl", "line 1", problem)]


def test_keys_of_a_later_minor_are_ignored(directory: Path) -> None:
    """In lines of journals, and in those of failures."""
    write_lines(directory / JOURNAL, [line | {"new": [1]} for line in lines_of(directory)])
    write_lines(directory / "failures" / "w0.jsonl", [FAILURE | {"new": {}}])
    assert verify_dataset(directory).is_clean


FAILURE = {"prompt_id": "p5", "prompt_index": 5, "sample_index": 0, "stage": "engine", "error": "", "time": ""}
FAILURES: dict[str, tuple[dict[str, Any] | str, str | None]] = {
    "right": (FAILURE, None),
    "of a retry": (FAILURE | {"generation": 1}, None),
    "torn": ('{"prompt_id": "p', None),
    "prompt beyond the plan": (FAILURE | {"prompt_index": 6}, "prompt_index 6 is not in the plan"),
    "another stage": (FAILURE | {"stage": "outer"}, "damaged: not a line of such a file"),
    "no key": ({"prompt_id": "p5"}, "damaged: not a line of such a file"),
    "not JSON": ("x\n", "damaged: not a line of such a file"),
}


@pytest.mark.parametrize(("line", "problem"), FAILURES.values(), ids=FAILURES)
def test_lines_of_failures(directory: Path, line: Any, problem: str | None) -> None:
    """Must be lines, of prompts of the plan if there is one. A torn tail is an interrupted append."""
    write_lines(directory / "failures" / "w0.jsonl", [FAILURE, line])
    findings = Findings(directory)
    check_failures(directory, check_planned(directory, read_manifest(directory), findings), findings)
    assert said(findings) == ([("failures/w0.jsonl", "line 2", problem)] if problem else [])
    without_plan = Findings(directory)
    check_failures(directory, None, without_plan)
    assert without_plan.total == ("damaged" in (problem or ""))


def write_plan(directory: Path, prompts: Sequence[Prompt], group: int) -> None:
    """A plan of row groups of so many prompts, for which the manifest vouches."""
    with PlanWriter(directory / "plan.parquet") as writer:
        for start in range(0, len(prompts), group):
            writer.write(prompts[start : start + group])
    with_manifest(plan_sha256=file_sha256(directory / "plan.parquet"))(directory)


NONE = np.zeros(0, np.int32)
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"token_ids": NONE}, "no prompt tokens, and not skipped"),
    "tokens, though skipped": ({"error": "x"}, "prompt tokens, though skipped"),
    "token below 0": ({"token_ids": np.array([1, -1], np.int32)}, "a prompt token is outside the model's vocabulary"),
    "token outside": (
        {"token_ids": np.array([512], np.int32)},
        "a prompt token is outside the model's vocabulary of 512",
    ),
    "temperature 0": ({"temperature": 0.0}, "temperature is not above 0"),
    "temperature NaN": ({"temperature": math.nan}, "temperature is not above 0"),
    "temperature inf": ({"temperature": math.inf}, "temperature is not above 0"),
    "top_p 0": ({"top_p": 0.0}, "top_p is not in (0, 1]"),
    "top_p NaN": ({"top_p": math.nan}, "top_p is not in (0, 1]"),
    "min_p above 1": ({"min_p": 1.5}, "min_p is not in [0, 1]"),
    "top_k": ({"top_k": -1}, "top_k is below 0"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens is below 1"),
}


@pytest.mark.parametrize("group", [2, 9])
@pytest.mark.parametrize(("change", "problem"), PLANS.values(), ids=PLANS)
def test_rows_of_a_plan(
    directory: Path, make_prompt: Callable[..., Prompt], change: dict[str, Any], problem: str, group: int
) -> None:
    """Each rule by itself, in row 4, whatever row group that is in; the plan is used all the same."""
    prompts = [make_prompt(index, n=2) for index in range(6)]
    own = {name: value for name, value in change.items() if hasattr(prompts[4].sampling, name)}
    rest = {name: value for name, value in change.items() if name not in own}
    prompts[4] = replace(prompts[4], sampling=replace(prompts[4].sampling, **own), **rest)
    write_plan(directory, prompts, group)
    findings = Findings(directory)
    assert check_planned(directory, read_manifest(directory), findings) is not None
    ((file, place, text),) = said(findings)
    assert (file, place) == ("plan.parquet", "row 4")
    assert text.startswith(problem)


@pytest.mark.parametrize("group", [1, 2, 9])
def test_ids_of_a_plan_are_unique(directory: Path, make_prompt: Callable[..., Prompt], group: int) -> None:
    """Also over row groups. The id is cut."""
    prompts = [make_prompt(index, n=2) for index in range(6)]
    prompts[1], prompts[5] = (replace(prompts[index], prompt_id="i" * 200) for index in (1, 5))
    write_plan(directory, prompts, group)
    findings = Findings(directory)
    check_planned(directory, read_manifest(directory), findings)
    assert said(findings) == [("plan.parquet", "", f"prompt_id '{'i' * 80}' is there twice")]


def test_a_plan_that_nothing_vouches_for(directory: Path) -> None:
    """An older writer left no hash."""
    with_manifest(plan_sha256=None)(directory)
    assert verify_dataset(directory).is_clean


@pytest.mark.parametrize("column", ["prompt_id", "prompt", "metadata", "error"])
def test_a_plan_with_texts_that_are_no_text(directory: Path, column: str) -> None:
    """Though pages and manifest vouch for it."""
    not_utf8("plan.parquet", column)(directory)
    with_manifest(plan_sha256=file_sha256(directory / "plan.parquet"))(directory)
    assert verify_dataset(directory).by_kind == {"plan": 1}


def spoil_list(name: str) -> Callable[[Path], None]:
    """What can be wrong with `retry-1.parquet`."""

    def spoil(path: Path) -> None:
        retries = RetryList.read(path.parent, 1)
        if name == "gone":
            path.unlink()
        elif name == "directory":
            path.unlink()
            path.mkdir()
        elif name == "text":
            path.write_text("no list")
        elif name == "plan":
            path.write_bytes((path.parent / "plan.parquet").read_bytes())
        elif name == "other":
            replace(retries, max_tokens=retries.max_tokens + 1).write(path)
        else:
            changes = {"falls": [1, 0], "unplanned": [0, 6]}
            replace(retries, prompt_index=np.array(changes[name])).write(path)

    return spoil


@pytest.mark.parametrize("vouched", [True, False], ids=["hash", "no hash"])
@pytest.mark.parametrize("name", ["gone", "directory", "text", "plan", "other", "falls", "unplanned"])
def test_a_damaged_list_of_a_retry(
    directory: Path, add_retry: Callable[[Path], Path], name: str, vouched: bool
) -> None:
    """Said once, with the file; rows of that retry are stored, and not said to be unplanned."""
    path = add_retry(directory)
    spoil_list(name)(path)
    if not vouched:
        retry = read_manifest(directory).retries[0].model_copy(update={"sha256": None})
        with_manifest(retries=[retry])(directory)
    verification = verify_dataset(directory)
    if name == "other" and not vouched:  # a list like any other, which the rows do not follow
        assert verification.by_kind == {"mismatch": 1}
        return
    (finding,) = verification.findings
    assert (finding.kind, finding.file, finding.place) == ("retries", "retry-1.parquet", "")
    assert not finding.problem.startswith(("retry", "/", ":"))
    assert (verification.rows, verification.samples) != (14, None)
    assert verification.samples is not None
    assert verification.samples.owed == 0


def test_lists_after_a_damaged_one(directory: Path, add_retry: Callable[[Path], Path]) -> None:
    """Are not read: what they may list depends on it."""
    add_retry(directory)
    retries = read_manifest(directory).retries
    again = retries[0].model_copy(update={"generation": 2})
    with_manifest(retries=[*retries, again])(directory)
    findings = Findings(directory)
    planned = check_planned(directory, read_manifest(directory), findings)
    assert planned is not None
    assert [retry.generation for retry in planned.retries] == [1]
    assert [finding.file for finding in findings.kept] == ["retry-2.parquet"]
    assert planned.plan.samples == Plan(directory / "plan.parquet").samples == 12


def test_rewards_of_two_scorers(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """No reader takes the two files together, though each is sound."""
    directory = make_dataset(tmp_path / "run")
    write_rewards(directory, "correct", lambda row: 1.0)
    write_rewards(directory, "correct", lambda row: 2.0, scorer=ScorerRecord("scorers:other", "1" * 64))
    (finding,) = verify_dataset(directory).findings
    assert (finding.kind, finding.file) == ("rewards", "rewards/correct-000001.parquet")
    assert "by scorers:other, the files before it by another scorer" in finding.problem
