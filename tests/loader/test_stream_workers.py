"""RolloutStream in real processes: DataLoader workers, StatefulDataLoader, and the ranks of torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import clear_frames
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
from torch.utils.data import DataLoader

from rollgen.errors import DatasetError, UsageError
from rollgen.loader import RolloutBatch, RolloutStream
from rollgen.rollouts import Completion

Key = tuple[int, int, int]
KeysOf = Callable[[RolloutBatch], list[Key]]
Batches = list[list[Key]]


@pytest.fixture
def dataset(
    write_shards: Callable[..., Path],
    make_completion: Callable[..., Completion],
    once: Callable[[str, Callable[[], Path]], Path],
) -> Path:
    """Four shards of 7 samples, of 7 prompts."""
    shards = [[make_completion(p, k, tokens=3 + (5 * p + 7 * k) % 13) for p in range(7)] for k in range(4)]
    return once("workers", lambda: write_shards(shards))


@pytest.fixture
def make_stream(dataset: Path) -> Callable[..., RolloutStream]:
    """`make_stream(**changes)`: over the dataset, some nine batches an epoch."""
    return lambda **changes: RolloutStream(dataset, **({"batch_tokens": 40, "seed": 2} | changes))


@pytest.fixture
def expected(make_stream: Callable[..., RolloutStream], keys_of: KeysOf) -> list[Batches]:
    """The batches of four epochs, without workers."""
    stream = make_stream()
    return [[keys_of(batch) for batch in stream] for _ in range(4)]


def data_loader(stream: RolloutStream, workers: int, **changes: Any) -> DataLoader[RolloutBatch]:
    return DataLoader(stream, batch_size=None, num_workers=workers, **changes)


@contextmanager
def raises_in_worker(error: type[Exception], match: str) -> Iterator[None]:
    """Like `pytest.raises`. PyTorch's copy of an error refers to itself, and so keeps workers until they time out."""
    with pytest.raises(error, match=match) as caught:
        yield
    clear_frames(caught.tb)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_epochs(
    make_stream: Callable[..., RolloutStream],
    expected: list[Batches],
    keys_of: KeysOf,
    workers: int,
    persistent: bool,
) -> None:
    """In the same order; epochs follow by themselves, and `set_epoch` reaches workers that run already."""
    stream = make_stream()
    loader = data_loader(stream, workers, persistent_workers=persistent)
    for epoch in range(2):
        assert stream.epoch == epoch
        assert [keys_of(batch) for batch in loader] == expected[epoch]
    stream.set_epoch(3)
    assert [keys_of(batch) for batch in loader] == expected[3]
    stream.set_epoch(3)
    assert [keys_of(batch) for batch in loader] == expected[3]


def test_spawned_workers(make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf) -> None:
    """They share the start although nothing is forked: a state in the middle of epoch 1, then epoch 2."""
    stream = make_stream()
    stream.set_epoch(1)
    batch = [batch for batch, _ in zip(stream, range(3), strict=False)][-1]
    stream.load_state_dict(stream.state_dict(batch))
    loader = data_loader(stream, 1, multiprocessing_context="spawn", persistent_workers=True)
    assert [keys_of(batch) for batch in loader] == expected[1][3:]
    assert [keys_of(batch) for batch in loader] == expected[2]


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_resume_with_other_workers(
    make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf, persistent: bool
) -> None:
    """Stopped in the middle with two workers that are batches ahead: the state is of what was used, for any number."""
    stream = make_stream()
    loader = data_loader(stream, 2, persistent_workers=persistent)
    for used, batch in enumerate(loader, 1):
        assert keys_of(batch) == expected[0][used - 1]
        if used == 4:
            break
    state = json.loads(json.dumps(stream.state_dict(batch)))
    for workers in (0, 1, 2):
        restored = make_stream()
        restored.load_state_dict(state)
        assert [keys_of(batch) for batch in data_loader(restored, workers)] == expected[0][4:]
    stream.load_state_dict(state)  # the same loader, its workers running
    assert [keys_of(batch) for batch in loader] == expected[0][4:]
    assert [keys_of(batch) for batch in loader] == expected[1]


