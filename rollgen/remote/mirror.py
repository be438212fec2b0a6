"""The small files of a dataset in object storage, and their copies in a local directory.

    shared         manifest, plan, retry lists, tokenizer, card: read and written in the start section; the manifest
                   comes after what it vouches for
    of a writer    its failures and logs: written whenever they have changed
    journal        objects of a few lines that never change, and the failures of others: only read

Shards are not mirrored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from rollgen.errors import ResumeRefused
from rollgen.format.jsonlines import parse_object
from rollgen.format.layout import CARD_FILE, OWN_FILES
from rollgen.format.manifest import MAX_MANIFEST_BYTES
from rollgen.format.schema import (
    DATA_DIR,
    FAILURES_DIR,
    JOURNAL_DIR,
    LOGS_DIR,
    MANIFEST_FILE,
    PLAN_FILE,
    RETRY_FILES,
    TOKENIZER_DIR,
)
from rollgen.remote.objects import ObjectStore, for_each

_SHARED: Final = (PLAN_FILE, RETRY_FILES, f"{TOKENIZER_DIR}/*")
_JOURNALS: Final = f"{JOURNAL_DIR}/*.jsonl"
_UNCHANGING: Final = f"{JOURNAL_DIR}/*-*.jsonl"
"""Journal objects: no writer's name has a hyphen."""
_PULLED: Final = (*_SHARED, CARD_FILE, _JOURNALS, f"{FAILURES_DIR}/*.jsonl")

_State = tuple[int, int] | None
"""Size and time of a file, or that there is none."""


class Mirror:
    """Copies in `directory` of what `store` holds, for one writer."""

    def __init__(self, store: ObjectStore, directory: Path, writer: str) -> None:
        self._store = store
        self._directory = directory
        self._failures = f"{FAILURES_DIR}/{writer}.jsonl"
        self._logs = f"{LOGS_DIR}/*-{writer}.log"
        self._manifest: bytes | None = None
        """As it was read or written last."""
        self._known: dict[str, _State] = {}
        """Local files as they were when they were the same as the objects."""

    def pull(self, names: Collection[str]) -> None:
        """Make the directory hold what the store does, of the `names` in it.

        This writer's failures stay where they go on from what is there, and so do logs: an attempt that was killed had
        not sent the last of them. But failures of a dataset that has been replaced are none of this one. Shards stay.
        """
        self._pull_manifest()
        wanted = {name for name in names if _matches(name, _PULLED)}
        kept = (MANIFEST_FILE, f"{DATA_DIR}/part-*", f"{LOGS_DIR}/*", self._failures)
        for name in [*self._local((*OWN_FILES, ".tmp-*"))]:
            if name not in wanted and not _matches(name, kept):
                (self._directory / name).unlink(missing_ok=True)
        self._fetch(name for name in wanted if not (name in self._known and _matches(name, (_UNCHANGING,))))

    def pull_shared(self) -> None:
        """The same for the manifest and what it vouches for, if it has changed, for new commits, and for the card."""
        before = self._manifest
        self._pull_manifest()
        names = [name for name in self._store.list(JOURNAL_DIR) if not (self._directory / name).exists()]
        wanted = [name for name in names if _matches(name, (_JOURNALS,))]
        if self._store.exists(CARD_FILE):
            wanted.append(CARD_FILE)
        if self._manifest != before:
            wanted += [name for name in self._store.list() if _matches(name, _SHARED)]
        self._fetch(wanted)

    def push_shared(self) -> None:
        """Send the manifest after what it vouches for, and the card: what has changed of them, or had been lost there.

        Raises ResumeRefused when the dataset has got its first manifest from somebody else.
        """
        self._push_manifest()
        self._send(self._local((CARD_FILE,)))

    def push_own(self) -> None:
        """Send this writer's failures and logs, as far as they have changed."""
        self._send(self._own())

    @property
    def has_unsent(self) -> bool:
        """Whether some of these failures and logs is nowhere else."""
        return any(self._has_changed(name) for name in self._own())

    def forget(self) -> None:
        """The store has been emptied."""
        self._manifest = None
        self._known.clear()

    def _push_manifest(self) -> None:
        path = self._directory / MANIFEST_FILE
        content = path.read_bytes() if path.exists() else None
        if content is None:
            return
        self._send(self._local(_SHARED))
        if content == self._manifest:
            return
        if self._manifest is not None:
            self._store.replace(MANIFEST_FILE, content)
        elif not self._store.create(MANIFEST_FILE, content):
            raise ResumeRefused(f"{self._store.url}: another rollgen started here at the same time; use --resume")
        self._manifest = content

    def _pull_manifest(self) -> None:
        """One that is listed and cannot be read is an error, not the lack of one: a new run would take its place."""
        path = self._directory / MANIFEST_FILE
        before = _created_at(path.read_bytes()) if path.exists() else None
        self._manifest = None
        if self._store.exists(MANIFEST_FILE) or MANIFEST_FILE in self._store.list():
            self._manifest = self._store.read(MANIFEST_FILE, MAX_MANIFEST_BYTES)
        if before is not None and before != _created_at(self._manifest or b"{}"):
            (self._directory / self._failures).unlink(missing_ok=True)  # before its own manifest is gone
        if self._manifest is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(self._manifest)

    def _fetch(self, names: Iterable[str]) -> None:
        for_each(self._fetch_one, names)

    def _fetch_one(self, name: str) -> None:
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if name == self._failures and path.exists() else b""
        self._store.download(name, path)
        if len(before) > path.stat().st_size and before.startswith(path.read_bytes()):
            path.write_bytes(before)
        else:
            self._known[name] = _state(path)

    def _send(self, names: Iterable[str]) -> None:
        for name in filter(self._has_changed, names):
            path = self._directory / name
            state = _state(path)  # as it was before: it may grow meanwhile
            self._store.put(path, name)
            self._known[name] = state

    def _has_changed(self, name: str) -> bool:
        return self._known.get(name) != _state(self._directory / name)

    def _own(self) -> Iterator[str]:
        return self._local((self._failures, self._logs))

    def _local(self, patterns: Iterable[str]) -> Iterator[str]:
        """Names of the local files that match, without those of directories."""
        for pattern in patterns:
            for path in sorted(self._directory.glob(pattern)):
                below = path.rglob("*") if path.is_dir() else (path,)
                yield from (str(file.relative_to(self._directory)) for file in below if file.is_file())


def _created_at(manifest: bytes) -> object:
    """Which dataset it is of. None of one that is damaged: who reads it tells that."""
    try:
        return parse_object(manifest).get("created_at")
    except ValueError:
        return None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Not for a name that would lead out of the directory: in the storage it may be anything."""
    return ".." not in name.split("/") and any(fnmatch(name, pattern) for pattern in patterns)


def _state(path: Path) -> _State:
    """Raises OSError for a file that is not there."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns
