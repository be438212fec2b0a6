"""Who gets which batch: every batch once for any ranks and workers, and starts that all processes agree on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import copy
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.errors import ResumeRefused, UsageError
from rollgen.loader import schedule
from rollgen.loader.schedule import Cursor, Progress, Share, StartPoint, resolve_rank, this_worker

BecomeWorker = Callable[..., None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> BecomeWorker:
    """`become(worker, workers, seed)`: this process counts as that worker of a DataLoader iterator, or the main one.

    Iterators differ by the seed that they draw.
    """

    def become(worker: int | None, workers: int = 0, seed: int = 99) -> None:
        info = None if worker is None else SimpleNamespace(id=worker, num_workers=workers, seed=seed + worker)
        monkeypatch.setattr(schedule, "get_worker_info", lambda: info)

    return become


def shares(start: Cursor, total: int, world_size: int, workers: int, uneven: schedule.Uneven) -> list[list[Share]]:
    """By rank and worker."""
    return [
        [Share(start, total, rank, world_size, worker, workers, uneven) for worker in range(workers)]
        for rank in range(world_size)
    ]


def in_turns(rank: list[Share]) -> list[tuple[int | None, Cursor]]:
    """The batches of a rank as a DataLoader hands them out: the workers in turn, until each has ended."""
    running = [share.batches() for share in rank]
    taken = []
    while running:
        for batches in [*running]:
            if (batch := next(batches, None)) is None:
                running.remove(batches)
            else:
                taken.append(batch)
    return taken


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["pad", "drop"]))
def test_every_batch_once_in_order(
    total: int, position: int, world_size: int, workers: int, uneven: schedule.Uneven
) -> None:
    """Step by step over the ranks: the batches from the start on, padded or cut to whole steps, one cursor a step."""
    position = min(position, total)
    ranks = [in_turns(rank) for rank in shares(Cursor(3, position), total, world_size, workers, uneven)]
    left = list(range(position, total))
    missing = -len(left) % world_size
    wanted = [*left, *[None] * missing] if uneven == "pad" else left[: len(left) // world_size * world_size]
    assert [number for step in zip(*ranks, strict=True) for number, _ in step] == wanted
    cursors = [{cursor for _, cursor in step} for step in zip(*ranks, strict=True)]
    steps = len(wanted) // world_size
    expected = [Cursor(3, position + step * world_size) for step in range(1, steps)] + [Cursor(4, 0)] * (steps > 0)
    assert cursors == [{cursor} for cursor in expected]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 30), st.sampled_from(["pad", "drop"]))
def test_resumes_with_other_ranks_and_workers(data: st.DataObject, total: int, uneven: schedule.Uneven) -> None:
    """From step to step with new numbers each time: with `pad` all batches once, with `drop` none twice."""
    seen: list[int] = []
    cursor = Cursor(0, 0)
    while cursor.epoch == 0:
        world_size, workers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        ranks = [in_turns(rank) for rank in shares(cursor, total, world_size, workers, uneven)]
        steps = list(zip(*ranks, strict=True))
        if not steps:  # fewer batches are left than ranks
            assert uneven == "drop"
            break
        stop = data.draw(st.integers(1, len(steps)))
        seen += [number for step in steps[:stop] for number, _ in step if number is not None]
        cursor = steps[stop - 1][0][1]
    assert seen == (list(range(total)) if uneven == "pad" else list(range(len(seen))))


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_restored_worker_leaves_out_what_it_had_made(done: int) -> None:
    """Worker 1 of 2, rank 1 of 2 makes the batches 3, 7, 11, 15, 19 of 20."""
    share = Share(Cursor(0, 0), 20, 1, 2, 1, 2, "pad")
    assert [number for number, _ in share.batches(done)] == [3, 7, 11, 15, 19][done:]


def test_iterations_count_epochs(become: BecomeWorker) -> None:
    """The first starts where it was set, further ones at the beginning of the epochs after; setting starts anew."""
    become(None)
    start = StartPoint()
    start.set(Cursor(2, 7))
    assert (start.epoch, start.was_used) == (2, False)
    assert [start.begin().start for _ in range(3)] == [Cursor(2, 7), Cursor(3, 0), Cursor(4, 0)]
    assert (start.epoch, start.was_used) == (5, True)
    start.set(Cursor(0, 1))
    assert (start.epoch, start.begin().start) == (0, Cursor(0, 1))


def test_workers_count_for_themselves(become: BecomeWorker) -> None:
    """A slow worker begins the epoch that the others begin; the main process sees the furthest."""
    start = StartPoint()
    become(0, 2)
    assert [start.begin().start.epoch for _ in range(2)] == [0, 1]
    become(1, 2)
    assert start.begin().start.epoch == 0
    become(None)
    assert start.epoch == 2
    start.set(Cursor(5, 3))
    for worker in range(2):
        become(worker, 2)
        assert start.begin().start == Cursor(5, 3)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("seed", [99, 7], ids=["seeded alike", "another seed"])
def test_another_iterator_is_the_next_epoch(become: BecomeWorker, before: int, after: int, seed: int) -> None:
    """For all of its workers, however many there were and are, and whichever comes first."""

    def begin(workers: int, seed: int) -> list[Cursor]:
        begun = []
        for worker in reversed(range(workers)) if workers else [None]:
            become(worker, workers, seed)
            begun.append(start.begin().start)
        become(None)
        return begun

    start = StartPoint()
    assert set(begin(before, 99)) == {Cursor(0, 0)}
    assert set(begin(after, seed)) == {Cursor(1, 0)}
    assert set(begin(before, seed + 1)) == {Cursor(2, 0)}


def test_a_worker_that_was_ended_before_it_began(become: BecomeWorker) -> None:
    """An iterator is dropped at once, and only one of its workers had come so far: the next iterator is of one mind."""
    start = StartPoint()
    become(0, 2, seed=1)
    assert start.begin().start.epoch == 0
    begun = []
    for worker in (1, 0):
        become(worker, 2, seed=2)
        begun.append(start.begin().start.epoch)
    assert begun == [1, 1]


def test_a_worker_that_comes_after_the_start_was_set_again(become: BecomeWorker) -> None:
    """It was made for an iteration that is over: what it begins first does not count, what it is told then does."""
    start = StartPoint()
    become(0, 2)
    assert start.begin().start == Cursor(0, 0)
    slow = copy(start)  # another process: the same shared memory, what was known when it was made
    become(None)
    slow._running = None
    start.set(Cursor(5, 3))
    begun = []
    for worker, process in ((1, slow), (0, start), (1, slow)):
        become(worker, 2)
        begun.append(process.begin().start)
    assert begun[1:] == [Cursor(5, 3), Cursor(5, 3)]
    assert [process.begin().start for process in (slow, slow)] == [Cursor(6, 0), Cursor(7, 0)]


def test_two_iterators_at_once_are_noticed(become: BecomeWorker) -> None:
    """A worker whose row another has taken says so, rather than go on with the wrong epoch."""
    start = StartPoint()
    become(0, 2, seed=1)
    start.begin()
    start.check_undisturbed()
    become(0, 2, seed=2)
    start.begin()
    become(0, 2, seed=1)
    with pytest.raises(UsageError, match="two DataLoader iterators"):
        start.check_undisturbed()


def test_workers_are_restored_one_after_the_other(become: BecomeWorker) -> None:
    """Each sets the same start and what it had made; what was begun before, or by a fellow, does not disturb it."""
    start = StartPoint()
    for worker in range(2):
        become(worker, 2, seed=1)
        start.begin()
    for worker, done in ((0, 4), (1, 3)):
        become(worker, 2, seed=2)
        start.set(Cursor(0, 2), skipped=done)
        assert start.begin() == Progress(Cursor(0, 2), done)
    for worker in range(2):
        become(worker, 2, seed=2)
        assert start.begin() == Progress(Cursor(1, 0), 0)


def test_the_state_of_a_worker(become: BecomeWorker) -> None:
    """Where it began and how many batches it made; loaded into the same worker it goes on there, then to epoch 5."""
    become(1, 2)
    start = StartPoint()
    start.set(Cursor(4, 6))
    progress = start.begin()
    progress.done += 3
    state = start.state(0, 2)
    place = {"rank": 0, "world_size": 2, "worker": 1, "workers": 2}
    assert state == {"epoch": 4, "position": 6, "done": 3, **place}
    other = StartPoint()
    other.load(state, 0, 2)
    assert [other.begin(), other.begin()] == [Progress(Cursor(4, 6), 3), Progress(Cursor(5, 0), 0)]


@pytest.mark.parametrize(
    ("name", "rank", "world_size", "worker", "workers"),
    [("rank", 1, 2, 1, 2), ("world_size", 0, 3, 1, 2), ("worker", 0, 2, 0, 2), ("workers", 0, 2, 1, 3)],
)
def test_the_state_of_another_worker(
    become: BecomeWorker, name: str, rank: int, world_size: int, worker: int, workers: int
) -> None:
    """It counts batches of its own, which another division would not make: refused, with the way out."""
    become(1, 2)
    start = StartPoint()
    start.begin()
    state = start.state(0, 2)
    become(worker, workers)
    with pytest.raises(ResumeRefused, match=rf"of {name} \d, this is {name} \d; .*state_dict\(batch\)"):
        StartPoint().load(state, rank, world_size)


def test_the_main_process_does_not_know_what_workers_did(become: BecomeWorker) -> None:
    """Workers are batches ahead of what was used: the state has to be asked of a batch."""
    start = StartPoint()
    assert start.state(0, 1) == {"epoch": 0, "position": 0}
    become(0, 1)
    copy(start).begin()  # what a fork has: the same shared memory, but its own iterations
    become(None)
    with pytest.raises(UsageError, match="pass the batch that was used last"):
        start.state(0, 1)


def test_an_iteration_that_is_passed_counts_for_itself(become: BecomeWorker) -> None:
    """Two at once, or one that goes on after the start was set again: neither moves the other's count."""
    become(None)
    start = StartPoint()
    first, second = start.begin(), start.begin()
    first.done += 2
    assert start.state(0, 1)["done"] == second.done == 0
    start.set(Cursor(7, 0))
    second.done += 1
    assert start.state(0, 1) == {"epoch": 7, "position": 0}


