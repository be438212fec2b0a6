"""Retry lists: written, read, refused when damaged; whom they choose; what recovery makes of rows of a retry.

The dataset has prompts p0, p1, ... of two samples each. "Cut" means that a sample ended at its max_tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.errors import DatasetError
from rollgen.format.commit import WriterSlot
from rollgen.format.done import PlannedKeys
from rollgen.format.manifest import Manifest, Retry
from rollgen.format.reader import open_dataset
from rollgen.format.recovery import Recovery, recover
from rollgen.format.retries import Outcomes, RetryList, read_outcomes, read_retries, select_retries
from rollgen.format.schema import RETRY_SCHEMA
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion

MakeCompletion = Callable[..., Completion]
CONTEXT = 20
Row = tuple[int, int, int, bool, int, int]
"""prompt_index, sample_index, generation, cut, max_tokens, prompt_length"""


def retry_list(*rows: tuple[int, int, int], generation: int = 1) -> RetryList:
    """`(prompt_index, sample_index, max_tokens)` of each row."""
    prompt, sample, max_tokens = np.array(rows, np.int64).reshape(-1, 3).T
    return RetryList(generation, prompt, sample.astype(np.int32), max_tokens.astype(np.int32))


def rows_of(retries: RetryList) -> list[tuple[int, int, int]]:
    columns = (retries.prompt_index, retries.sample_index, retries.max_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("rows", [[], [(0, 1, 9)], [(0, 0, 1), (0, 2, 9), (1, 0, 2**31 - 1), (2**62, 5, 7)]])
def test_round_trip(tmp_path: Path, rows: list[tuple[int, int, int]]) -> None:
    """All values and types, by its generation's name; pages carry checksums."""
    retry_list(*rows, generation=3).write(tmp_path / "retry-3.parquet")
    retries = RetryList.read(tmp_path, 3)
    assert (rows_of(retries), retries.generation, len(retries)) == (rows, 3, len(rows))
    assert pq.read_schema(tmp_path / "retry-3.parquet").equals(RETRY_SCHEMA)


def test_no_list(tmp_path: Path) -> None:
    """The manifest promised it."""
    with pytest.raises(DatasetError, match=r"retry-1\.parquet: missing; put"):
        RetryList.read(tmp_path, 1)


def read_or_error(directory: Path) -> list[tuple[int, int, int]] | str:
    """The rows of the list, or the message of the DatasetError."""
    try:
        return rows_of(RetryList.read(directory, 1))
    except DatasetError as error:
        return str(error)


def test_bit_flips_never_change_a_value(tmp_path: Path) -> None:
    """Any bit of the pages: an error, or the same values (measured: header bits that nobody reads)."""
    path = tmp_path / "retry-1.parquet"
    rows = [(prompt, 0, 9) for prompt in range(50)]
    retry_list(*rows).write(path)
    content = path.read_bytes()
    column = pq.read_metadata(path).row_group(0).column(0)
    start, errors = column.data_page_offset, 0
    for bit in range(8 * start, 8 * (start + column.total_compressed_size)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        outcome = read_or_error(tmp_path)
        errors += isinstance(outcome, str)
        assert outcome.startswith(f"{path}: ") if isinstance(outcome, str) else outcome == rows
    assert errors > 0


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        pytest.param([(1, 0, 9), (0, 0, 9)], "keys do not rise", id="prompts fall"),
        pytest.param([(0, 1, 9), (0, 0, 9)], "keys do not rise", id="samples fall"),
        pytest.param([(0, 0, 9), (0, 0, 9)], "keys do not rise", id="twice"),
        pytest.param([(-1, 0, 9)], "out of range", id="no prompt"),
        pytest.param([(0, -1, 9)], "out of range", id="no sample"),
        pytest.param([(0, 0, 0)], "out of range", id="no tokens"),
    ],
)
def test_lists_that_cannot_be(tmp_path: Path, rows: list[tuple[int, int, int]], reason: str) -> None:
    """Sound files by others, or by hand."""
    retry_list(*rows).write(tmp_path / "retry-1.parquet")
    with pytest.raises(DatasetError, match=rf"retry-1\.parquet: .*{reason}"):
        RetryList.read(tmp_path, 1)


