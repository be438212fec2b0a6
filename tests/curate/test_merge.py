"""Merging: every current row of every source is there, says where it is from, and nothing of a merge counts half-way.

Runs are those of `make_run`: six prompts p0 to p5 in two shards, two samples each, of 8 tokens and one more for each
number of the run.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.deaths import contents
from models.disk import largest_file
from models.runs import Runs

from rollgen.config import digest
from rollgen.curate.compact import compact
from rollgen.curate.merge import Merged, MergedRun, merge
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards, read_journal
from rollgen.format.manifest import PLANLESS, Manifest, ModelRecord, Retry, read_manifest
from rollgen.format.reader import open_dataset, verify_shard
from rollgen.format.schema import FOOTER_ENGINE
from rollgen.prompts.single import id_number
from rollgen.rollout_writer import RolloutWriter
from rollgen.rollouts import Completion
from rollgen.verify.dataset import verify_dataset

MakeRun = Callable[..., Path]
MakeCompletion = Callable[..., Completion]
MakeManifest = Callable[..., Manifest]
ReadShards = Callable[[Path], dict[str, list[dict[str, Any]]]]
RETRY = Retry(generation=1, started_at="2026-01-02T03:04:05+00:00", where={}, max_tokens=64, samples=1)
CHANGED = ("run", "prompt_index", "generation")


def number_of(run: str, prompt_id: str) -> int:
    """As section 15 of the specification says."""
    return int.from_bytes(hashlib.sha256(f"{run}\n{prompt_id}".encode()).digest()[:8], "big") >> 1


def all_rows(directory: Path, read_shards: ReadShards) -> list[dict[str, Any]]:
    return [row for rows in read_shards(directory).values() for row in rows]


def kept(rows: list[dict[str, Any]]) -> Counter[str]:
    """What a merge does not change."""
    return Counter(repr({name: value for name, value in row.items() if name not in CHANGED}) for row in rows)


@pytest.fixture
def two(tmp_path: Path, make_run: MakeRun) -> list[Path]:
    """The runs `base` and `step-1`."""
    return [make_run(tmp_path / name, number) for number, name in enumerate(("base", "step-1"))]


def test_rows_stay_and_say_where_they_are_from(two: list[Path], tmp_path: Path, read_shards: ReadShards) -> None:
    """Both runs have the same ids: their prompts stay apart. 12 samples of 8 tokens and 12 of 9."""
    before = {path.name: all_rows(path, read_shards) for path in two}
    done = merge(two, tmp_path / "out")
    after = read_shards(tmp_path / "out")
    assert done == Merged(
        runs=(MergedRun("base", "model-0", 12, 96, 0, 0, 0), MergedRun("step-1", "model-1", 12, 108, 0, 0, 0)),
        samples=24,
        tokens=204,
        superseded=0,
        owed=0,
        dropped=(),
        shards=1,
        bytes=list_shards(tmp_path / "out")[0].stat().st_size,
        rewards=(),
        rewards_left=(),
        notes=(),
    )
    [rows] = after.values()
    for name, old in before.items():
        assert kept([row for row in rows if row["run"] == name]) == kept(old)
    assert all(row["prompt_index"] == number_of(row["run"], row["prompt_id"]) for row in rows)
    assert {row["generation"] for row in rows} == {0}
    keys = [(row["prompt_index"], row["sample_index"]) for row in rows]
    assert keys == sorted(set(keys))
    assert verify_dataset(tmp_path / "out").is_clean


Row = tuple[int, int, int, int, int, bool]
"""(prompt, sample, generation, shard, tokens, not truncated)"""
some_rows = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(0, 2), st.integers(0, 1), st.integers(0, 3), st.integers(1, 9), st.booleans()
    ),
    unique_by=lambda row: row[:3],
    max_size=20,
)


@settings(max_examples=15)
@given(st.lists(some_rows, min_size=2, max_size=3).filter(any), st.integers(1, 60), st.booleans())
def test_any_rows(
    make_manifest: MakeManifest,
    make_completion: MakeCompletion,
    store: Callable[..., Path],
    read_shards: ReadShards,
    sources: list[list[Row]],
    shard_tokens: int,
    extras: bool,
) -> None:
    """Of groups over several shards, samples made again, null masks, empty datasets, row groups of 10 tokens."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 10)
        patch.setattr("rollgen.curate.copying.CACHE_BYTES", 4000)  # one or two row groups
        directories, wanted = [], Counter[str]()
        for number, rows in enumerate(sources):
            identity = {PLANLESS: True, "seed": number}
            manifest = make_manifest(extras=extras, identity=identity, config_digest=digest(identity))
            shards: list[list[Completion]] = [[] for _ in range(4)]
            for prompt, sample, generation, shard, tokens, full in rows:
                made = make_completion(prompt, sample, tokens=tokens, full=full, extras=extras, generation=generation)
                shards[shard].append(replace(made, prompt_index=id_number(made.prompt_id)))
            directories.append(store(Path(name) / f"run-{number}", manifest.with_retry(RETRY), shards))
            current = {
                (f"p{prompt}", sample): max(row[2] for row in rows if row[:2] == (prompt, sample))
                for prompt, sample, *_ in rows
            }
            stored = all_rows(directories[-1], read_shards)
            wanted += kept(
                [row for row in stored if current[row["prompt_id"], row["sample_index"]] == row["generation"]]
            )
        done = merge(directories, Path(name) / "out", shard_tokens=shard_tokens)
        after = read_shards(Path(name) / "out")
        merged = [row for rows in after.values() for row in rows]
        assert kept(merged) == wanted
        assert all(row["prompt_index"] == number_of(row["run"], row["prompt_id"]) for row in merged)
        assert (done.samples, done.shards) == (len(merged), len(after))
        assert done.superseded == sum(map(len, sources)) - len(merged)
        homes = Counter(prompt for rows in after.values() for prompt in {row["prompt_index"] for row in rows})
        assert set(homes.values()) == {1}, "a prompt is in several shards"
        for stored in open_dataset(Path(name) / "out").shards:
            verify_shard(stored.path, line=stored.line, config_digest=stored.config_digest)
            rows_of_shard = after[stored.path.name]
            keys = [(row["prompt_index"], row["sample_index"]) for row in rows_of_shard]
            assert keys == sorted(keys)
            assert stored.line is not None
            assert stored.line.tokens == sum(row["response_length"] for row in rows_of_shard)
            assert stored.line.mask_ids == sum(len(ids or ()) for row in rows_of_shard for ids in row["sampling_mask"])


