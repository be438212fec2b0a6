"""`Index`: which samples one or several datasets hold, where each is, and how long. All numpy, some 30 bytes each.

Opening reads the footers and the narrow columns of every shard (0.4 ms for a small one), never the tokens. It says
which rows are handed out: of a sample that was made again only the latest generation, and of those what a filter keeps.
What lies in object storage is fetched by several threads, which are gone when the index is there.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.errors import DatasetError, MissingFile, Unreadable, UsageError
from rollgen.format.keys import Keys
from rollgen.format.reader import ShardReader, StoredDataset, StoredShard, open_dataset, read_row_group
from rollgen.format.retries import read_retries
from rollgen.format.schema import shard_schema
from rollgen.loader.filter import columns_of_filter, passing
from rollgen.loader.places import Place, identity_of, name_of
from rollgen.loader.rewards import SampleRewards, with_rewards
from rollgen.loader.row_groups import columns_of, load_row_group, or_again
from rollgen.loader.samples import RUN, VERSIONS, Samples, offsets_of
from rollgen.remote.cache import PartCache, open_cache
from rollgen.remote.objects import THREADS, ObjectStore
from rollgen.remote.stored import RemoteShard, remote_dataset

if TYPE_CHECKING:
    from rollgen.format.manifest import Manifest
    from rollgen.rollouts import Int64Array

OnDamage = Literal["raise", "skip"]

_LOG = logging.getLogger(__name__)
_JOINED = 512
_KEYS = ("prompt_index", "sample_index")
_LENGTHS = ("prompt_length", "response_length")


class Loss(NamedTuple):
    """What damage took out of a dataset that is read with `on_damage="skip"`."""

    place: str
    """The file, and the row group where it is one."""
    samples: int
    """Rows stored there; found while reading, those of them that were to be handed out."""
    reason: str


class Rows(NamedTuple):
    """Columns of all rows of all datasets, [R], in the order of datasets, shards and rows."""

    prompt_index: Int64Array
    sample_index: npt.NDArray[np.int32]
    generation: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    """Prompt and response together."""
    replayable: npt.NDArray[np.bool_]
    kept: npt.NDArray[np.bool_]
    """Whether the filter keeps it."""


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """S samples that are handed out, of G row groups."""

    datasets: tuple[StoredDataset, ...]
    shards: tuple[StoredShard, ...]
    """Of all datasets."""
    groups: npt.NDArray[np.int64]
    """int64 [G, 2]: shard, and number inside it."""
    group_offsets: Int64Array
    """int64 [G + 1]: the first row of each, counted over everything."""
    rows: Int64Array
    """int64 [S], rising: the rows that are handed out."""
    dataset: npt.NDArray[np.int32]
    """int32 [S]"""
    prompt_index: Int64Array
    """int64 [S]"""
    sample_index: npt.NDArray[np.int32]
    """int32 [S]"""
    generation: npt.NDArray[np.int32]
    """int32 [S]"""
    tokens: npt.NDArray[np.int32]
    """int32 [S], prompt and response together."""
    losses: tuple[Loss, ...]
    rewards: SampleRewards | None = None
    """None when they were not asked for."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def vocab_size(self) -> int:
        """Of the model or models that sampled."""
        return self.datasets[0].manifest.vocab_size

    @property
    def keys(self) -> Keys:
        """Of the samples."""
        return Keys(self.prompt_index, self.sample_index, self.generation)

    def locate(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Row group, and row inside it, of these samples (numbers below S)."""
        rows = self.rows[samples]
        group = np.searchsorted(self.group_offsets, rows, side="right") - 1
        return group, rows - self.group_offsets[group]

    def place(self, group: int) -> tuple[StoredShard, int]:
        """The shard of a row group, and its number inside."""
        shard, number = self.groups[group].tolist()
        return self.shards[shard], number

    def load(
        self,
        group: int,
        scalars: Sequence[str],
        experts: bool,
        opened: Callable[[StoredShard], AbstractContextManager[ShardReader]],
        drop_copy: Callable[[StoredShard], bool],
    ) -> Samples:
        """One row group, decoded, with the support_logprobs if all datasets have them: see `load_row_group`.

        With `experts`, those of its tokens too, and rewards if they were asked for. `opened` gives the shard of which
        that will be read; the copies of damaged ones are dropped, and fetched again.
        """
        stored, number = self.place(group)
        supports = self.has_support_logprobs
        layout = self._manifest(group).routed_experts if experts else None
        part = stored.part(columns_of(scalars, support_logprobs=supports, experts=experts), number)

        def load() -> Samples:
            with opened(part) as shard:
                return load_row_group(
                    shard, number, self.vocab_size, scalars, support_logprobs=supports, experts=layout
                )

        samples = or_again(load, partial(drop_copy, part))
        if self.rewards is None:
            return samples
        place = f"{stored.place}: row group {number}"
        return self.rewards.attached(samples, self.rows_of(group), self._members(group), place)

    def rows_of(self, group: int) -> Int64Array:
        """The rows of a row group that are handed out, rising, counted inside it."""
        rows: Int64Array = self.rows[self._members(group)] - self.group_offsets[group]
        return rows

    def _members(self, group: int) -> slice:
        """The samples of a row group."""
        return slice(*np.searchsorted(self.rows, self.group_offsets[group : group + 2]).tolist())

    def _manifest(self, group: int) -> Manifest:
        """Of the dataset that a row group is in."""
        ends = np.cumsum([len(dataset.shards) for dataset in self.datasets])
        return self.datasets[int(np.searchsorted(ends, self.groups[group, 0], side="right"))].manifest

    @property
    def has_support_logprobs(self) -> bool:
        """Whether all datasets store them."""
        return all(dataset.manifest.support_logprobs for dataset in self.datasets)

    def scalars(self, names: Sequence[str]) -> tuple[str, ...]:
        """These columns, and weight versions and runs where all datasets store them."""
        stored = [dataset.manifest.optional_columns for dataset in self.datasets]
        return (*names, *(name for name in (VERSIONS, RUN) if all(columns[name] for columns in stored)))

    def experts(self) -> tuple[int, int]:
        """Layers, and experts that a token takes in each. Raises UsageError unless all datasets store the same."""
        stored = [dataset.manifest.routed_experts for dataset in self.datasets]
        found = {(each.layers, each.top_k) for each in stored if each is not None}
        if None in stored or len(found) != 1:
            raise UsageError("routed_experts: not all datasets store them, of equally many layers; leave it out")
        return found.pop()

    def loss(self, group: int, error: DatasetError) -> Loss:
        """What is lost with a row group that cannot be read."""
        members, (shard, number) = self._members(group), self.place(group)
        return Loss(f"{shard.place}: row group {number}", members.stop - members.start, str(error))

    def fingerprint(self) -> str:
        """SHA-256 of what is handed out: the shards that were read, the row groups, the samples and their lengths."""
        sha256 = hashlib.sha256()
        for number in np.unique(self.groups[:, 0]).tolist():
            shard = self.shards[number]
            sha256.update(f"{shard.config_digest} {shard.name} {shard.sha256()}\n".encode())
        for array in (self.groups, self.rows, self.tokens):
            sha256.update(array.tobytes())
        return sha256.hexdigest()

    def samples_fingerprint(self) -> str:
        """SHA-256 of which samples are handed out, in the order of their keys, and of their lengths.

        It is the same wherever they are stored, as after a compaction. It does not cover their tokens.
        """
        digests = [dataset.manifest.config_digest for dataset in self.datasets]
        sha256, order = hashlib.sha256("\n".join(digests).encode()), self._by_key()
        for array in (self.dataset, self.prompt_index, self.sample_index, self.generation, self.tokens):
            sha256.update(array[order].tobytes())
        return sha256.hexdigest()

    def reward_fingerprints(self) -> dict[str, str]:
        """By the names of the rewards that were asked for, SHA-256 of them and of their tokens, in the keys' order."""
        return {} if self.rewards is None else self.rewards.fingerprints(self._by_key())

    def _by_key(self) -> Int64Array:
        """int64 [S]"""
        order: Int64Array = np.lexsort((*reversed(self.keys), self.dataset))
        return order


def check_some(index: Index, places: Sequence[Place], filter: pc.Expression | None) -> None:
    """Raise UsageError for an index of no sample, opened in these places with this filter."""
    if not len(index):
        raise UsageError(
            f"{', '.join(map(name_of, places))}: no sample to read{' passes the filter' * (filter is not None)}"
        )


def open_index(
    places: Sequence[Place],
    *,
    cache: Callable[[], PartCache] = open_cache,
    filter: pc.Expression | None = None,
    allow_unreplayable: bool = False,
    all_generations: bool = False,
    on_damage: OnDamage = "raise",
    rewards: Sequence[str] = (),
) -> Index:
    """Open datasets of one vocabulary; what is fetched of those in object storage is kept in the `cache`.

    Raises DatasetError when a directory is not a complete, undamaged dataset (with `on_damage="skip"`, damaged shards
    and row groups are left out and reported, and never an earlier generation taken for a lost one), and UsageError for
    no dataset or one twice, for different vocabularies, for a filter over columns that are not there, and for samples
    that cannot be replayed (penalties, biases: relative logits were changed inside the support), unless
    `allow_unreplayable`. `rewards` are the names of those that all samples must have: see `with_rewards`.
    """
    with ExitStack() as copies:
        index = _index_of(
            _open_datasets(places, cache, copies),
            filter,
            allow_unreplayable=allow_unreplayable,
            all_generations=all_generations,
            on_damage=on_damage,
        )
        return with_rewards(index, places, rewards)


def _index_of(
    datasets: tuple[StoredDataset, ...],
    filter: pc.Expression | None,
    *,
    allow_unreplayable: bool,
    all_generations: bool,
    on_damage: OnDamage,
) -> Index:
    shards = [(number, stored) for number, dataset in enumerate(datasets) for stored in dataset.shards]
    retried = any(dataset.manifest.retries for dataset in datasets)  # without, every generation is 0
    reader = _Reader(filter, columns_of_filter(filter, datasets), retried=retried, on_damage=on_damage)
    reader.read([stored for _, stored in shards])
    rows = reader.rows()
    group_offsets = offsets_of(np.array(reader.group_rows, np.int64))
    groups = np.array(reader.groups, np.int64).reshape(-1, 2)
    shard_dataset = np.array([dataset for dataset, _ in shards], np.int64)
    dataset_of_row = np.repeat(shard_dataset[groups[:, 0]], np.diff(group_offsets)).astype(np.int32)
    shard_of_row = np.repeat(groups[:, 0], np.diff(group_offsets))
    current = _current_rows(rows, dataset_of_row, shard_of_row, [stored for _, stored in shards])
    taken = rows.kept if all_generations else rows.kept & current
    if reader.losses and retried:
        overtaken = taken & _overtaken(rows, dataset_of_row, datasets)
        taken &= ~overtaken
        reader.lose_overtaken(int(overtaken.sum()))
    if not allow_unreplayable:
        _check_replayable(rows.replayable | ~taken, shard_of_row, [stored for _, stored in shards])
    chosen = np.flatnonzero(taken)
    return Index(
        datasets=datasets,
        shards=tuple(stored for _, stored in shards),
        groups=groups,
        group_offsets=group_offsets,
        rows=chosen,
        dataset=dataset_of_row[chosen],
        prompt_index=rows.prompt_index[chosen],
        sample_index=rows.sample_index[chosen],
        generation=rows.generation[chosen],
        tokens=rows.tokens[chosen],
        losses=tuple(reader.losses),
    )


def _open_datasets(
    places: Sequence[Place], cache: Callable[[], PartCache], copies: ExitStack
) -> tuple[StoredDataset, ...]:
    """Of those in object storage the small files are copied; the copies are left to `copies`."""
    if not places:
        raise UsageError("no dataset directory was given")
    paths = [name_of(place) for place in places]
    resolved = [identity_of(place) for place in places]
    if len(set(resolved)) < len(resolved):
        raise UsageError("the same dataset directory was given twice: its samples would be, too")
    datasets = tuple(
        copies.enter_context(remote_dataset(place, cache())) if isinstance(place, ObjectStore) else open_dataset(place)
        for place in places
    )
    for path, dataset in zip(paths, datasets, strict=True):
        if dataset.manifest.vocab_size != datasets[0].manifest.vocab_size:
            raise UsageError(
                f"{path}: the model's vocabulary is {dataset.manifest.vocab_size}, that of {paths[0]} "
                f"{datasets[0].manifest.vocab_size}; only datasets of one vocabulary can share batches"
            )
        if dataset.manifest.tokenizer_sha256 != datasets[0].manifest.tokenizer_sha256:
            _LOG.warning("%s and %s: the tokenizers differ: do ids mean the same in both?", paths[0], path)
    return datasets


def _opened_ahead(shards: Sequence[StoredShard]) -> Iterator[Callable[[], ShardReader]]:
    """How to open each shard; those in object storage are being opened by then, and the next ones too."""
    if not any(isinstance(stored, RemoteShard) for stored in shards):
        yield from (stored.open for stored in shards)
        return
    pending: deque[Future[ShardReader]] = deque()
    with ThreadPoolExecutor(THREADS, "rollgen-index") as threads:
        try:
            for stored in shards:
                pending.append(threads.submit(stored.open))
                if len(pending) > 2 * THREADS:
                    yield pending.popleft().result
            while pending:
                yield pending.popleft().result
        finally:
            for future in pending:
                future.add_done_callback(_close_unused)


def _close_unused(future: Future[ShardReader]) -> None:
    if future.exception() is None:
        future.result().close()


class _Reader:
    """Reads the narrow columns of one shard after the other."""

    def __init__(
        self, filter: pc.Expression | None, filtered: Sequence[str], *, retried: bool, on_damage: OnDamage
    ) -> None:
        self._filter = filter
        self._names = [*_KEYS, *_LENGTHS, "replayable", *(["generation"] if retried else [])]
        self._filtered = [name for name in filtered if name not in self._names]
        self._skips = on_damage == "skip"
        self._tables: list[pa.Table] = []
        self._joined: list[pa.Table] = []
        self._kept: list[npt.NDArray[np.bool_]] = []
        self.groups: list[tuple[int, int]] = []
        self.group_rows: list[int] = []
        self.losses: list[Loss] = []

    def read(self, shards: Sequence[StoredShard]) -> None:
        """Add the rows of all shards, in this order."""
        parts = [stored.part([*self._names, *self._filtered]) for stored in shards]
        for number, (stored, open) in enumerate(zip(shards, _opened_ahead(parts), strict=True)):
            self._read(number, stored, open)

    def _read(self, number: int, stored: StoredShard, open: Callable[[], ShardReader]) -> None:
        try:
            with open() as shard:
                for group, count in enumerate(shard.row_group_rows):
                    self._read_group(shard, number, group, count)
        except (MissingFile, Unreadable):  # no damage
            raise
        except DatasetError as error:
            if not self._skips:
                raise
            self._lose(stored.place, stored.line.rows if stored.line else 0, error)

    def _read_group(self, shard: ShardReader, number: int, group: int, rows: int) -> None:
        try:
            table = read_row_group(shard, group, [*self._names, *self._filtered], use_threads=False)
        except Unreadable:
            raise
        except DatasetError as error:
            if not self._skips:
                raise
            self._lose(f"{shard.place}: row group {group}", rows, error)
        else:
            self._add(table, number, group, rows)

    def _lose(self, place: str, samples: int, error: DatasetError) -> None:
        self.losses.append(Loss(place, samples, str(error)))
        report_loss(self.losses[-1])

    def lose_overtaken(self, samples: int) -> None:
        """Samples of which only an earlier generation is left: the later one was lost, or is not made yet."""
        if samples:
            self.losses.append(
                Loss("retries", samples, "their later generation is not there, and may be what is damaged")
            )
            report_loss(self.losses[-1])

    def _add(self, table: pa.Table, shard: int, group: int, rows: int) -> None:
        self.groups.append((shard, group))
        self.group_rows.append(rows)
        if self._filter is not None:
            self._kept.append(passing(table, self._filter))
        self._tables.append(table.select(self._names) if self._filtered else table)
        if len(self._tables) == _JOINED:
            self._join()

    def _join(self) -> None:
        """Many small tables take many times the memory of one."""
        self._joined.append(pa.concat_tables(self._tables).combine_chunks())
        self._tables = []

    def rows(self) -> Rows:
        """Everything that was read."""
        schema = shard_schema(support_logprobs=False)
        table = pa.concat_tables(
            [pa.schema([schema.field(name) for name in self._names]).empty_table(), *self._joined, *self._tables]
        )
        columns = {name: table[name].to_numpy() for name in self._names}
        return Rows(
            columns["prompt_index"],
            columns["sample_index"],
            columns.get("generation", np.zeros(len(table), np.int32)),
            columns["prompt_length"] + columns["response_length"],
            columns["replayable"],
            np.concatenate(self._kept) if self._kept else np.ones(len(table), np.bool_),
        )


def report_loss(loss: Loss) -> None:
    """Say in the log what is not read."""
    _LOG.warning("%s samples are lost: %s", loss.samples, loss.reason)


def _current_rows(
    rows: Rows, dataset: npt.NDArray[Any], shard: npt.NDArray[Any], shards: Sequence[StoredShard]
) -> npt.NDArray[np.bool_]:
    """Which rows have the highest generation of their sample in their dataset. Raises as `Keys.current`."""
    keys, current = Keys(rows.prompt_index, rows.sample_index, rows.generation), np.ones(len(dataset), np.bool_)
    edges = [0, *(np.flatnonzero(np.diff(dataset)) + 1).tolist(), len(dataset)]
    for start, end in pairwise(edges):

        def shard_of(row: int, start: int = start) -> StoredShard:
            return shards[int(shard[start + row])]

        current[start:end] = keys.take(slice(start, end)).current(shard_of)
    return current


def _overtaken(rows: Rows, dataset: npt.NDArray[Any], datasets: Sequence[StoredDataset]) -> npt.NDArray[np.bool_]:
    """Which rows a retry was to make again: they are not current, though the later row may not be there."""
    overtaken = np.zeros(len(dataset), np.bool_)
    for number, stored in enumerate(datasets):
        for retries in read_retries(stored.directory, stored.manifest):
            earlier = np.flatnonzero((dataset == number) & (rows.generation < retries.generation))
            listed = pa.table({"prompt": retries.prompt_index, "sample": retries.sample_index})
            found = pa.table(
                {"prompt": rows.prompt_index[earlier], "sample": rows.sample_index[earlier], "row": earlier}
            ).join(listed, ["prompt", "sample"], join_type="left semi")
            overtaken[found["row"].to_numpy()] = True
    return overtaken


def _check_replayable(
    usable: npt.NDArray[np.bool_], shard: npt.NDArray[np.int64], shards: Sequence[StoredShard]
) -> None:
    """Raise UsageError when a sample would be handed out that says that it cannot be replayed."""
    if not usable.all():
        first = shards[shard[int(usable.argmin())]]
        refused = int((~usable).sum())
        raise UsageError(
            f"{first.place}: the first of {refused} samples that cannot be replayed (penalties or biases changed the "
            "logits inside the support); allow_unreplayable=True in Python, --allow-unreplayable on the command line, "
            "takes them all the same"
        )