def test_other_files(tmp_path: Path) -> None:
    """Parquet with other columns, and no Parquet at all."""
    pq.write_table(pa.table({"prompt_index": [1]}), tmp_path / "retry-1.parquet")
    (tmp_path / "retry-2.parquet").write_text("text")
    with pytest.raises(DatasetError, match=r"retry-1\.parquet: not a list of retries"):
        RetryList.read(tmp_path, 1)
    with pytest.raises(DatasetError, match=r"retry-2\.parquet: damaged"):
        RetryList.read(tmp_path, 2)


def with_retries(manifest: Manifest, *samples: int) -> Manifest:
    """A manifest with retries of so many samples each."""
    for generation, count in enumerate(samples, 1):
        where = {"finish_reason": "length"}
        retry = Retry(generation=generation, started_at="", where=where, max_tokens=9, samples=count)
        manifest = manifest.with_retry(retry)
    return manifest


def test_all_lists_of_a_dataset(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> None:
    """Oldest first; one that the manifest counts otherwise is refused."""
    retry_list((0, 0, 9), (1, 0, 9), generation=1).write(tmp_path / "retry-1.parquet")
    retry_list((1, 0, 99), generation=2).write(tmp_path / "retry-2.parquet")
    assert read_retries(tmp_path, make_manifest()) == ()
    lists = read_retries(tmp_path, with_retries(make_manifest(), 2, 1))
    assert [rows_of(retries) for retries in lists] == [[(0, 0, 9), (1, 0, 9)], [(1, 0, 99)]]
    with pytest.raises(DatasetError, match=r"retry-2\.parquet: 1 rows, the manifest says 3"):
        read_retries(tmp_path, with_retries(make_manifest(), 2, 3))


def outcomes(*rows: Row) -> Outcomes:
    columns = zip(*rows, strict=True) if rows else [()] * 6
    kinds = (np.int64, np.int32, np.int32, np.bool_, np.int32, np.int32)
    return Outcomes(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))


@pytest.mark.parametrize(
    ("rows", "chosen", "context_full"),
    [
        pytest.param([], [], 0, id="nothing stored"),
        pytest.param([(0, 0, 0, True, 5, 4)], [(0, 0, 12)], 0, id="cut"),
        pytest.param([(0, 0, 0, False, 5, 4)], [], 0, id="ended by itself"),
        pytest.param([(0, 0, 0, True, 12, 4)], [], 0, id="had as many tokens already"),
        pytest.param([(0, 0, 0, True, 15, 5)], [], 0, id="had more, and fills the context"),
        pytest.param([(0, 0, 0, True, 5, 10)], [(0, 0, 10)], 0, id="the context leaves less than asked for"),
        pytest.param([(0, 0, 0, True, 9, 11)], [], 1, id="the context is full"),
        pytest.param([(0, 0, 0, True, 5, 4), (0, 0, 1, False, 8, 4)], [], 0, id="superseded by one that ended"),
        pytest.param([(0, 0, 1, True, 8, 4), (0, 0, 0, True, 5, 4)], [(0, 0, 12)], 0, id="cut again, in any order"),
        pytest.param([(0, 0, 0, True, 5, 9), (0, 0, 3, True, 11, 9)], [], 1, id="made again until full"),
        pytest.param(
            [(2, 0, 0, True, 5, 4), (0, 1, 0, True, 5, 4), (0, 0, 0, True, 5, 4), (1, 0, 0, False, 5, 4)],
            [(0, 0, 12), (0, 1, 12), (2, 0, 12)],
            0,
            id="sorted",
        ),
    ],
)
def test_who_is_made_again(rows: list[Row], chosen: list[tuple[int, int, int]], context_full: int) -> None:
    """12 tokens are wanted, in a context of 20: current rows that were cut below both of these limits."""
    selection = select_retries(outcomes(*rows), (), max_tokens=12, context_length=CONTEXT)
    assert (rows_of(selection.retries), selection.context_full, selection.pending) == (chosen, context_full, 0)
    assert selection.retries.generation == 1
    assert [column.dtype for column in (selection.retries.prompt_index, selection.retries.max_tokens)] == ["i8", "i4"]