def test_the_manifest_keeps_what_each_run_was(two: list[Path], tmp_path: Path) -> None:
    """All of it: what `of_run` gives is the run's own manifest. The whole has no plan, and no attempts."""
    merge(two, tmp_path / "out")
    merged = read_manifest(tmp_path / "out")
    assert [merged.of_run(run) for run in merged.runs] == [read_manifest(path) for path in two]
    assert merged.identity == {
        "planless": True,
        "runs": [{"name": path.name, "config_digest": read_manifest(path).config_digest} for path in two],
    }
    assert (merged.attempts, merged.retries, merged.plan_sha256, merged.format_version) == ([], [], None, "1.3")
    assert merged.model == ModelRecord(
        name="model-0 + model-1", revision=None, fingerprint=digest(["0", "1"]), dtype="float32", context_length=256
    )


MODELS = {
    "the same": ({}, {}, ("model-0", None, "0", "float32", 256)),
    "the same, set up otherwise": (
        {"revision": "abc"},
        {"revision": "abc", "dtype": "bfloat16", "context_length": 512},
        ("model-0", "abc", "0", "mixed", 512),
    ),
    "the same under another name": ({}, {"name": "copy"}, ("model-0", None, "0", "float32", 256)),
    "two of one name": (
        {},
        {"fingerprint": "1", "revision": "abc"},
        ("model-0 + model-0", None, digest(["0", "1"]), "float32", 256),
    ),
}


