"""Who writes the rewards of one name: the lock, the names of parts, and the commit of each.

Steps as for a shard: temporary name, fsynced, closed, read back with checksums, linked to a name that is free,
directory fsynced. There is no journal: a part vouches for itself. One that was being written when its writer died was
never seen, and goes with the next one. A part only goes when nothing of it is in force any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.errors import DatasetError, ResumeRefused
from rollgen.format.commit import writable
from rollgen.format.files import check_hard_links, link, new_file, refuse_links, remove_leftover
from rollgen.format.locks import is_same_file, open_lock
from rollgen.format.manifest import fsync_directory
from rollgen.format.parquet import open_parquet
from rollgen.format.rewards import (
    Part,
    PartRecord,
    ScorerRecord,
    check_values,
    list_parts,
    part_schema,
    read_parts,
    read_record,
)
from rollgen.format.schema import (
    FOOTER_CONFIG_DIGEST,
    FOOTER_FORMAT_VERSION,
    REWARDS_DIR,
    REWARDS_KEY,
    REWARDS_VERSION,
)

_ROW_GROUP_ROWS = 1 << 16


class RewardWriter:
    """The exclusive place of one scorer under a name. Use as a context manager.

    Raises ResumeRefused while another one has it, and UsageError when the directory cannot be written, must not be
    because of a link, or is on a file system without hard links.
    """

    def __init__(self, directory: Path, name: str, config_digest: str) -> None:
        self._place = directory / REWARDS_DIR
        self._dataset = directory
        self._name = name
        self._config_digest = config_digest
        self._lock_path = self._place / f"{name}.lock"
        self._lock: IO[bytes] | None = None
        self.written = 0
        """Parts that have their names."""

    def __enter__(self) -> Self:
        refuse_links(self._dataset)
        with writable(self._lock_path), ExitStack() as on_error:
            on_error.callback(self.__exit__)
            self._lock = open_lock(self._lock_path)
            if self._lock is None:
                raise ResumeRefused(
                    f"{self._lock_path}: another rollgen is making these rewards; wait for it, or stop it"
                )
            for leftover in self._place.glob(f".tmp-{self._name}-*"):
                remove_leftover(leftover)
            check_hard_links(self._place / f".tmp-{self._name}-link")
            on_error.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            self._lock.close()  # releases the lock
            self._lock = None

    def parts(self) -> list[Part]:
        """Of all scorings, in order. Raises DatasetError for a damaged one."""
        return read_parts(self._dataset, self._name, self._config_digest)

    def write(
        self, rows: pa.Table, columns: Sequence[str], scorer: ScorerRecord, *, scoring: int, closes: bool
    ) -> None:
        """Commit `rows`, of `part_schema(columns)`, as the next part: on disk, and seen by readers, on return.

        Raises DatasetError when it cannot be written, and when the dataset was removed meanwhile.
        """
        assert self._lock is not None
        if not is_same_file(self._lock, self._lock_path):
            raise DatasetError(
                f"{self._lock_path}: was removed, perhaps with the dataset; score again what is there now"
            )
        record = PartRecord(
            name=self._name,
            sequence=self._next_sequence(),
            scoring=scoring,
            closes=closes,
            rows=len(rows),
            columns=list(columns),
            scorer=scorer,
        )
        temporary = self._place / f".tmp-{self._name}-{record.sequence:06d}"
        try:
            self._build(temporary, rows, record)
            link(temporary, self._place / record.file)
            self.written += 1
            fsync_directory(self._place)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DatasetError(f"{temporary}: cannot be written: {reason}; what was committed before stays") from error
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, parts: Iterable[Part]) -> None:
        """Take these parts away: those that were replaced, or of a rescoring that does not go on."""
        for part in parts:
            part.path.unlink(missing_ok=True)
        fsync_directory(self._place)

    def _build(self, path: Path, rows: pa.Table, record: PartRecord) -> None:
        schema = part_schema(record.columns).with_metadata(
            {
                FOOTER_FORMAT_VERSION: REWARDS_VERSION.encode(),
                FOOTER_CONFIG_DIGEST: self._config_digest.encode(),
                REWARDS_KEY: record.to_json(),
            }
        )
        with new_file(path) as file:
            with pq.ParquetWriter(
                file,
                schema,
                compression="zstd",
                use_dictionary=["prompt_id", "error"],
                data_page_version="1.0",
                write_page_checksum=True,
                write_statistics=False,
            ) as writer:
                for start in range(0, len(rows), _ROW_GROUP_ROWS):
                    writer.write_table(rows.slice(start, _ROW_GROUP_ROWS).cast(schema), _ROW_GROUP_ROWS)
            file.flush()
            os.fsync(file.fileno())
        self._read_back(path, rows, record)

    def _read_back(self, path: Path, rows: pa.Table, record: PartRecord) -> None:
        """Raise DatasetError unless the file holds these, and ValueError unless readers take it."""
        check_values(rows)
        with open_parquet(path) as file:
            found = read_record(file)
            groups = [file.read(index, rows.schema.names) for index in range(len(file.groups))]
        if found != record or not pa.concat_tables([rows.schema.empty_table(), *groups]).equals(rows):
            raise DatasetError(f"{path}: does not hold what was written; is the disk failing?")

    def _next_sequence(self) -> int:
        used = list_parts(self._dataset, self._name)
        return int(used[-1].stem.rpartition("-")[2]) + 1 if used else 0