def test_what_is_listed_already_is_not_listed_again() -> None:
    """Of three cut samples an earlier retry listed two, and made one, which was cut again; only that one can be chosen.

    So the same command twice, or after an interruption, asks for nothing twice; with more tokens, for what is known.
    """
    planned = [(prompt, 0, 0, True, 5, 4) for prompt in range(3)]
    earlier = [retry_list((0, 0, 9), (1, 0, 9))]
    again = select_retries(outcomes(*planned, (0, 0, 1, True, 9, 4)), earlier, max_tokens=9, context_length=CONTEXT)
    assert (rows_of(again.retries), again.pending, again.retries.generation) == ([(2, 0, 9)], 1, 2)
    longer = select_retries(outcomes(*planned, (0, 0, 1, True, 9, 4)), earlier, max_tokens=12, context_length=CONTEXT)
    assert (rows_of(longer.retries), longer.pending) == ([(0, 0, 12), (2, 0, 12)], 1)


random_rows = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.booleans(), st.integers(1, 19), st.integers(1, 19)
    ),
    unique_by=lambda row: row[:3],
    max_size=20,
)


@settings(max_examples=200, deadline=None)
@given(random_rows, st.integers(1, 30))
def test_selection_is_that_of_the_definition(rows: list[Row], wanted: int) -> None:
    """Row by row: the current ones that are cut and have more room, each with what it may have."""
    latest: dict[tuple[int, int], Row] = {}
    for row in sorted(rows, key=lambda row: row[2]):
        latest[row[:2]] = row
    expected, full = [], 0
    for (prompt, sample), (_, _, _, cut, stored, length) in sorted(latest.items()):
        if cut and stored < min(wanted, CONTEXT - length):
            expected.append((prompt, sample, min(wanted, CONTEXT - length)))
        elif cut and stored < wanted:
            full += 1
    selection = select_retries(outcomes(*rows), (), max_tokens=wanted, context_length=CONTEXT)
    assert (rows_of(selection.retries), selection.context_full) == (expected, full)


class Run(NamedTuple):
    """A dataset of two shards, prompts p0 to p3 of two samples each, and its manifest."""

    directory: Path
    manifest: Manifest

    def store(self, *completions: Completion) -> None:
        """One more shard."""
        with (
            WriterSlot(self.directory, "w0") as slot,
            ShardWriter(slot, self.manifest, commit_interval=math.inf) as writer,
        ):
            for completion in completions:
                writer.add(completion)

    def recover(self, *retries: RetryList) -> Recovery:
        planned = PlannedKeys(
            np.array([0, 2, 4, 6, 8]),
            lambda indices: pa.array([f"p{index}" for index in indices]),
            lambda table: None,
            retries,
        )
        with WriterSlot(self.directory, "w0") as slot:
            return recover(slot, self.manifest.config_digest, planned)


@pytest.fixture
def run(tmp_path: Path, make_dataset: Callable[..., Path], make_manifest: Callable[..., Manifest]) -> Run:
    """Nothing retried yet."""
    return Run(make_dataset(tmp_path / "run", shards=2, prompts=2, n=2), make_manifest())


FIRST = [(0, 1, 99), (2, 0, 99), (3, 1, 99)]


