"""RolloutStream in one process: epochs, exact resume, damage, and a thread that leaves nothing behind."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.loader import RolloutBatch, RolloutStream, schedule
from rollgen.loader.stream import _ahead
from rollgen.rollouts import Completion

Key = tuple[int, int, int]
KeysOf = Callable[[RolloutBatch], list[Key]]
MakeCompletion = Callable[..., Completion]
WriteShards = Callable[..., Path]

TOKENS = 40


def epochs(stream: RolloutStream, keys_of: KeysOf, count: int) -> list[list[list[Key]]]:
    """The keys of each batch of the next epochs."""
    return [[keys_of(batch) for batch in stream] for _ in range(count)]


def global_order(
    make: Callable[..., RolloutStream], keys_of: KeysOf, world_size: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, list[Key]]]:
    """One iteration by all ranks and workers, simulated one after the other: each batch in its global place."""
    placed = []
    for rank in range(world_size):
        stream = make(rank=rank, world_size=world_size)
        for worker in range(workers):
            info = SimpleNamespace(id=worker, num_workers=workers, seed=99 + worker)
            monkeypatch.setattr(schedule, "get_worker_info", lambda info=info: info)
            for step, batch in enumerate(stream):
                placed.append((((step * workers + worker) * world_size + rank), keys_of(batch)))
    monkeypatch.setattr(schedule, "get_worker_info", lambda: None)
    placed.sort()
    return placed


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {
            "batch_tokens": st.integers(5, 90),
            "shuffle": st.booleans(),
            "seed": st.integers(0, 99),
            "group_by_prompt": st.booleans(),
            "bucket_by_length": st.booleans(),
            "shuffle_window": st.integers(20, 300),
        }
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.data(),
)
def test_any_division_gives_the_same_batches(
    dataset: Path,
    keys_of: KeysOf,
    chosen: dict[str, Any],
    world_size: int,
    workers: int,
    epoch: int,
    data: st.DataObject,
) -> None:
    """Over ranks and workers, from the start and from a state: the same global order, every sample exactly once."""

    def make(state: dict[str, Any] | None = None, **ranks: int) -> RolloutStream:
        stream = RolloutStream(dataset, prefetch=0, **chosen, **ranks)
        stream.set_epoch(epoch)
        if state is not None:
            stream.load_state_dict(state)
        return stream

    alone = list(make())
    expected = [keys_of(batch) for batch in alone]
    assert len({key for keys in expected for key in keys}) == sum(map(len, expected)) == 22
    with pytest.MonkeyPatch.context() as monkeypatch:
        placed = global_order(make, keys_of, world_size, workers, monkeypatch)
        padded = len(expected) + -len(expected) % world_size
        assert placed == list(enumerate([*expected, *[[]] * (padded - len(expected))]))
        used = data.draw(st.integers(1, len(expected)), label="batches used before the state")
        state = json.loads(json.dumps(make().state_dict(alone[used - 1])))
        if used < len(expected):
            rest = global_order(lambda **ranks: make(state, **ranks), keys_of, world_size, workers, monkeypatch)
            assert [keys for _, keys in rest if keys] == expected[used:]


def test_epochs_follow_each_other(dataset: Path, keys_of: KeysOf) -> None:
    """Each is complete and shuffled anew; `set_epoch` goes to any of them, and back."""
    stream = RolloutStream(dataset, batch_tokens=TOKENS)
    assert (stream.epoch, stream.samples, len(stream.manifests), stream.vocab_size) == (0, 22, 1, 512)
    made = epochs(stream, keys_of, 3)
    assert stream.epoch == 3
    assert [len(batches) for batches in made] == [stream.steps(epoch) for epoch in range(3)]
    assert len({str(sorted(key for keys in batches for key in keys)) for batches in made}) == 1
    assert len({str(batches) for batches in made}) == 3
    with pytest.raises(UsageError, match="epoch must be a whole number, 0 or more, not -1"):
        stream.set_epoch(-1)
    for epoch in (1, 0, 2):
        stream.set_epoch(epoch)
        assert stream.epoch == epoch
        assert epochs(stream, keys_of, 1) == [made[epoch]]


def test_set_epoch_keeps_a_restored_position(dataset: Path, keys_of: KeysOf) -> None:
    """The loop `for epoch in range(stream.epoch, n): stream.set_epoch(epoch)` resumes in the middle of the first."""
    stream = RolloutStream(dataset, batch_tokens=TOKENS)
    made = epochs(stream, keys_of, 2)
    stream.set_epoch(1)
    batches = iter(stream)
    state = stream.state_dict([next(batches) for _ in range(3)][-1])
    restored = RolloutStream(dataset, batch_tokens=TOKENS)
    restored.load_state_dict(json.loads(json.dumps(state)))
    assert restored.epoch == 1
    restored.set_epoch(restored.epoch)
    assert epochs(restored, keys_of, 1) == [made[1][3:]]
    restored.set_epoch(1)  # again, whole: an iteration has begun since
    assert epochs(restored, keys_of, 1) == [made[1]]


def test_resume_at_every_batch_and_of_a_resume(dataset: Path, keys_of: KeysOf) -> None:
    """Stopped after each batch of two epochs in turn, and started again from the state alone: nothing is lost."""
    expected = [keys for batches in epochs(RolloutStream(dataset, batch_tokens=TOKENS), keys_of, 2) for keys in batches]
    seen: list[list[Key]] = []
    state = RolloutStream(dataset, batch_tokens=TOKENS).state_dict()
    while len(seen) < len(expected):
        stream = RolloutStream(dataset, batch_tokens=TOKENS)
        stream.load_state_dict(json.loads(json.dumps(state)))
        batch = next(iter(stream))
        seen.append(keys_of(batch))
        state = stream.state_dict(batch)
    assert seen == expected
    assert (state["epoch"], state["position"]) == (2, 0)


def test_two_states_of_one_epoch_in_one_stream(dataset: Path, keys_of: KeysOf) -> None:
    """A stream that has run goes back to a state, any number of times; the next epoch follows."""
    stream = RolloutStream(dataset, batch_tokens=TOKENS)
    batches = list(stream)
    (second,) = epochs(stream, keys_of, 1)
    for place in (4, 1):
        stream.load_state_dict(stream.state_dict(batches[place]))
        assert epochs(stream, keys_of, 2) == [[keys_of(batch) for batch in batches[place + 1 :]], second]


def test_resume_with_another_world_size(dataset: Path, keys_of: KeysOf) -> None:
    """Two steps of two ranks, one of three, then alone: the global order goes on."""
    (expected,) = epochs(RolloutStream(dataset, batch_tokens=TOKENS), keys_of, 1)
    seen: list[list[Key]] = []
    state: dict[str, Any] | None = None
    for world_size, steps in ((2, 2), (3, 1), (1, len(expected) - 7)):
        streams = [
            RolloutStream(dataset, batch_tokens=TOKENS, rank=r, world_size=world_size) for r in range(world_size)
        ]
        for stream in streams:
            if state:
                stream.load_state_dict(state)
        running = [iter(stream) for stream in streams]
        for _ in range(steps):
            step = [next(batches) for batches in running]
            seen += map(keys_of, step)
        states = [stream.state_dict(batch) for stream, batch in zip(streams, step, strict=True)]
        assert all(one == states[0] for one in states)
        state = json.loads(json.dumps(states[0]))
    assert seen == expected


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_uneven_ends(dataset: Path, keys_of: KeysOf, uneven: schedule.Uneven) -> None:
    """All ranks make as many steps, and the cursor of the last one is the next epoch."""
    total = RolloutStream(dataset, batch_tokens=TOKENS).steps(0)
    world_size = total - 1  # the second step has one batch for all of them
    streams = [
        RolloutStream(dataset, batch_tokens=TOKENS, rank=rank, world_size=world_size, uneven=uneven)
        for rank in range(world_size)
    ]
    made = [list(stream) for stream in streams]
    steps = 2 if uneven == "pad" else 1
    assert {len(batches) for batches in made} == {stream.steps(0) for stream in streams} == {steps}
    assert {batches[-1].cursor for batches in made} == {(1, 0)}
    sizes = [[len(batch) for batch in batches] for batches in made]
    assert all(size > 0 for batches in sizes for size in batches[:1])
    if uneven == "pad":
        assert [batches[1] > 0 for batches in sizes] == [True] + [False] * (world_size - 1)


def test_fewer_batches_than_ranks(dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `drop` nothing is left, which the log says."""
    stream = RolloutStream(dataset, batch_tokens=10**6, rank=0, world_size=2, uneven="drop")
    assert (list(stream), stream.steps(0)) == ([], 0)
    assert "epoch 0: fewer batches than ranks are left: all are dropped" in caplog.text


