"""A dataset in object storage, for those who read it: what it holds, and its shards, of which parts are fetched.

The small files (manifest, journal, retry lists) are copied when the dataset is opened, and read by the code that reads
those of a directory. Shards stay where they are: `RemoteShard.part` says what of one will be read, and `open` fetches
that and no more. Row groups are kept in a `PartCache`, columns of all row groups are not: they are read once.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from rollgen.errors import MissingFile, RollgenError
from rollgen.format.journal import RECORD_FILE, parse_shard_name, read_journal
from rollgen.format.manifest import MAX_MANIFEST_BYTES, Manifest
from rollgen.format.reader import (
    ShardReader,
    StoredDataset,
    StoredShard,
    check_footer_hash,
    check_size,
    open_dataset,
    open_shard,
)
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR, MANIFEST_FILE, PLAN_FILE, retry_file
from rollgen.remote.cache import PartCache, keeping
from rollgen.remote.lease import State, Watch, writer_of_lock
from rollgen.remote.objects import ObjectStore, for_each
from rollgen.remote.partial import Part, fetch_footer, fetch_part

_JOURNAL: Final = re.compile(rf"{JOURNAL_DIR}/[^/\0]+\.jsonl")
"""A name in the storage may be anything, also one that leads out of a directory."""


@dataclass(frozen=True, slots=True)
class RemoteShard(StoredShard):
    """A shard of a dataset in object storage; `path` is its name there. Holds no handle, like any other."""

    store: ObjectStore
    size: int
    """As the storage lists it."""
    cache: PartCache
    wanted: Part

    @property
    def place(self) -> str:
        """Its URL."""
        return f"{self.store.url}/{self.path}"

    def part(self, columns: Sequence[str], row_group: int | None = None) -> StoredShard:
        """The same shard, of which `open` fetches these columns only, of one row group or of all."""
        return replace(self, wanted=Part(tuple(sorted(columns)), row_group))

    def open(self) -> ShardReader:
        """Open and check what is wanted of the shard, fetched now unless it is in the cache."""
        footer = self._footer()
        if self._key is not None:
            return self.cache.open(self._key, partial(self._fetch, footer), self._open)
        with _scratch() as directory:
            path = directory / self.name
            with _keeping():
                self._fetch(footer, path)
            return self._open(path)  # and so it stays, without a name

    def sha256(self) -> str:
        """Of the whole object: as the journal has it, or read through."""
        if self.line is not None:
            return self.line.sha256
        return self.store.sha256(self.path.as_posix(), self.size)

    def drop_copy(self) -> bool:
        """Forget the part in the cache; False when there is none."""
        return self._key is not None and self.cache.drop(self._key)

    @property
    def _key(self) -> str | None:
        """Of the part in the cache; None for one that is not kept: without a journal line the content has no name."""
        if self.line is None or self.wanted.row_group is None:
            return None
        return f"{self.line.sha256} {self.wanted.row_group} {self.wanted.columns}"

    def _footer(self) -> bytes:
        """The footer, which is the committed one. Raises DatasetError."""
        name, line = self.path.as_posix(), self.line
        if line is None:
            return fetch_footer(self.store, name, self.size)
        check_size(self.size, self.place, line)

        def fetch(path: Path) -> None:
            path.write_bytes(fetch_footer(self.store, name, self.size))

        def read(path: Path) -> bytes:
            footer = path.read_bytes()
            check_footer_hash(self.place, line, footer)
            return footer

        return self.cache.open(f"{line.footer_sha256} footer", fetch, read)

    def _fetch(self, footer: bytes, path: Path) -> None:
        fetch_part(self.store, self.path.as_posix(), self.size, footer, self.wanted, path)

    def _open(self, path: Path) -> ShardReader:
        return open_shard(path, line=self.line, config_digest=self.config_digest, place=self.place)


@contextmanager
def remote_dataset(store: ObjectStore, cache: PartCache) -> Iterator[StoredDataset]:
    """The dataset below a URL, as `open_dataset` has those of directories; its shards are RemoteShards.

    Its directory holds copies of manifest, journal and retry lists, and goes away at the end. Errors about them name
    the URL. Raises what `open_dataset` does, and UsageError when the storage cannot be used.
    """
    with _scratch() as directory, _named(store.url, str(directory)):
        with _keeping():
            sizes = _copy_listing(store, directory)
            with suppress(MissingFile):  # `open_dataset` says what that means
                (directory / MANIFEST_FILE).write_bytes(store.read(MANIFEST_FILE, MAX_MANIFEST_BYTES))
        dataset = open_dataset(directory)
        _copy_retries(store, dataset.manifest, directory)  # not needed, unless there is damage
        shards = (
            RemoteShard(
                path=Path(DATA_DIR, shard.name),
                line=shard.line,
                config_digest=shard.config_digest,
                store=store,
                size=sizes[f"{DATA_DIR}/{shard.name}"],
                cache=cache,
                wanted=Part(),
            )
            for shard in dataset.shards
        )
        yield replace(dataset, shards=tuple(shards))


@contextmanager
def remote_plan(store: ObjectStore, manifest: Manifest) -> Iterator[Path]:
    """A directory with the plan and the retry lists of the dataset below a URL, if they are there, until the end.

    Errors name the URL. Raises UsageError when the storage cannot be used.
    """
    with _scratch() as directory, _named(store.url, str(directory)):
        with suppress(MissingFile), _keeping():
            store.download(PLAN_FILE, directory / PLAN_FILE)
        _copy_retries(store, manifest, directory)
        yield directory


def remote_writers(store: ObjectStore, note: Callable[[str], None]) -> frozenset[str]:
    """Names of the writers that are alive now, as `live_writers` has those of a directory.

    Where a lock does not tell, because its writer may have died lately, it is watched for a minute at most; `note` says
    so before. Locks of files, in a dataset that was copied here, are nobody's.
    """
    watch = Watch(store)
    locks = {name: writer for name in store.list(JOURNAL_DIR) if (writer := writer_of_lock(name))}
    signs = [name for name in locks if watch.look(name)[1].host]  # all at once: waiting for one is waiting for all
    return frozenset(locks[name] for name in signs if watch.settle(name, note)[0] is State.ALIVE)


def _copy_retries(store: ObjectStore, manifest: Manifest, directory: Path) -> None:
    """The lists that are there; `read_retries` says of which one that is not so."""
    for retry in manifest.retries:
        file = retry_file(retry.generation)
        with suppress(MissingFile), _keeping():
            store.download(file, directory / file)


def _copy_listing(store: ObjectStore, directory: Path) -> dict[str, int]:
    """The journal, and an empty file for each shard, of one moment. Returns the sizes of what is in `data/`.

    The journal comes first, because shards may be committed in between; where one is retired meanwhile, what was listed
    may hold its samples twice, and all is done again: as `committed_shards` does it.
    """
    for name in (DATA_DIR, JOURNAL_DIR):
        (directory / name).mkdir()
    while True:
        journal = store.list(JOURNAL_DIR)
        _copy_journal(store, journal, directory)
        shards = store.list(DATA_DIR)
        later = store.list(JOURNAL_DIR)
        if not _retired(store, {name: size for name, size in later.items() if journal.get(name) != size}, directory):
            break
    if f"{JOURNAL_DIR}/{RECORD_FILE}" in later:
        (directory / JOURNAL_DIR / RECORD_FILE).touch()  # `open_dataset` refuses the dataset
    for name in shards:
        folder, _, file = name.rpartition("/")
        if folder == DATA_DIR and parse_shard_name(file):
            (directory / DATA_DIR / file).touch()
    return shards


def _retired(store: ObjectStore, later: dict[str, int], directory: Path) -> bool:
    """Whether one of the later journal objects takes out a shard that those copied before do not."""
    with _scratch() as scratch:
        (scratch / JOURNAL_DIR).mkdir()
        _copy_journal(store, later, scratch)
        return bool(read_journal(scratch).retired.keys() - read_journal(directory).retired.keys())


def _copy_journal(store: ObjectStore, sizes: dict[str, int], directory: Path) -> None:
    """Copy what is there of each object by its listed size: one that grows ends in a torn line then, as ever."""

    def copy(name: str) -> None:
        (directory / name).write_bytes(store.read_range(name, 0, sizes[name]))

    for_each(copy, filter(_JOURNAL.fullmatch, sizes))


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary directory."""
    with _keeping():
        scratch = tempfile.TemporaryDirectory(prefix="rollgen-")
    with scratch as name:
        yield Path(name)


def _keeping() -> AbstractContextManager[None]:
    return keeping(Path(tempfile.gettempdir()), "make room there, or set TMPDIR")


@contextmanager
def _named(url: str, directory: str) -> Iterator[None]:
    """Let errors name the URL in place of the copy."""
    try:
        yield
    except RollgenError as error:
        raise type(error)(str(error).replace(directory, url)) from None
