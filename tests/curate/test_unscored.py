"""Which samples have no reward yet, also of a dataset whose shards are replaced while they are read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from rollgen.curate.compact import compact
from rollgen.curate.unscored import Unscored, check_field, while_replaced
from rollgen.errors import DatasetError, MissingFile, UsageError
from rollgen.format.journal import RECORD_FILE, list_shards
from rollgen.format.keys import read_rows
from rollgen.format.manifest import Manifest
from rollgen.format.reader import StoredDataset
from rollgen.format.rewards import read_rewards
from rollgen.rollouts import Completion


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Four shards of one prompt with two samples each."""
    return make_dataset(tmp_path / "run", shards=4, prompts=1, n=2)


def test_shards_that_are_replaced_meanwhile(dataset: Path) -> None:
    """What has been read is not read again, and the rest is read where it is now."""
    unscored = Unscored(dataset, read_rewards([]))
    batches = unscored.batches(1)
    first = [next(batches) for _ in range(3)]
    compact(dataset, shard_tokens=1000)
    found = [(answer.prompt_id, answer.sample_index) for answer in chain(*first, *batches)]
    assert found == [(f"p{prompt}", sample) for prompt in range(4) for sample in range(2)]
    assert unscored.tally.samples == 8


def test_shards_that_are_replaced_as_they_are_opened(dataset: Path) -> None:
    """Before the keys of all have been read: they are read where they are now."""
    opened = []

    def read(stored: StoredDataset) -> int:
        opened.append([shard.name for shard in stored.shards])
        compact(dataset, shard_tokens=1000 if len(opened) == 1 else 1)
        return len(read_rows(stored.shards).keys.prompt_index)

    assert while_replaced(dataset, read) == 8
    assert [len(names) for names in opened] == [4, 1]


def test_a_replacement_that_was_interrupted(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for a while; then it is an error that says what to do."""
    monkeypatch.setattr("rollgen.curate.unscored._REPLACING_SECONDS", 0.2)
    batches = Unscored(dataset, read_rewards([])).batches(2)
    next(batches)
    (dataset / "journal" / RECORD_FILE).touch()
    list_shards(dataset)[1].unlink()
    with pytest.raises(DatasetError, match="is being compacted, or that was interrupted: try again, or finish it"):
        next(batches)


def test_a_shard_that_is_gone(dataset: Path) -> None:
    """It is not awaited, nor passed over."""
    batches = Unscored(dataset, read_rewards([])).batches(2)
    next(batches)
    list_shards(dataset)[1].unlink()
    with pytest.raises(MissingFile, match="missing, though committed"):
        next(batches)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            ['{"a": 1, "b": 2}', '{"c": 3}'],
            r"run: no row has a field 'answer' in its metadata; there are: 'a', 'b', 'c'$",
        ),
        ([None, "[1]", "{"], r"no row has a field 'answer' in its metadata; there are none$"),
        (['{"a": 1}', None, '{"answer": null}'], None),
        ([], None),
    ],
    ids=["others", "none", "the last", "no rows"],
)
def test_a_field_that_no_row_has(
    tmp_path: Path,
    store: Callable[..., Path],
    make_manifest: Callable[[], Manifest],
    make_completion: Callable[..., Completion],
    metadata: list[str | None],
    message: str | None,
) -> None:
    """It is a mistake; one that some row has is none."""
    shards = [[make_completion(number, 0, metadata=text)] for number, text in enumerate(metadata)]
    stored = store(tmp_path / "run", make_manifest(), shards)
    if message is None:
        check_field(stored, "answer")
    else:
        with pytest.raises(UsageError, match=message):
            check_field(stored, "answer")
