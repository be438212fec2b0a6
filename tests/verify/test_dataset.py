"""`verify_dataset`: each damage is found where it is, alone, and what is right is clean.

Datasets have two shards of six samples, three prompts each, of eight tokens; `w0` wrote them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import file_sha256, list_shards
from rollgen.format.manifest import PLANLESS, Manifest, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion
from rollgen.verify.dataset import SampleCounts, Verification, verify_dataset
from rollgen.verify.findings import KEPT_PER_KIND, Kind

GOLDEN = Path(__file__).parents[2] / "schema" / "conformance" / "golden"
Rows = list[dict[str, Any]]
Found = tuple[str, str, str, int]
"""Kind, file, place and count."""
FIRST, SECOND = "data/part-w0-000000.parquet", "data/part-w0-000001.parquet"
JOURNAL = "journal/w0.jsonl"


def found(verification: Verification) -> list[Found]:
    assert verification.total == sum(verification.by_kind.values())
    return [(finding.kind, finding.file, finding.place, finding.count) for finding in verification.findings]


def flip(path: Path, position: int) -> None:
    """One bit; from the end of the file if negative."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_line(path: Path, number: int) -> str:
    lines = path.read_text().splitlines(keepends=True)
    line = lines.pop(number)
    path.write_text("".join(lines))
    return line


class Damage:
    """What can be done to a dataset: every method does one thing, and says what must be found."""

    def __init__(self, directory: Path, rewrite: Any, set_line: Any, add_retry: Any, make_dataset: Any = None) -> None:
        self.directory = directory
        self.rewrite, self.set_line, self.add_retry, self.make_dataset = rewrite, set_line, add_retry, make_dataset
        self.first, self.second = directory / FIRST, directory / SECOND
        self.journal = directory / JOURNAL

    def _change_row(self, **changes: Any) -> None:
        """In the last of three row groups of two rows: its second row, (p2, 1)."""

        def edit(rows: Rows) -> Rows:
            return [*rows[:5], rows[5] | changes]

        self.rewrite(self.first, edit, rows_a_group=2)

    def manifest(self) -> list[Found]:
        change_json(self.directory / "rollgen.json", created_at="2027-01-01T00:00:00Z")
        return [("manifest", "rollgen.json", "", 1)]

    def plan(self) -> list[Found]:
        (self.directory / "plan.parquet").unlink()
        return [("plan", "plan.parquet", "", 1)]

    def retries(self) -> list[Found]:
        path = self.add_retry(self.directory)
        path.unlink()
        return [("retries", "retry-1.parquet", "", 1)]

    def journal_line(self) -> list[Found]:
        lines = self.journal.read_text().splitlines(keepends=True)
        self.journal.write_text(lines[0].replace('"bytes"', '"bites"') + lines[1])
        return [("journal", JOURNAL, "line 1", 1)]

    def failures(self) -> list[Found]:
        path = self.directory / "failures" / "w0.jsonl"
        path.parent.mkdir()
        path.write_text("{}\n")
        return [("failures", "failures/w0.jsonl", "line 1", 1)]

    def replacement(self) -> list[Found]:
        (self.directory / "journal" / "replacement.json").write_text("{}")
        return [("replacement", "journal/replacement.json", "", 1)]

    def missing(self) -> list[Found]:
        self.second.unlink()
        return [("missing", SECOND, "", 1)]

    def unjournalled(self) -> list[Found]:
        drop_line(self.journal, 1)
        return [("unjournalled", SECOND, "", 1)]

    def bytes(self) -> list[Found]:
        """A page that cannot be told from data is in front of the footer, which still says where the others are."""
        self.first.write_bytes(self.first.read_bytes() + b"PAR1")
        return [("bytes", FIRST, "", 1), ("damaged", FIRST, "", 1)]

    def sha256(self) -> list[Found]:
        self.rewrite(self.first, rows_a_group=2)
        with pq.ParquetFile(self.first) as file:
            chunk = file.metadata.row_group(1).column(3)
        flip(self.first, chunk.data_page_offset + chunk.total_compressed_size - 1)
        return [("sha256", FIRST, "", 1), ("damaged", FIRST, "row group 1", 1)]

    def footer(self) -> list[Found]:
        self.set_line(self.first, footer_sha256="0" * 64)
        return [("footer", FIRST, "", 1)]

    def damaged(self) -> list[Found]:
        """The journal vouches for it: it was committed so."""
        self.sha256()
        self.set_line(self.first, **_hashes(self.first))
        return [("damaged", FIRST, "row group 1", 1)]

    def foreign(self) -> list[Found]:
        self.rewrite(self.first, footer={b"rollgen.config_digest": b"0" * 64})
        return [("foreign", FIRST, "", 1)]

    def counts(self) -> list[Found]:
        self.set_line(self.first, tokens=47)
        return [("counts", FIRST, "", 1)]

    def order(self) -> list[Found]:
        """Six rows fall five times, from the first to the second and so on."""
        self.rewrite(self.first, lambda rows: rows[::-1], rows_a_group=2)
        return [("order", FIRST, "row group 0, row 1", 5)]

    def duplicate(self) -> list[Found]:
        self.rewrite(self.first, lambda rows: [*rows, rows[5], rows[5]], rows_a_group=2)
        return [("duplicate", FIRST, "row group 3, row 0", 2)]

    def unplanned(self) -> list[Found]:
        self._change_row(sample_index=2)
        return [("unplanned", FIRST, "row group 2, row 1 (p2, 2)", 1)]

    def seed(self) -> list[Found]:
        self._change_row(seed=5)
        return [("seed", FIRST, "row group 2, row 1 (p2, 1)", 1)]

    def mismatch(self) -> list[Found]:
        self._change_row(prompt="another")
        return [("mismatch", FIRST, "row group 2, row 1 (p2, 1)", 1)]

    def lengths(self) -> list[Found]:
        self._change_row(response_length=9)
        return [("lengths", FIRST, "row group 2, row 1 (p2, 1)", 1)]

    def sampling(self) -> list[Found]:
        self._change_row(stop_reason="eos")
        return [("sampling", FIRST, "row group 2, row 1 (p2, 1)", 1)]

    def ids(self) -> list[Found]:
        """Of the prompt, which is then not that of the plan either: two things are wrong."""
        self._change_row(prompt_token_ids=[512, 1, 2])
        return [("ids", FIRST, PLACE, 1), ("mismatch", FIRST, PLACE, 1)]

    def support(self) -> list[Found]:
        self._change_row(sampling_mask=[[]] * 8)
        return [("support", FIRST, f"{PLACE}, token 0", 8)]

    def logprobs(self) -> list[Found]:
        self._change_row(logprobs=[math.nan] * 8)
        return [("logprobs", FIRST, f"{PLACE}, token 0", 8)]

    def extras(self) -> list[Found]:
        """A dataset with weights and experts, of which nothing else is found."""
        shutil.rmtree(self.directory)
        self.make_dataset(self.directory, extras=True)
        self._change_row(weight_version_starts=[1, 3, 6])
        return [("extras", FIRST, PLACE, 1)]

    def rewards(self) -> list[Found]:
        (self.directory / "rewards").mkdir()
        (self.directory / "rewards" / "a-000000.parquet").touch()
        return [("rewards", "rewards/a-000000.parquet", "", 1)]