@pytest.mark.parametrize(("one", "other", "expected"), MODELS.values(), ids=MODELS)
def test_the_record_of_the_models(
    tmp_path: Path, make_run: MakeRun, one: dict[str, Any], other: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """One model where the fingerprint is one; what differs is mixed, the longest, or told by name."""
    sources = []
    for number, changes in enumerate((one, other)):
        record = {"name": "model-0", "revision": None, "fingerprint": "0", "dtype": "float32", "context_length": 256}
        model = ModelRecord(**record | changes)
        sources.append(make_run(tmp_path / f"run-{number}", number, said={"model": model}))
    merge(sources, tmp_path / "out")
    name, revision, fingerprint, dtype, context = expected
    assert read_manifest(tmp_path / "out").model == ModelRecord(
        name=name, revision=revision, fingerprint=fingerprint, dtype=dtype, context_length=context
    )


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        (("native", "native"), "native"),
        (("native", "none"), "native"),
        (("logprobs", "none"), "logprobs"),
        (("native", "logprobs"), "logprobs"),
        (("none", "none"), "none"),
    ],
)
def test_capture_is_one_that_older_readers_know(
    tmp_path: Path, make_run: MakeRun, ways: tuple[str, str], expected: str
) -> None:
    """Of those that truncate; where it differs, the one that claims less."""
    sources = [make_run(tmp_path / str(n), n, full=way == "none", said={"capture": way}) for n, way in enumerate(ways)]
    merge(sources, tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest.capture == expected
    assert tuple(run.capture for run in manifest.runs) == ways


def test_shards_are_closed_at_their_size(two: list[Path], tmp_path: Path, read_shards: ReadShards) -> None:
    """Prompts of 16 and 18 tokens: two of them are 32 or more, three shards of each run; the samples stay together."""
    assert merge(two, tmp_path / "out", shard_tokens=32).shards == 6
    shards = read_shards(tmp_path / "out")
    assert [sum(row["response_length"] for row in rows) for rows in shards.values()] == [32, 32, 32, 36, 36, 36]
    assert list(shards) == [f"part-merge-{number:06d}.parquet" for number in range(6)]


def test_a_shard_is_made_of_what_fits_into_the_cache(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows lie anywhere in the old row groups: more of these would be decoded again and again."""
    monkeypatch.setattr("rollgen.curate.merge.CACHE_BYTES", 1)
    assert merge(two, tmp_path / "out").shards == 12


def test_footers_name_the_engines_of_their_rows(tmp_path: Path, make_run: MakeRun) -> None:
    """Of a shard of one run its engine, of one of both each once."""
    sources = []
    for number in range(2):
        manifest = read_manifest(make_run(tmp_path / "other", 0))
        engine = manifest.attempts[0].engine.model_copy(update={"version": str(number)})
        attempts = [manifest.attempts[0].model_copy(update={"engine": engine})]
        shutil.rmtree(tmp_path / "other")
        sources.append(make_run(tmp_path / str(number), number, said={"attempts": attempts}))

    def engines(**options: int) -> list[bytes]:
        merge(sources, tmp_path / "out", clean=True, **options)
        return [pq.read_metadata(path).metadata[FOOTER_ENGINE] for path in list_shards(tmp_path / "out")]

    assert engines() == [b"fake 0, fake 1"]
    assert engines(shard_tokens=96) == [b"fake 0", b"fake 1"]


def test_superseded_and_owed(
    tmp_path: Path,
    make_run: MakeRun,
    make_completion: MakeCompletion,
    retry: Callable[..., None],
    read_shards: ReadShards,
) -> None:
    """A retry that is stored supersedes its row; one sample more was asked for than is stored. Both are told."""
    first, second = make_run(tmp_path / "a", 0), make_run(tmp_path / "b", 1)
    retry(first, [(0, 0), (0, 1)], [make_completion(0, 0, tokens=20, generation=1)])
    done = merge([first, second], tmp_path / "out")
    assert done.runs[0] == MergedRun("a", "model-0", samples=12, tokens=11 * 8 + 20, superseded=1, owed=1, lost=0)
    assert (done.superseded, done.owed) == (1, 1)
    run, _ = read_manifest(tmp_path / "out").runs
    assert (run.samples, run.superseded, run.owed, len(run.retries)) == (12, 1, 1, 1)
    rows = [row for row in all_rows(tmp_path / "out", read_shards) if row["run"] == "a"]
    assert [row["response_length"] for row in rows if (row["prompt_id"], row["sample_index"]) == ("p0", 0)] == [20]


def test_a_merged_dataset_brings_its_runs(two: list[Path], tmp_path: Path, make_run: MakeRun) -> None:
    """As they were: the same figures, samples and manifests as of merging all three at once, by whatever way."""
    third = make_run(tmp_path / "third", 2)
    merge(two, tmp_path / "first")
    done = merge([tmp_path / "first", third], tmp_path / "second")
    at_once = merge([*two, third], tmp_path / "at-once")
    assert replace(done, bytes=None) == replace(at_once, bytes=None)
    assert read_manifest(tmp_path / "second").runs == read_manifest(tmp_path / "at-once").runs
    assert [path.read_bytes() for path in list_shards(tmp_path / "second")] == [
        path.read_bytes() for path in list_shards(tmp_path / "at-once")
    ]


def test_a_merged_dataset_under_a_name(two: list[Path], tmp_path: Path, make_run: MakeRun, read_shards: Any) -> None:
    """Its runs have that in front, which keeps them apart from others of the same name."""
    merge(two, tmp_path / "merged")
    other = make_run(tmp_path / "other" / "base", 2)
    merge([tmp_path / "merged", other], tmp_path / "out", names=["old", "base"])
    rows = all_rows(tmp_path / "out", read_shards)
    assert Counter(row["run"] for row in rows) == dict.fromkeys(("old.base", "old.step-1", "base"), 12)
    assert all(row["prompt_index"] == number_of(row["run"], row["prompt_id"]) for row in rows)


def test_plans_and_failures_stay_with_the_runs(two: list[Path], tmp_path: Path) -> None:
    """The sources are as they were, and nothing of that is in the merged dataset."""
    before = [contents(path) for path in two]
    merge(two, tmp_path / "out")
    assert [contents(path) for path in two] == before
    assert sorted(contents(tmp_path / "out")) == [
        "data/part-merge-000000.parquet",
        "journal/merge.jsonl",
        "rollgen.json",
    ]


def test_dry_run_says_the_same_and_writes_nothing(two: list[Path], tmp_path: Path) -> None:
    """No directory is made."""
    foreseen = merge(two, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    assert foreseen == replace(merge(two, tmp_path / "out"), bytes=None)


def flip_last_byte_of_data(shard: Path) -> None:
    """One bit before the footer: of the page index, which no checksum of a page covers."""
    damaged = bytearray(shard.read_bytes())
    length = int.from_bytes(damaged[-8:-4], "little")
    damaged[-9 - length] ^= 1
    shard.write_bytes(damaged)


def test_a_damaged_shard_is_refused(two: list[Path], tmp_path: Path) -> None:
    """Any byte that is not what was committed: the file is named, and nothing is written."""
    flip_last_byte_of_data(list_shards(two[1])[1])
    with pytest.raises(DatasetError, match=r"step-1/data/part-w0-000001\.parquet: damaged: not the bytes"):
        merge(two, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_lost_shard_is_refused(two: list[Path], tmp_path: Path) -> None:
    """As by any reader."""
    list_shards(two[0])[0].unlink()
    with pytest.raises(DatasetError, match=r"base/data/part-w0-000000\.parquet: missing, though committed"):
        merge(two, tmp_path / "out")


def test_a_shard_without_its_line_is_refused(two: list[Path], tmp_path: Path) -> None:
    """Nothing vouches for it yet."""
    (two[0] / "journal" / "w0.jsonl").write_text("")
    with pytest.raises(DatasetError, match=r"part-w0-000000\.parquet: has no journal line"):
        merge(two, tmp_path / "out")


def test_live_writers_exclude_it(two: list[Path], tmp_path: Path) -> None:
    """Of a source, which is named, and of the output."""
    with WriterSlot(two[1], "w0"), pytest.raises(ResumeRefused, match=r"step-1: writer 'w0' is alive"):
        merge(two, tmp_path / "out")
    with WriterSlot(tmp_path / "out", "w0"), pytest.raises(ResumeRefused, match=r"out: another rollgen .*is writing"):
        merge(two, tmp_path / "out")


def test_an_output_that_holds_something_is_refused(two: list[Path], tmp_path: Path, make_run: MakeRun) -> None:
    """Another dataset, which `clean` replaces; files that are nobody's; a source, and a place inside one."""
    old = make_run(tmp_path / "out", 5)
    before = contents(old)
    with pytest.raises(UsageError, match=r"out: holds a run already; replace it with --clean, or choose another"):
        merge(two, old)
    assert contents(old) == before
    assert merge(two, old, clean=True).samples == 24
    assert not (old / "plan.parquet").exists()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"foreign: holds files that are not rollgen's"):
        merge(two, tmp_path / "foreign", clean=True)
    for place in (two[0], two[0] / "merged"):
        with pytest.raises(UsageError, match="is, or is inside, a dataset to be merged"):
            merge(two, place, clean=True)


@pytest.mark.parametrize("linked", ["data/part-w0-000001.parquet", "data", "plan.parquet", ""])
def test_a_source_that_lies_in_the_output(two: list[Path], tmp_path: Path, make_run: MakeRun, linked: str) -> None:
    """Itself, or what a link of it leads to: to replace the output would remove it, so nothing is done."""
    old = make_run(tmp_path / "old", 5)
    if linked:
        shutil.move(two[1] / linked, old / "kept")
        (two[1] / linked).symlink_to(old / "kept")
    else:
        two[1] = two[1].rename(old / "tokenizer")
    before = [contents(path) for path in (*two, old)]
    with pytest.raises(UsageError, match="of a dataset to be merged, lies there; choose another directory"):
        merge(two, old, clean=True)
    assert [contents(path) for path in (*two, old)] == before


def test_full_disk_leaves_nothing(tmp_path: Path, make_run: MakeRun) -> None:
    """The shard of the first run, without masks, fits, the next does not: both are gone, the error names the file."""
    sources = [make_run(tmp_path / str(n), n, shards=1, prompts=1, n=1, tokens=4000, full=n == 0) for n in range(2)]
    with (
        largest_file(40_000),
        pytest.raises(DatasetError, match=r"\.tmp-merge/data/\.tmp-merge-000001: cannot be .*written: .*large"),
    ):
        merge(sources, tmp_path / "out", shard_tokens=4000)
    assert not (tmp_path / "out").exists()


def test_a_merged_dataset_can_be_compacted(two: list[Path], tmp_path: Path, read_shards: ReadShards) -> None:
    """Its rows stay as they are, `run` too."""
    out = tmp_path / "out"
    merge(two, out, shard_tokens=32)
    before = all_rows(out, read_shards)
    assert compact(out).written == 1
    after = all_rows(out, read_shards)
    assert Counter(map(repr, after)) == Counter(map(repr, before))
    assert verify_dataset(out).is_clean
    assert len(read_journal(out).retired) == 6


def test_nobody_continues_it(two: list[Path], runs: Runs, tiny_model: Path) -> None:
    """A resume, a retry, and a loop of one's own, with a plan or without: refused before a model loads."""
    merge(two, runs.out)
    before = contents(runs.out)
    refused = r"out: was merged from 2 runs, and owes nothing; continue these, and merge again"
    for options in ({}, {"retry": "finish_reason=length", "max_tokens": 99}):
        with pytest.raises(ResumeRefused, match=refused):
            runs(resume=True, **options)
    for prompts in (None, {"prompt": "Hello"}):
        with pytest.raises(ResumeRefused, match=refused):
            RolloutWriter(runs.out, prompts=prompts, model=str(tiny_model))
    assert contents(runs.out) == before
