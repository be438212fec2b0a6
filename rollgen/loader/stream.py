"""`RolloutStream`: batches of one or several datasets, in an order that ranks, workers and restarts do not change.

    stream = RolloutStream("out/", batch_tokens=65_536)
    loader = DataLoader(stream, batch_size=None, num_workers=2, pin_memory=True)
    for epoch in range(stream.epoch, 3):
        stream.set_epoch(epoch)
        for batch in loader:
            step(batch.to("cuda", non_blocking=True))
            checkpoint["stream"] = stream.state_dict(batch)

An epoch is one sequence of *global* batches (`order.py`). A step takes the next `world_size` of them, one for each
rank, and the workers of a rank take its steps in turn. So a position is a number of global batches: it means the same
to any number of ranks and workers.

Each process keeps the decoded row groups it uses (256 MB at most) and makes the next batches in a thread while the
caller trains. Nothing is shared between processes but the epoch and the position to start at.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import IterableDataset

from rollgen.arguments import check_choices, check_numbers
from rollgen.errors import ResumeRefused, UsageError
from rollgen.format.commit import live_writers
from rollgen.format.row_groups import CACHE_BYTES
from rollgen.loader.batch import Layout, RolloutBatch
from rollgen.loader.index import Loss, OnDamage, check_some, open_index
from rollgen.loader.maker import BatchMaker
from rollgen.loader.order import BatchSettings, Epoch, plan_epoch, units_of
from rollgen.loader.places import Place, name_of, place_of
from rollgen.loader.rewards import names_of
from rollgen.loader.schedule import (
    PLACE_KEYS,
    Cursor,
    Progress,
    Share,
    StartPoint,
    Uneven,
    check_rank,
    check_same_on_all_ranks,
    resolve_rank,
    this_worker,
)
from rollgen.remote.cache import MAX_BYTES, open_cache
from rollgen.remote.objects import ObjectStore
from rollgen.remote.stored import remote_writers

if TYPE_CHECKING:
    import pyarrow.compute as pc

    from rollgen.format.manifest import Manifest

SHUFFLE_WINDOW: Final = 1 << 19
"""Tokens that are shuffled among each other: some ten row groups."""
PREFETCH: Final = 2
"""Batches made ahead by the thread."""

STATE_VERSION: Final = 1
_REWARDS: Final = "rewards"
"""Key of a state; one without it does not say which rewards it is of."""

_CHANGED: Final = {
    "dataset": "the dataset, or what the filter keeps of it, has changed since (as by `rollgen compact`)",
    _REWARDS: "other rewards were asked for, or the samples were scored again since",
}

_LOG = logging.getLogger(__name__)


class RolloutStream(IterableDataset[RolloutBatch]):
    """The batches of a rank, every sample of the datasets exactly once an epoch over all ranks and workers.

    paths              a dataset directory or URL of object storage, or several of one vocabulary
    batch_tokens       most prompt and response tokens of a batch, padding not counted. A sample, or a group, that is
                       larger is a batch of its own (the log says how many are)
    shuffle, seed      a new order each epoch; without, the order in which samples are stored
    group_by_prompt    all samples of a (dataset, prompt) in one batch
    bucket_by_length   batches of samples of similar length: less padding
    shuffle_window     tokens that are shuffled among each other; memory grows with it
    layout, pad_id     see `RolloutBatch`
    filter             a pyarrow expression over the columns, `pc.field("finish_reason") == "stop"`
    allow_unreplayable take samples whose relative logits were changed inside the support
    on_damage          "raise" DatasetError for a damaged row group, or "skip" it: the log, `losses` and `batch.lost`
                       say what was lost
    rank, world_size   default: those of torch.distributed, which must be initialised before; else 0 of 1
    uneven             when the last step has no batch for every rank: "pad" with empty batches (see `RolloutBatch`), or
                       "drop" it
    prefetch           batches made ahead in a thread; 0: none, no thread
    cache_bytes        decoded row groups and texts that a process keeps at most, those of a batch in the making apart
    routed_experts     whether batches have those of their tokens: a lot to read, some hundred numbers a token
    rewards            name or names of the rewards that batches have: "correct", or "correct.format" for a further
                       value that the scorer gave. All samples must have them
    disk_cache         below which directory this machine keeps what is fetched from object storage, in `rollgen/parts`;
                       default `~/.cache`
    disk_cache_bytes   and how much of it at most; default 32 GiB

    Use it with `DataLoader(stream, batch_size=None)`, torchdata's StatefulDataLoader, or as it is; one at a time and
    in order, because a state counts what came before. The first iteration starts at `epoch`, or where `load_state_dict`
    says; each further one is the next epoch.

    Raises DatasetError and UsageError, see `open_index`.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        batch_tokens: int = 65_536,
        shuffle: bool = True,
        seed: int = 0,
        group_by_prompt: bool = False,
        bucket_by_length: bool = False,
        shuffle_window: int = SHUFFLE_WINDOW,
        layout: Layout = "padded",
        pad_id: int = 0,
        filter: pc.Expression | None = None,
        allow_unreplayable: bool = False,
        on_damage: OnDamage = "raise",
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "pad",
        prefetch: int = PREFETCH,
        cache_bytes: int = CACHE_BYTES,
        routed_experts: bool = False,
        rewards: str | Sequence[str] | None = (),
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_bytes: int = MAX_BYTES,
    ) -> None:
        check_choices(layout=(layout, Layout), on_damage=(on_damage, OnDamage), uneven=(uneven, Uneven))
        check_numbers(1, batch_tokens=batch_tokens, shuffle_window=shuffle_window)
        check_numbers(0, seed=seed, prefetch=prefetch, cache_bytes=cache_bytes, pad_id=pad_id)
        self._given_rank = rank is not None
        self._rank, self._world_size = resolve_rank(rank, world_size)
        given = [paths] if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable) else paths
        places = [place_of(path) for path in given]
        if self._world_size > 1:
            _check_no_writer(places)
        self._index = open_index(
            places,
            cache=partial(open_cache, disk_cache, disk_cache_bytes),
            filter=filter,
            allow_unreplayable=allow_unreplayable,
            on_damage=on_damage,
            rewards=names_of(rewards),
        )
        check_some(self._index, places, filter)
        self._settings = BatchSettings(
            int(batch_tokens),
            bool(shuffle),
            int(seed),
            bool(group_by_prompt),
            bool(bucket_by_length),
            int(shuffle_window),
        )
        self._units = units_of(self._index, group_by_prompt=group_by_prompt)
        self._planned: tuple[int, Epoch] | None = None
        self._layout, self._pad_id = layout, pad_id
        self._skips_damage, self._uneven = on_damage == "skip", uneven
        self._prefetch, self._cache_bytes = prefetch, cache_bytes
        self._routed_experts = routed_experts
        if routed_experts:
            self._index.experts()  # or this is refused here, not in a worker
        self._start = StartPoint()
        self._lost: dict[int, Loss] = {}
        self._identity = {
            "version": STATE_VERSION,
            "dataset": self._index.fingerprint(),
            _REWARDS: self._index.reward_fingerprints(),
            **asdict(self._settings),
        }
        check_same_on_all_ranks(self._identity, self._world_size)
        self._report_oversized()

    @property
    def vocab_size(self) -> int:
        """Of the model or models that sampled; support ids lie below it."""
        return self._index.vocab_size

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Of each dataset, by `dataset_index`."""
        return tuple(dataset.manifest for dataset in self._index.datasets)

    @property
    def samples(self) -> int:
        """How many samples an epoch has, over all ranks."""
        return len(self._index)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What damage took so far, as far as this process knows.

        Of a sample whose later generation was in there, the earlier one is handed out.
        """
        return *self._index.losses, *self._lost.values()

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration begins, or continues."""
        return self._start.epoch

    def steps(self, epoch: int) -> int:
        """Batches that each rank gets in a whole epoch. With shuffling it differs a little between epochs."""
        return self._share(Cursor(epoch, 0)).steps

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin this epoch; nothing changes where it would begin or continue it anyway.

        Call it in the main process, between iterations. It reaches DataLoader workers, persistent ones too.
        """
        check_numbers(0, epoch=epoch)
        if epoch != self.epoch or self._start.was_used:
            self._start.set(Cursor(epoch, 0))

    def state_dict(self, batch: RolloutBatch | None = None) -> dict[str, Any]:
        """Where to continue once every rank has used `batch`, as JSON values: for any number of ranks and workers.

        Without a batch: where the iteration of this very process stands, which is what StatefulDataLoader asks of each
        of its workers; such a state fits the same ranks and workers only.
        """
        if batch is None:
            return self._identity | self._start.state(self._rank, self._world_size)
        if batch.cursor is None:
            raise UsageError("state_dict: this batch did not come from a stream")
        return self._identity | batch.cursor._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a state.

        Raises ResumeRefused when the datasets, or a setting that decides about batches, are not those of the state:
        its position would mean other samples. So it does for other rewards, if the state says which it is of.
        """
        if not isinstance(state, Mapping):
            raise UsageError("load_state_dict: not the state of a stream")
        if _REWARDS not in state:
            if self._identity[_REWARDS]:
                _LOG.warning("the state does not say which rewards it is of: that they are the same is not checked")
            state = {**state, _REWARDS: self._identity[_REWARDS]}
        for name in (*self._identity, *Cursor._fields):
            if name not in state:
                raise UsageError(f"load_state_dict: not the state of a stream: it has no {name!r}")
        for name, value in self._identity.items():
            if state[name] != value:
                what = _CHANGED.get(name, f"{name} was {state[name]!r}, is {value!r}")
                raise ResumeRefused(f"this stream cannot continue from the state: {what}")
        for name in PLACE_KEYS & state.keys():
            check_numbers(0, **{name: state[name]})
        if state["position"] and state["position"] >= len(self._plan(state["epoch"])):
            raise UsageError(f"load_state_dict: epoch {state['epoch']} has no batch {state['position']}")
        self._start.load(state, self._rank, self._world_size)

    def __iter__(self) -> Iterator[RolloutBatch]:
        if not self._given_rank:
            check_rank(self._rank, self._world_size)
        progress = self._start.begin()
        share = self._share(progress.start)
        if not share.steps:
            _LOG.warning("epoch %d: fewer batches than ranks are left: all are dropped", progress.start.epoch)
        return self._iterate(self._plan(progress.start.epoch), share.batches(progress.done), progress)

    def _iterate(
        self, epoch: Epoch, wanted: Iterator[tuple[int | None, Cursor]], progress: Progress
    ) -> Iterator[RolloutBatch]:
        with BatchMaker(
            self._index,
            self._units,
            epoch,
            layout=self._layout,
            pad_id=self._pad_id,
            cache_bytes=self._cache_bytes,
            lost=self._lost if self._skips_damage else None,
            routed_experts=self._routed_experts,
        ) as maker:
            for batch in _ahead(maker.make, wanted, self._prefetch):
                self._start.check_undisturbed()
                progress.done += 1
                yield batch

    def _share(self, start: Cursor) -> Share:
        worker, workers = this_worker()
        return Share(start, len(self._plan(start.epoch)), self._rank, self._world_size, worker, workers, self._uneven)

    def _plan(self, epoch: int) -> Epoch:
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, plan_epoch(self._units, self._settings, epoch)
        return self._planned[1]

    def _report_oversized(self) -> None:
        over = self._units.tokens > self._settings.batch_tokens
        if over.any():
            _LOG.warning(
                "%s larger than batch_tokens=%d: %d, each a batch of its own; the largest has %d tokens",
                "prompt groups" if self._settings.group_by_prompt else "samples",
                self._settings.batch_tokens,
                over.sum(),
                self._units.tokens.max(),
            )


def _ahead(
    make: Callable[..., RolloutBatch], wanted: Iterable[tuple[int | None, Cursor]], depth: int
) -> Iterator[RolloutBatch]:
    """`make(*wanted)` one after the other, up to `depth` of them ahead of their use, in a thread."""
    if depth == 0:
        yield from starmap(make, wanted)
        return
    with ThreadPoolExecutor(1, "rollgen-loader") as thread:
        pending: deque[Future[RolloutBatch]] = deque()
        try:
            for arguments in wanted:
                pending.append(thread.submit(make, *arguments))
                if len(pending) > depth:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _check_no_writer(places: Sequence[Place]) -> None:
    """Raise UsageError while a dataset grows: ranks that open it one after the other would read different ones.

    In object storage, a writer that has died there lately takes a minute to be told from one that lives.
    """
    for place in places:
        writers = remote_writers(place, _LOG.warning) if isinstance(place, ObjectStore) else live_writers(place)
        if writers:
            raise UsageError(
                f"{name_of(place)}: writer {min(writers)!r} is adding to it, so that ranks could not agree on what it "
                "holds; wait for it, or stop it"
            )