def test_a_loop_that_is_left_early(
    make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf
) -> None:
    """The next iteration is the next epoch, whole, whatever workers had made ahead."""
    stream = make_stream()
    loader = data_loader(stream, 2, persistent_workers=True)
    assert keys_of(next(iter(loader))) == expected[0][0]
    assert [keys_of(batch) for batch in loader] == expected[1]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 0), (0, 2)])
def test_another_number_of_workers(
    make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf, before: int, after: int
) -> None:
    """It goes on with the next epoch, whoever made the one before."""
    stream = make_stream()
    assert [keys_of(batch) for batch in data_loader(stream, before)] == expected[0]
    assert [keys_of(batch) for batch in data_loader(stream, after)] == expected[1]


def test_states_without_a_batch_are_the_workers(make_stream: Callable[..., RolloutStream]) -> None:
    """The main process cannot know how far it has used what workers made."""
    stream = make_stream()
    assert stream.state_dict()["position"] == 0
    list(data_loader(stream, 1))
    with pytest.raises(UsageError, match="pass the batch that was used last"):
        stream.state_dict()


def test_more_workers_than_batches(
    make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf
) -> None:
    """A worker without a batch ends at once; padded and dropped steps are the same for all ranks."""
    stream = make_stream(batch_tokens=10**6)
    (batch,) = data_loader(stream, 2)
    assert sorted(keys_of(batch)) == sorted(key for keys in expected[0] for key in keys)


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_ranks_with_workers(
    make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf, uneven: Any
) -> None:
    """Two ranks of two workers, one rank after the other: step by step the global order."""
    ranks = [
        [keys_of(batch) for batch in data_loader(make_stream(rank=rank, world_size=2, uneven=uneven), 2)]
        for rank in range(2)
    ]
    seen = [keys for step in zip(*ranks, strict=True) for keys in step]
    whole = len(expected[0]) // 2 * 2
    rest = [] if uneven == "drop" else [*expected[0][whole:], *[[]] * (len(expected[0]) % 2)]
    assert seen == expected[0][:whole] + rest


def test_damage_reaches_the_main_process(
    make_stream: Callable[..., RolloutStream], dataset: Path, damage: Callable[..., Path]
) -> None:
    """As the error that it is, or as `batch.lost` of the batches that came."""
    path = damage(dataset, 2, "sampling_mask")
    with raises_in_worker(DatasetError, rf"{path.name}: row group 0: damaged"):
        list(data_loader(make_stream(), 2))
    batches = list(data_loader(make_stream(on_damage="skip"), 2))
    assert (sum(batch.lost for batch in batches), sum(map(len, batches))) == (7, 21)


