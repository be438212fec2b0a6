"""From finished completions to committed shards: buffers groups, encodes in a thread, commits on time or size.

A finished sample waits in memory for the rest of its prompt group until the commit interval ends, so groups stay
together on disk; rows of a shard are sorted by (prompt_index, sample_index, generation). Encoding, verification and
commit run in one background thread while the caller goes on adding, also when a commit takes longer than the interval;
at most one shard is being written at a time, so memory is bounded by about twice `MAX_BUFFER_BYTES`: whoever adds more
waits. An error in that thread is raised by the next call; the shard is kept and tried again at the next commit, so that
a full disk costs nothing once it is cleared, and what comes after it gets its final name too before a commit is tried:
when a storage fails for good, all that is finished is on disk. Where the disk has no room for that, what has its name
is committed all the same, which makes room when it is sent away. The thread takes the GIL only a few times for each
row group, because each time it has to wait for a busy caller.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.errors import DatasetError
from rollgen.format.columns import build_table, split_row_groups
from rollgen.format.files import new_file
from rollgen.format.journal import JournalLine
from rollgen.format.manifest import Manifest
from rollgen.format.reader import verify_shard
from rollgen.format.schema import (
    FOOTER_CONFIG_DIGEST,
    FOOTER_ENGINE,
    FOOTER_FORMAT_VERSION,
    FOOTER_TOKENIZER_VOCAB_SIZE,
    FOOTER_VOCAB_SIZE,
    has_generation,
    parquet_options,
    shard_schema,
)
from rollgen.rollouts import Completion

MAX_BUFFER_BYTES = 192 << 20
"""Array bytes of complete groups after which a shard is written before its interval ends: 2-3 M tokens."""


def footer_metadata(manifest: Manifest) -> dict[bytes, bytes]:
    """What a shard says about itself when it is found alone; of several runs, the engine of each is named."""
    last = [attempt.engine for sampled in manifest.runs or (manifest,) for attempt in sampled.attempts[-1:]]
    engines = dict.fromkeys(f"{engine.name} {engine.version}" for engine in last)
    return {
        FOOTER_FORMAT_VERSION: manifest.format_version.encode(),
        FOOTER_CONFIG_DIGEST: manifest.config_digest.encode(),
        FOOTER_VOCAB_SIZE: str(manifest.vocab_size).encode(),
        FOOTER_TOKENIZER_VOCAB_SIZE: str(manifest.tokenizer_vocab_size).encode(),
        FOOTER_ENGINE: ", ".join(engines).encode(),
    }


def manifest_schema(manifest: Manifest) -> pa.Schema:
    """The columns of this dataset's shards. All have the same ones: a dataset begun as 1.0 stays so until a retry."""
    return shard_schema(**manifest.optional_columns, generation=has_generation(manifest.format_version))


def build_row_groups(completions: Sequence[Completion], schema: pa.Schema) -> list[pa.Table]:
    """Completions, in the order given, as the tables of a shard's row groups (0.07 us a token)."""
    return [build_table(group, schema) for group in split_row_groups(completions)]