def test_workers_without_number(become: BecomeWorker) -> None:
    """There is a slot for 1,023 of them."""
    become(1023, 1024)
    with pytest.raises(UsageError, match="at most 1023 workers"):
        StartPoint().begin()


def test_a_copy_starts_where_the_original_would(become: BecomeWorker) -> None:
    """A pickled stream is another one: it begins at the same place and counts for itself."""
    become(None)
    start = StartPoint()
    start.set(Cursor(1, 2))
    other = pickle.loads(pickle.dumps(start))
    assert other.begin().start == Cursor(1, 2)
    assert start.epoch == 1


def test_this_process(become: BecomeWorker) -> None:
    """Worker 0 of 1 stands for no workers."""
    become(None)
    assert this_worker() == (0, 1)
    become(2, 3)
    assert this_worker() == (2, 3)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [(0, None, "pass both"), (None, 2, "pass both"), (2, 2, "from 0 to 1"), (-1, 2, "from 0 to 1"), (0, 0, "from 0")],
)
def test_ranks_that_cannot_be(rank: int | None, world_size: int | None, message: str) -> None:
    """One without the other, or beyond the number of ranks."""
    with pytest.raises(UsageError, match=message):
        resolve_rank(rank, world_size)


@pytest.mark.parametrize("processes", [None, "", "1"])
def test_alone(monkeypatch: pytest.MonkeyPatch, processes: str | None) -> None:
    """Without torch.distributed, and without a launcher that says there are more, this is rank 0 of 1."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("WORLD_SIZE", processes)
    assert resolve_rank(None, None) == (0, 1)
    assert resolve_rank(1, 3) == (1, 3)


def test_a_launcher_without_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two processes would read everything: refused, unless it is told which one it is."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 2.*init_process_group first"):
        resolve_rank(None, None)
    assert resolve_rank(1, 2) == (1, 2)