def test_a_filtered_stream_goes_to_workers(make_stream: Callable[..., RolloutStream], keys_of: KeysOf) -> None:
    """Which rows pass is decided once, and travels with the stream."""
    stream = make_stream(filter=pc.field("sample_index") == 1)
    keys = [key for batch in data_loader(stream, 1) for key in keys_of(batch)]
    assert sorted(keys) == [(0, p, 1) for p in range(7)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_of_workers(
    make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf
) -> None:
    """A DataLoader pins them in a thread of its own; cursors, lists and the support come along."""
    batches = list(data_loader(make_stream(), 2, pin_memory=True))
    assert all(batch.input_ids.is_pinned() and batch.support.ids.is_pinned() for batch in batches)
    assert [keys_of(batch) for batch in batches] == expected[0]
    assert batches[-1].cursor == (1, 0)


def stateful_loader(stream: RolloutStream, workers: int, **changes: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(stream, batch_size=None, num_workers=workers, **changes)


def restored(make_stream: Callable[..., RolloutStream], state: dict[str, Any], workers: int, **changes: Any) -> Any:
    loader = stateful_loader(make_stream(), workers, **changes)
    loader.load_state_dict(state)
    return loader


without_vitals = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
"""torchdata 0.11 calls it whenever a StatefulDataLoader is made."""


@without_vitals
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("used", [0, 4, -1])
def test_stateful_loader_in_the_middle(
    make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf, workers: int, used: int
) -> None:
    """Before the first batch, after the fourth, before the last: the rest, then the epoch after, in a fresh loader."""
    used %= len(expected[0])
    batches = iter(loader := stateful_loader(make_stream(), workers))
    assert [keys_of(next(batches)) for _ in range(used)] == expected[0][:used]
    other = restored(make_stream, loader.state_dict(), workers)
    assert [keys_of(batch) for batch in other] == expected[0][used:]
    assert [keys_of(batch) for batch in other] == expected[1]


@without_vitals
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_stateful_loader_at_the_end_and_after(
    make_stream: Callable[..., RolloutStream],
    expected: list[Batches],
    keys_of: KeysOf,
    workers: int,
    persistent: bool,
) -> None:
    """At the end of an epoch the next one follows; in the middle of the second, a resume of a resume goes on."""
    loader = stateful_loader(make_stream(), workers, persistent_workers=persistent)
    assert [keys_of(batch) for batch in loader] == expected[0]
    loader = restored(make_stream, loader.state_dict(), workers, persistent_workers=persistent)
    seen: Batches = []
    for stop in (2, 5):
        batches = iter(loader)
        seen += [keys_of(next(batches)) for _ in range(stop - len(seen))]
        loader = restored(make_stream, loader.state_dict(), workers, persistent_workers=persistent)
    assert seen + [keys_of(batch) for batch in loader] == expected[1]
    assert [keys_of(batch) for batch in loader] == expected[2]


@without_vitals
def test_a_batch_of_a_stateful_loader_has_a_state_too(
    make_stream: Callable[..., RolloutStream], expected: list[Batches], keys_of: KeysOf
) -> None:
    """Which fits any number of workers, where the loader's own does not."""
    stream = make_stream()
    batches = iter(stateful_loader(stream, 2))
    state = stream.state_dict([next(batches) for _ in range(3)][-1])
    other = make_stream()
    other.load_state_dict(state)
    assert [keys_of(batch) for batch in stateful_loader(other, 1)] == expected[0][3:]


RANK_SCRIPT = '''
"""A rank: keys of its batches as JSON lines, one epoch to a file, a collective in each step."""
import json, os, sys
import torch
from torch import distributed
from torch.utils.data import DataLoader
from rollgen.errors import UsageError
from rollgen.loader import RolloutStream

dataset, out, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
errors = []
try:
    RolloutStream(dataset)
except UsageError as error:
    errors.append(str(error))
world_size = os.environ.pop("WORLD_SIZE")
early = RolloutStream(dataset)
os.environ["WORLD_SIZE"] = world_size
distributed.init_process_group("gloo")
try:
    iter(early)
except UsageError as error:
    errors.append(str(error))
rank = distributed.get_rank()
try:
    RolloutStream(dataset, seed=rank)
except UsageError as error:
    errors.append(str(error))
stream = RolloutStream(dataset, batch_tokens=40, seed=2)
steps = []
for batch in DataLoader(stream, batch_size=None, num_workers=workers):
    total = torch.tensor([len(batch)])
    distributed.all_reduce(total)
    keys = list(zip(batch.dataset_index.tolist(), batch.prompt_index.tolist(), batch.sample_index.tolist()))
    steps.append({"keys": keys, "total": total.item(), "state": stream.state_dict(batch)})
with open(f"{out}/{rank}.json", "w") as file:
    json.dump({"steps": steps, "errors": errors}, file)
distributed.destroy_process_group()
'''


def test_torchrun(tmp_path: Path, dataset: Path, expected: list[Batches]) -> None:
    """Ranks from torch.distributed: all batches, in step, with one state; streams made too early, or unlike, say so."""
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*launcher, str(script), str(dataset), str(tmp_path), "1"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    steps = list(zip(*(rank["steps"] for rank in ranks), strict=True))
    seen = [[tuple(key) for key in one["keys"]] for step in steps for one in step]
    assert seen == expected[0] + [[]] * (len(expected[0]) % 2)
    assert all(one["state"] == other["state"] for one, other in steps)
    assert all(one["total"] == other["total"] == len(one["keys"] + other["keys"]) for one, other in steps)
    for number, rank in enumerate(ranks):
        before, early, other = rank["errors"]
        assert "WORLD_SIZE is 2, but torch.distributed is not initialised" in before
        assert f"made for rank 0 of 1, torch.distributed says {number} of 2" in early
        assert other == f"rank {1 - number} has another seed than this one: {1 - number}, not {number}"