def test_outcomes_of_a_dataset(run: Run, make_completion: MakeCompletion) -> None:
    """One entry a row of all shards and generations: p2's prompt has 3 tokens, the first runs max_tokens is 64."""
    again = make_completion(2, 1, generation=1, finish_reason="length")
    run.store(replace(again, sampling=replace(again.sampling, max_tokens=99)))
    found = read_outcomes(open_dataset(run.directory).shards)
    rows = sorted(zip(*(column.tolist() for column in found), strict=True))
    assert len(rows) == 9
    assert [row for row in rows if row[:2] == (2, 1)] == [(2, 1, 0, False, 64, 3), (2, 1, 1, True, 99, 3)]
    assert [column.dtype for column in found] == ["i8", "i4", "i4", "?", "i4", "i4"]


def test_outcomes_of_nothing() -> None:
    """A run before its first commit."""
    assert [len(column) for column in read_outcomes([])] == [0] * 6


def test_a_retry_is_owed_until_it_is_stored(run: Run, make_completion: MakeCompletion) -> None:
    """Row by row of its list; planned samples stay done; a second retry has flags of its own."""
    first, second = retry_list(*FIRST), retry_list((2, 0, 999), generation=2)
    assert [flags.tolist() for flags in run.recover(first).retried] == [[False] * 3]
    run.store(make_completion(3, 1, generation=1), make_completion(2, 0, generation=1))
    recovery = run.recover(first, second)
    assert recovery.done.all()
    assert [flags.tolist() for flags in recovery.retried] == [[False, True, True], [False]]
    run.store(make_completion(2, 0, generation=2))
    assert [flags.tolist() for flags in run.recover(first, second).retried] == [[False, True, True], [True]]


def test_a_lost_shard_of_a_retry_is_owed_again(run: Run, make_completion: MakeCompletion) -> None:
    """As any other; the samples of generation 0 are not concerned."""
    run.store(make_completion(3, 1, generation=1))
    (run.directory / "data" / "part-w0-000002.parquet").unlink()
    recovery = run.recover(retry_list(*FIRST))
    assert (recovery.done.all(), recovery.retried[0].tolist()) == (True, [False] * 3)
    assert "missing; its samples are owed again" in recovery.findings[0]


@pytest.mark.parametrize(
    "key",
    [
        pytest.param((0, 0, 1), id="before the first of the list"),
        pytest.param((2, 1, 1), id="between"),
        pytest.param((3, 0, 1), id="before the last"),
        pytest.param((2, 0, 2), id="no such retry"),
        pytest.param((2, 0, -1), id="negative"),
    ],
)
def test_rows_that_no_list_has(run: Run, make_completion: MakeCompletion, key: tuple[int, int, int]) -> None:
    """They are not in the plan, and the error says which row it is."""
    prompt, sample, generation = key
    run.store(make_completion(prompt, sample, generation=generation))
    message = rf"000002\.parquet: row 0: \(p{prompt}, {sample}\) is not in the plan again in generation {generation}"
    with pytest.raises(DatasetError, match=message):
        run.recover(retry_list(*FIRST))


def test_a_generation_twice(run: Run, make_completion: MakeCompletion) -> None:
    """Two copies of a retried row are as bad as two of a planned one."""
    for _ in range(2):
        run.store(make_completion(2, 0, generation=1))
    with pytest.raises(DatasetError, match=r"000003\.parquet: holds samples that are stored already"):
        run.recover(retry_list(*FIRST))


@pytest.mark.parametrize("key", [(4, 0), (3, 2), (2**62, 0)])
def test_a_list_of_samples_that_are_not_planned(run: Run, key: tuple[int, int]) -> None:
    """Of another run, then; prompts are 0 to 3, samples 0 and 1."""
    rows: Any = [(0, 0, 9), (*key, 9)]
    with pytest.raises(DatasetError, match=rf"retry-1\.parquet: row 1: prompt {key[0]}, sample {key[1]} is not in"):
        run.recover(retry_list(*rows))