def test_oversized_samples_are_reported_once(dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is a batch of its own; the log has one line, when the stream is made, and says how many."""
    with caplog.at_level(logging.WARNING):
        stream = RolloutStream(dataset, batch_tokens=16)
        sizes = [(len(batch), int(batch.cu_seqlens[-1])) for batch in stream]
        assert list(stream)
    over = [size for size in sizes if size[1] > 16]
    assert over
    assert {count for count, _ in over} == {1}
    (record,) = caplog.records
    found = f"samples larger than batch_tokens=16: {len(over)}, each a batch of its own; the largest has"
    assert record.getMessage() == f"{found} {max(size for _, size in over)} tokens"


def test_filters_and_unreplayable_rows(
    write_shards: WriteShards, make_completion: MakeCompletion, keys_of: KeysOf
) -> None:
    """Rows that do not replay need the flag, or a filter that leaves them out; no row at all is an error."""
    dataset = write_shards([[make_completion(p, 0, replayable=p != 1) for p in range(3)]])
    with pytest.raises(UsageError, match="allow_unreplayable=True"):
        RolloutStream(dataset)
    assert RolloutStream(dataset, allow_unreplayable=True).samples == 3
    (batch,) = RolloutStream(dataset, filter=pc.field("replayable"), shuffle=False)
    assert keys_of(batch) == [(0, 0, 0), (0, 2, 0)]
    with pytest.raises(UsageError, match="no sample to read passes the filter"):
        RolloutStream(dataset, filter=pc.field("prompt_index") > 5)
    dataset.rename(dataset.parent / "other")
    with pytest.raises(UsageError, match=r"no sample to read$"):
        RolloutStream(write_shards([]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 0}, "batch_tokens must be a whole number, 1 or more, not 0"),
        ({"batch_tokens": 1.5}, "batch_tokens must be a whole number"),
        ({"batch_tokens": True}, "batch_tokens must be a whole number"),
        ({"shuffle_window": 0}, "shuffle_window must be"),
        ({"seed": -1}, "seed must be a whole number, 0 or more"),
        ({"prefetch": -1}, "prefetch must be"),
        ({"cache_bytes": -1}, "cache_bytes must be"),
        ({"layout": "jagged"}, "layout must be one of 'padded', 'packed', not 'jagged'"),
        ({"on_damage": "ignore"}, "on_damage must be one of 'raise', 'skip'"),
        ({"uneven": "stop"}, "uneven must be one of 'pad', 'drop'"),
        ({"rank": 0}, "pass both, or neither"),
        ({"rank": 0.0, "world_size": 2}, "rank and world_size must be whole numbers"),
        ({"pad_id": -1}, "pad_id must be a whole number"),
        ({"pad_id": "x"}, "pad_id must be a whole number"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be(dataset: Path, changes: dict[str, Any], message: str) -> None:
    """Refused when the stream is made, by name."""
    with pytest.raises(UsageError, match=message):
        RolloutStream(dataset, **changes)


def test_a_dataset_that_grows(dataset: Path) -> None:
    """Ranks that open it one after the other would see different ones; a single process may."""
    with WriterSlot(dataset, "w7"):
        assert RolloutStream(dataset).samples == 22
        with pytest.raises(UsageError, match="writer 'w7' is adding to it"):
            RolloutStream(dataset, rank=0, world_size=2)


@pytest.mark.parametrize("prefetch", [0, 1, 5, 1000])
def test_the_thread_changes_nothing(dataset: Path, keys_of: KeysOf, prefetch: int) -> None:
    """As many batches, in the same order, made ahead or not; none of them is made twice."""
    (expected,) = epochs(RolloutStream(dataset, batch_tokens=TOKENS), keys_of, 1)
    assert epochs(RolloutStream(dataset, batch_tokens=TOKENS, prefetch=prefetch), keys_of, 1) == [expected]


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rollgen-loader")]


def open_files() -> list[str]:
    """Parquet files that this process holds open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return [str(link.readlink()) for link in links if str(link.readlink()).endswith(".parquet")]


@pytest.mark.parametrize("ends", ["finished", "closed", "forgotten", "never begun", "failed"])
def test_no_thread_and_no_file_stays(dataset: Path, ends: str) -> None:
    """However an iteration ends."""
    batches: Iterator[RolloutBatch] = iter(RolloutStream(dataset, batch_tokens=TOKENS))
    if ends == "finished":
        assert list(batches)
    elif ends != "never begun":
        next(batches)
        assert loader_threads()
    if ends == "closed":
        batches.close()  # type: ignore[attr-defined]
    elif ends == "failed":
        with pytest.raises(KeyError):
            batches.throw(KeyError("in the loop"))  # type: ignore[attr-defined]
    elif ends in ("forgotten", "never begun"):
        del batches
    assert (loader_threads(), open_files()) == ([], [])


def test_what_was_not_begun_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration that is left does not keep its caller waiting for fifty more batches."""
    made: list[int] = []
    left, shutdown = threading.Event(), ThreadPoolExecutor.shutdown

    def make(number: int) -> Any:
        assert number == 0 or left.wait(180)
        made.append(number)
        return number

    def leave(pool: ThreadPoolExecutor, *arguments: Any, **named: Any) -> None:
        left.set()
        shutdown(pool, *arguments, **named)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", leave)
    batches = _ahead(make, zip(range(1000)), 50)
    assert next(batches) == 0
    batches.close()  # type: ignore[attr-defined]
    assert made in ([0], [0, 1])


@pytest.mark.parametrize("prefetch", [0, 2, 50])
def test_damage_surfaces_at_its_batch(
    dataset: Path, keys_of: KeysOf, damage: Callable[..., Path], prefetch: int
) -> None:
    """Batches before it come first, however far ahead the thread was; then the error; then the iteration is over."""
    whole = epochs(RolloutStream(dataset, batch_tokens=TOKENS, shuffle=False), keys_of, 1)[0]
    path = damage(dataset, 3, "sampling_mask")
    batches = iter(RolloutStream(dataset, batch_tokens=TOKENS, shuffle=False, prefetch=prefetch))
    # 3 + 7 + 1 samples lie before shard 3.
    before = [keys for number, keys in enumerate(whole) if sum(map(len, whole[: number + 1])) <= 11]
    assert [keys_of(next(batches)) for _ in before] == before
    with pytest.raises(DatasetError, match=rf"{path.name}: row group 0: damaged"):
        next(batches)
    assert list(batches) == []
    assert (loader_threads(), open_files()) == ([], [])


@pytest.mark.parametrize("group_by_prompt", [False, True])
def test_damage_that_is_skipped(
    dataset: Path,
    keys_of: KeysOf,
    damage: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    group_by_prompt: bool,
) -> None:
    """All other samples exactly once, the rest counted by batch, listed by row group, and logged once."""
    whole = epochs(RolloutStream(dataset, batch_tokens=TOKENS, group_by_prompt=group_by_prompt), keys_of, 1)[0]
    path = damage(dataset, 1, "sampling_mask")
    stream = RolloutStream(dataset, batch_tokens=TOKENS, group_by_prompt=group_by_prompt, on_damage="skip")
    assert stream.losses == ()
    with caplog.at_level(logging.WARNING):
        batches = list(stream)
        assert sum(batch.lost for batch in stream) == 7
    gone = {(0, number % 12, number // 12) for number in range(3, 10)}
    assert [keys_of(batch) for batch in batches] == [[key for key in keys if key not in gone] for keys in whole]
    assert [batch.lost for batch in batches] == [len(gone & set(keys)) for keys in whole]
    assert [(loss.place, loss.samples) for loss in stream.losses] == [(f"{path}: row group 0", 7)]
    assert len(caplog.records) == 1
    assert path.name in caplog.text


@pytest.mark.parametrize("kind", ["narrow", "truncated"])
def test_damage_that_opening_finds(dataset: Path, keys_of: KeysOf, damage: Callable[..., Path], kind: str) -> None:
    """It is no part of the batches, which are packed from what is there; `lost` counts nothing more."""
    path = damage(dataset, 1, "prompt_index")
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DatasetError, match=path.name):
        RolloutStream(dataset)
    stream = RolloutStream(dataset, on_damage="skip", batch_tokens=TOKENS)
    assert (stream.samples, [loss.samples for loss in stream.losses]) == (15, [7])
    batches = list(stream)
    assert len({key for batch in batches for key in keys_of(batch)}) == sum(map(len, batches)) == 15
    assert [batch.lost for batch in batches] == [0] * len(batches)


def test_two_iterations_at_once(dataset: Path, keys_of: KeysOf) -> None:
    """In turns, the second in the next epoch: neither sees the other, and states are those of their batches."""
    expected = epochs(RolloutStream(dataset, batch_tokens=TOKENS), keys_of, 2)
    stream = RolloutStream(dataset, batch_tokens=TOKENS)
    one, other = iter(stream), iter(stream)
    seen: list[list[list[Key]]] = [[], []]
    for place in range(min(map(len, expected))):
        for number, batches in enumerate((one, other)):
            batch = next(batches)
            seen[number].append(keys_of(batch))
            assert batch.cursor is not None
            assert batch.cursor.position in (place + 1, 0)
    assert seen == [batches[: len(seen[0])] for batches in expected]
    stream.set_epoch(5)
    assert stream.epoch == 5
    assert [keys_of(batch) for batch in one] == expected[0][len(seen[0]) :]


def test_layout_and_padding(dataset: Path) -> None:
    """A stream makes the layout it was asked for, padded with the id it was given."""
    (packed,) = RolloutStream(dataset, layout="packed", shuffle=False)
    (padded,) = RolloutStream(dataset, pad_id=511, shuffle=False)
    assert packed.input_ids.shape == (1, int(packed.cu_seqlens[-1]))
    assert padded.input_ids.shape == (22, padded.max_length)
    assert (padded.input_ids[~padded.attention_mask] == 511).all()
    torch.testing.assert_close(padded.input_ids[padded.attention_mask], packed.input_ids[0])


def test_neither_polars_nor_transformers_are_loaded(dataset: Path) -> None:
    """polars hangs in a forked worker, transformers costs seconds in a spawned one. An open iteration just ends."""
    code = (
        "import sys; from rollgen.loader import RolloutStream; assert list(RolloutStream(sys.argv[1])); "
        "batches = iter(RolloutStream(sys.argv[1], batch_tokens=20)); next(batches); "
        "print([name for name in ('polars', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(dataset)], capture_output=True, text=True, check=True, timeout=180
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