PLACE = "row group 2, row 1 (p2, 1)"
DAMAGES = [name for name in vars(Damage) if not name.startswith("_")]


def _hashes(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_kind_is_found_alone(
    directory: Path, rewrite: Any, set_line: Any, add_retry: Any, make_dataset: Any, name: str
) -> None:
    """At its place, and nothing follows from it that is not wrong itself. The findings have one line each."""
    expected = getattr(Damage(directory, rewrite, set_line, add_retry, make_dataset), name)()
    verification = verify_dataset(directory)
    assert found(verification) == expected
    assert not verification.is_clean
    for finding in verification.findings:
        assert finding.problem
        assert "\n" not in finding.problem
        assert str(directory) not in finding.problem


def test_there_is_a_test_of_every_kind() -> None:
    """But for `recompute`, which needs a model, and `unreadable`, which needs a file that may not be read."""
    kinds = {name.removesuffix("_line") for name in DAMAGES}
    assert kinds == set(get_args(Kind)) - {"recompute", "unreadable"}


def test_a_sound_dataset_is_clean(directory: Path) -> None:
    """And what it holds is counted: 2 shards of 3 prompts, 2 samples each, of 8 tokens."""
    verification = verify_dataset(directory)
    assert verification == Verification(
        shards=2,
        bytes=sum(path.stat().st_size for path in list_shards(directory)),
        rows=12,
        tokens=96,
        mask_ids=verification.mask_ids,
        samples=SampleCounts(planned=12, stored=12, owed=0, skipped=0),
    )
    lines = [json.loads(line) for line in (directory / JOURNAL).read_text().splitlines()]
    assert verification.mask_ids == sum(line["mask_ids"] for line in lines)
    assert verification.is_clean


@pytest.mark.parametrize("name", ["masks", "support_logprobs", "generations", "extras"])
def test_golden_datasets_are_clean(name: str) -> None:
    """Two of them in format 1.0. Nothing is changed."""
    before = _snapshot(GOLDEN / name)
    verification = verify_dataset(GOLDEN / name)
    assert found(verification) == []
    assert verification.samples is not None
    assert (verification.samples.owed, verification.samples.skipped) == (1, 1)
    assert _snapshot(GOLDEN / name) == before


def _snapshot(directory: Path) -> dict[Path, tuple[int, int]]:
    stats = {path: path.stat() for path in sorted(directory.rglob("*"))}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.parametrize("support_logprobs", [False, True])
@pytest.mark.parametrize("full", [False, True], ids=["truncated", "untruncated"])
def test_other_datasets_are_clean(
    tmp_path: Path, make_dataset: Callable[..., Path], rewrite: Any, support_logprobs: bool, full: bool
) -> None:
    """With support logprobs and without supports."""
    directory = make_dataset(tmp_path / "run", support_logprobs=support_logprobs, full=full)
    assert verify_dataset(directory).is_clean


def test_an_empty_dataset_is_clean(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """All is owed. There is not even a journal."""
    directory = make_dataset(tmp_path / "run")
    for name in ("data", "journal"):
        shutil.rmtree(directory / name)
    verification = verify_dataset(directory)
    assert found(verification) == []
    assert (verification.shards, verification.rows, verification.samples) == (0, 0, SampleCounts(12, 0, 12, 0))


def test_retried_samples_are_counted(directory: Path, add_retry: Callable[[Path], Path]) -> None:
    """Two are made again: planned once more, stored once more."""
    add_retry(directory)
    verification = verify_dataset(directory)
    assert found(verification) == []
    assert verification.samples == SampleCounts(planned=14, stored=14, owed=0, skipped=0)


def test_the_path_may_be_written_in_any_way(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slash, relative, with dots, through a link; files are named relative to it."""
    (directory / SECOND).unlink()
    link = directory.parent / "link"
    link.symlink_to(directory)
    monkeypatch.chdir(directory)
    for path in (Path(f"{directory}/"), Path(), Path("../run"), Path("data/.."), link, directory / "." / "data" / ".."):
        assert found(verify_dataset(path)) == [("missing", SECOND, "", 1)]


def test_findings_are_bounded(directory: Path) -> None:
    """A journal of a thousand damaged lines, and shards of which most are not there: 20 of each kind are kept."""
    line = json.loads((directory / JOURNAL).read_text().splitlines()[0])
    gone = (json.dumps(line | {"file": f"part-w0-{number:06d}.parquet"}) + "\n" for number in range(100, 130))
    with (directory / JOURNAL).open("a") as file:
        file.writelines(["nonsense\n"] * 1000)
        file.writelines(gone)
    verification = verify_dataset(directory)
    assert verification.by_kind == {"journal": 1000, "missing": 30}
    assert [finding.kind for finding in verification.findings] == ["journal"] * KEPT_PER_KIND + ["missing"] * 20
    assert verification.total == 1030
    assert verification.findings[0].place == "line 3"


def test_problems_are_cut(directory: Path, rewrite: Any) -> None:
    """What quotes the data is short, however long the data are."""
    rewrite(directory / FIRST, lambda rows: [rows[0] | {"prompt_id": "x" * 10**6, "metadata": "y" * 10**6}, *rows[1:]])
    for finding in verify_dataset(directory).findings:
        assert len(finding.problem) <= 401
        assert len(finding.place) <= 120


def test_damage_hides_nothing_else(directory: Path, rewrite: Any) -> None:
    """Without manifest, bytes are still checked; with a damaged row group, the rows of the others."""
    damage = Damage(directory, rewrite, None, None)
    damage._change_row(temperature=math.inf)
    with pq.ParquetFile(damage.first) as file:
        offset = file.metadata.row_group(0).column(0).data_page_offset
    flip(damage.first, offset + 40)
    kinds = ["sha256", "damaged", "sampling", "mismatch"]
    assert [finding.kind for finding in verify_dataset(directory).findings] == kinds
    (directory / "rollgen.json").unlink()
    verification = verify_dataset(directory)
    assert [finding.kind for finding in verification.findings] == ["manifest", "sha256"]
    assert (verification.shards, verification.rows) == (2, 0)


def test_places_count_rows_that_cannot_be_read(directory: Path, rewrite: Any) -> None:
    """The order is that of the file although the first row group of it is damaged."""
    rewrite(directory / FIRST, lambda rows: [*rows[:4], rows[5], rows[4]], rows_a_group=2)
    with pq.ParquetFile(directory / FIRST) as file:
        flip(directory / FIRST, file.metadata.row_group(0).column(0).data_page_offset + 40)
    assert found(verify_dataset(directory))[1:] == [
        ("damaged", FIRST, "row group 0", 1),
        ("order", FIRST, "row group 2, row 1", 1),
    ]


def test_a_key_in_two_shards(directory: Path, rewrite: Any, set_line: Any) -> None:
    """Reported for the later one, with the name of the other; the retried sample of the same number is another key."""
    with pq.ParquetFile(directory / FIRST) as file:
        row = file.read().to_pylist()[0]
    rewrite(directory / SECOND, lambda rows: [row, *rows, rows[-1]])
    verification = verify_dataset(directory)
    assert found(verification) == [("duplicate", SECOND, "row group 0, row 0", 2)]
    assert verification.findings[0].problem == "prompt 0, sample 0 is in part-w0-000000.parquet too"
    assert verification.samples == SampleCounts(12, 12, 0, 0)


def test_a_copy_under_another_name(directory: Path) -> None:
    """No line knows it, and every sample is there twice."""
    shutil.copy(directory / FIRST, directory / "data" / "part-w1-000000.parquet")
    copy = "data/part-w1-000000.parquet"
    assert found(verify_dataset(directory)) == [
        ("unjournalled", copy, "", 1),
        ("duplicate", copy, "row group 0, row 0", 6),
    ]


@pytest.mark.parametrize("generation", [1, 2**31 - 1])
def test_a_retry_that_the_manifest_does_not_know(directory: Path, rewrite: Any, generation: int) -> None:
    """Said once."""
    rewrite(directory / FIRST, lambda rows: [*rows[:5], rows[5] | {"generation": generation}])
    verification = verify_dataset(directory)
    assert found(verification) == [("unplanned", FIRST, "row group 0, row 5 (p2, 1)", 1)]
    assert verification.findings[0].problem == "of a retry that the manifest, which has 0, does not know"


@pytest.mark.parametrize("damage", ["gone", "flipped", "another"])
def test_rows_of_a_damaged_plan_are_not_compared(directory: Path, make_dataset: Any, damage: str) -> None:
    """Neither with what is left of it nor as if there were to be none."""
    plan = directory / "plan.parquet"
    if damage == "another":
        shutil.copy(make_dataset(directory.parent / "other", prompts=5) / "plan.parquet", plan)
    elif damage == "flipped":
        flip(plan, 30)
    else:
        plan.unlink()
    verification = verify_dataset(directory)
    assert verification.by_kind == {"plan": 2 if damage == "flipped" else 1}  # its hash, and that it cannot be read
    assert (verification.rows, verification.samples is None) == (12, damage != "another")


def store_planless(directory: Path, make_manifest: Callable[..., Manifest], rows: list[Completion]) -> None:
    identity = {PLANLESS: True}
    directory.mkdir()
    manifest = make_manifest(identity=identity, config_digest=digest(identity))
    create_manifest(directory, manifest)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for row in rows:
            writer.add(row)


def test_a_dataset_without_a_plan(tmp_path: Path, make_manifest: Any, make_completion: Any) -> None:
    """Numbers derive from ids, nothing is owed; a plan must not be there."""
    number = 7299139317422481125  # of the id `a`: section 4 of the specification
    rows = [replace(make_completion(0, k, tokens=3), prompt_id="a", prompt_index=number) for k in range(2)]
    wrong = replace(rows[1], prompt_id="b", prompt_index=5)
    store_planless(tmp_path / "right", make_manifest, rows)
    verification = verify_dataset(tmp_path / "right")
    assert (found(verification), verification.samples, verification.rows) == ([], None, 2)
    store_planless(tmp_path / "wrong", make_manifest, [*rows, wrong])
    (tmp_path / "wrong" / "plan.parquet").touch()
    assert found(verify_dataset(tmp_path / "wrong")) == [
        ("plan", "plan.parquet", "", 1),
        ("mismatch", FIRST, "row group 0, row 0 (b, 1)", 1),
    ]


def test_what_lies_beside_shards_is_noted(directory: Path) -> None:
    """Temporary, foreign, retired and quarantined files are no part of the dataset."""
    data = directory / "data"
    (data / ".tmp-w0-000002").touch()
    (data / "part-w0-1.parquet").touch()
    (data / "notes.txt").touch()
    line = json.loads((directory / JOURNAL).read_text().splitlines()[0])
    retired = line | {"file": "part-w0-000007.parquet", "retired": True}
    (directory / JOURNAL).write_text((directory / JOURNAL).read_text() + json.dumps(retired) + "\n")
    (data / "part-w0-000007.parquet").write_text("anything")
    (directory / "quarantine").mkdir()
    (directory / "quarantine" / "part-w0-000009.parquet").touch()
    verification = verify_dataset(directory)
    assert found(verification) == []
    assert verification.notes == (
        "temporary files of commits that go on or were interrupted: 1",
        "files in data/ that were retired and are not part of the dataset: 1",
        "other files in data/, which are not part of the dataset: 2",
        "files in quarantine/: 1",
    )


def test_a_shard_without_its_line_is_checked(directory: Path, rewrite: Any) -> None:
    """All but its bytes; of a live writer that is no finding, nor when its line may be a damaged one."""
    rewrite(directory / SECOND, lambda rows: [rows[0] | {"seed": 1}, *rows[1:]])
    line = drop_line(directory / JOURNAL, 1)
    seed = ("seed", SECOND, "row group 0, row 0 (p3, 0)", 1)
    assert found(verify_dataset(directory)) == [("unjournalled", SECOND, "", 1), seed]
    with WriterSlot(directory, "w0"):
        verification = verify_dataset(directory)
        assert found(verification) == [seed]
        note = "shards whose writers are alive and have yet to write their journal lines: 1"
        assert verification.notes == (note,)
    with (directory / JOURNAL).open("a") as file:
        file.write("{" + line)
    verification = verify_dataset(directory)
    assert found(verification) == [("journal", JOURNAL, "line 2", 1), seed]
    note = "shards without a journal line, unless it is one that cannot be read: 1"
    assert verification.notes == (note,)


def test_an_interrupted_append_is_no_line(directory: Path) -> None:
    """A torn tail counts for nothing: what it was about has no line."""
    path = directory / JOURNAL
    path.write_bytes(path.read_bytes()[:-1])
    assert found(verify_dataset(directory)) == [("unjournalled", SECOND, "", 1)]


def test_progress_counts_bytes(directory: Path) -> None:
    """Rises to the bytes of all shards."""
    calls: list[tuple[int, int]] = []
    verify_dataset(directory, progress=lambda done, whole: calls.append((done, whole)))
    sizes = [path.stat().st_size for path in list_shards(directory)]
    assert calls == [(sizes[0], sum(sizes)), (sum(sizes), sum(sizes))]


def test_a_directory_that_is_no_dataset(tmp_path: Path) -> None:
    """Empty, or not there: it has no manifest."""
    for directory in (tmp_path, tmp_path / "nothing"):
        assert found(verify_dataset(directory)) == [("manifest", "rollgen.json", "", 1)]


def test_json(directory: Path) -> None:
    """Plain values, and all of them."""
    drop_line(directory / JOURNAL, 1)
    values = json.loads(json.dumps(verify_dataset(directory).to_json()))
    assert values["clean"] is False
    assert values["findings_total"] == 1
    assert values["by_kind"] == {"unjournalled": 1}
    assert values["samples"] == {"planned": 12, "stored": 12, "owed": 0, "skipped": 0}
    (finding,) = values["findings"]
    assert finding.keys() == {"kind", "file", "place", "problem", "count"}
    assert (finding["kind"], finding["file"]) == ("unjournalled", SECOND)
    assert values.keys() == {
        *("clean", "findings_total", "findings", "by_kind", "notes", "shards", "bytes"),
        *("rows", "tokens", "mask_ids", "samples"),
    }


def test_a_problem_of_the_whole(directory: Path) -> None:
    """That the model gives other log-probabilities is a finding like any other; no problem is none."""
    verification = verify_dataset(directory)
    assert verification.with_problem("recompute", None) is verification
    worse = verification.with_problem("recompute", "does not replay")
    assert (found(worse), worse.by_kind, worse.is_clean) == ([("recompute", ".", "", 1)], {"recompute": 1}, False)
    assert verification.is_clean
