"""The shards of a dataset as files: whether they are the bytes that were committed, and what each column takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rollgen.errors import DatasetError
from rollgen.format.journal import file_sha256
from rollgen.format.reader import REMAKE, check_row_groups, verify_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollgen.format.reader import StoredShard


REST: Final = "footers and the rest"
"""Of a file what is in no column: magic bytes, indexes and its footer."""


@dataclass(frozen=True, slots=True)
class FileStats:
    """The committed shards."""

    shards: int
    row_groups: int
    bytes: int
    column_bytes: dict[str, int]
    """Compressed bytes by column, page headers included, largest first. Footers are not counted."""

    @property
    def parts(self) -> dict[str, int]:
        """What `bytes` is made of, largest first: each column, and REST."""
        rest = {REST: self.bytes - sum(self.column_bytes.values())} if self.shards else {}
        return dict(Counter(self.column_bytes | rest).most_common())


def measure_shards(shards: Sequence[StoredShard]) -> FileStats:
    """Check every byte of each shard and add up its footer. Raises DatasetError naming a damaged shard."""
    column_bytes: Counter[str] = Counter()
    row_groups = 0
    for shard in shards:
        _check_content(shard)
        with shard.open() as reader:
            check_row_groups(reader)  # others that read this file next know no limits
            row_groups += len(reader.row_group_rows)
            column_bytes.update(reader.parquet.column_bytes())
    return FileStats(
        shards=len(shards),
        row_groups=row_groups,
        bytes=sum(shard.path.stat().st_size for shard in shards),
        column_bytes=dict(column_bytes.most_common()),
    )


def _check_content(shard: StoredShard) -> None:
    """Hash a shard; one without a line (a live run, or a crash) is read back instead."""
    if shard.line is None:
        verify_shard(shard.path, config_digest=shard.config_digest)
    elif file_sha256(shard.path) != shard.line.sha256:
        raise DatasetError(f"{shard.path}: damaged: not the bytes that were committed; {REMAKE}")