def write_parquet(path: Path, row_groups: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Write one Parquet file, one row group in memory at a time. `pa.OSFile` writes without the GIL."""
    new_file(path).close()  # what `pa.OSFile` opens next
    with (
        pa.OSFile(str(path), "wb") as sink,
        pq.ParquetWriter(sink, schema, **parquet_options(schema)) as writer,
    ):
        for table in row_groups:
            writer.write_table(table, row_group_size=table.num_rows)
            del table  # before the next one is made


class ShardPlace(Protocol):
    """Where a writer puts its shards: `commit.WriterSlot`, or the place of one task of it."""

    def temporary(self) -> Path:
        """Where the next shard is built."""
        ...

    def publish(self, temporary: Path, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
        """Give a closed and verified file its final name."""
        ...

    def append(self, line: JournalLine) -> None:
        """Commit it: on disk on return."""


class ShardWriter:
    """Buffers completions of one writer and commits them as shards. Use as a context manager.

    `commit_interval` is in seconds; `max_buffer_bytes` of complete groups are written before it ends.

    Leaving the block commits everything that was added, also when it is left by an exception: what an engine finished
    before it died is kept. Completions must have passed `invariants.find_problem`; those of a retry need the manifest
    that lists it (`Manifest.with_retry`).
    """

    def __init__(
        self,
        slot: ShardPlace,
        manifest: Manifest,
        *,
        commit_interval: float,
        max_buffer_bytes: int = MAX_BUFFER_BYTES,
    ) -> None:
        self._slot = slot
        self._schema = manifest_schema(manifest).with_metadata(footer_metadata(manifest))
        self.manifest = manifest
        self._commit_interval = commit_interval
        self._max_buffer_bytes = max_buffer_bytes
        self._open: dict[int, list[Completion]] = {}
        self._complete: list[Completion] = []
        self._complete_bytes = self._open_bytes = 0
        self._last_commit = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "rollgen-writer")
        self._pending: deque[_Shard] = deque()
        """Shards that are being written, or that could not be, in order."""
        self._committing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown(wait=True)

    def add(self, completion: Completion) -> None:
        """Take one completion. It is durable once `flush` returns, or a commit after it has finished."""
        self._open.setdefault(completion.prompt_index, []).append(completion)
        self._open_bytes += completion.nbytes

    def close_group(self, prompt_index: int) -> None:
        """Say that no more samples of this prompt will come: its group may be written before the interval ends."""
        group = self._open.pop(prompt_index, [])
        size = sum(completion.nbytes for completion in group)
        self._open_bytes -= size
        self._complete_bytes += size
        self._complete += group
        if self._complete_bytes >= self._max_buffer_bytes and not self._is_busy:
            self._commit(everything=False)

    def tick(self) -> None:
        """Commit what is due by time or size; call about once a second. Raises what the writing thread raised.

        Waits for a commit that goes on only when memory is full.
        """
        if not self._is_busy:
            self._collect()
        due = time.monotonic() - self._last_commit >= self._commit_interval and not self._is_busy
        if due or self._open_bytes + self._complete_bytes >= 2 * self._max_buffer_bytes:
            self._commit(everything=True)

    def flush(self) -> None:
        """Commit everything added so far; durable on return."""
        self._commit(everything=True)
        self._collect()

    @property
    def _is_busy(self) -> bool:
        return self._committing is not None and not self._committing.done()

    def _commit(self, *, everything: bool) -> None:
        """Write complete groups, or everything, as the next shard. One that failed before is committed before it."""
        if self._committing is not None:
            wait((self._committing,))  # what it raises, the next try raises again
        self._last_commit = time.monotonic()
        completions = self._complete
        if everything:
            completions = [*completions, *chain.from_iterable(self._open.values())]
        if completions:
            self._pending.append(_Shard.of(completions, self._schema))
            self._complete, self._complete_bytes = [], 0  # not before: what cannot be built is not lost
            if everything:
                self._open, self._open_bytes = {}, 0
        self._committing = self._thread.submit(self._write) if self._pending else None

    def _collect(self) -> None:
        """Wait for the commit. Raises what it raised; the shard is then kept and tried again."""
        if self._committing is not None:
            committing, self._committing = self._committing, None
            committing.result()

    def _write(self) -> None:
        """Commit what is pending, one after the other, each after all of it that can has its final name."""
        while self._pending:
            temporary = self._slot.temporary()
            try:
                self._publish_in_order()
                self._append_first()
            except OSError as error:
                raise DatasetError(f"{temporary}: cannot be written: {error.strerror or error}") from error

    def _publish_in_order(self) -> None:
        """Raises when the first shard cannot get its name. Of a later one the error waits until that is the first."""
        try:
            for shard in self._pending:
                if shard.line is None:
                    self._publish(shard)
        except Exception:
            if self._pending[0].line is None:
                raise

    def _append_first(self) -> None:
        line = self._pending[0].line
        assert line is not None
        self._slot.append(line)
        self._pending.popleft()

    def _publish(self, shard: _Shard) -> None:
        temporary = self._slot.temporary()
        with ExitStack() as on_exit:
            on_exit.callback(temporary.unlink, missing_ok=True)  # published, it has its final name
            write_parquet(temporary, shard.row_groups, self._schema)
            verify_shard(temporary)
            shard.line = self._slot.publish(temporary, rows=shard.rows, tokens=shard.tokens, mask_ids=shard.mask_ids)
        shard.row_groups = []


@dataclass(slots=True)
class _Shard:
    """A shard on its way into the dataset, kept until it has arrived."""

    row_groups: list[pa.Table]
    rows: int
    tokens: int
    mask_ids: int
    line: JournalLine | None = None
    """Once it has its final name: only the journal is missing, and the row groups are not needed any more."""

    @classmethod
    def of(cls, completions: Sequence[Completion], schema: pa.Schema) -> Self:
        """Encode completions in the order that shards have."""
        ordered = sorted(completions, key=lambda c: (c.prompt_index, c.sample_index, c.generation))
        return cls(
            build_row_groups(ordered, schema),
            rows=len(ordered),
            tokens=sum(len(c.token_ids) for c in ordered),
            mask_ids=sum(len(c.mask_ids) for c in ordered),
        )
