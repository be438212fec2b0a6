"""The rewards of datasets that are merged, under the keys that their samples have then.

Carried over are rewards of a name that all of them have, by the same scorer: with its checksum of the tokens, so that a
reward which did not stand does not stand afterwards either. Samples that could not be scored are left to be scored.
Those that would have more further columns than `rollgen score` goes on with are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from rollgen.curate.sources import Source, SourceRows
from rollgen.format.reader import read_row_group
from rollgen.format.reward_writer import RewardWriter
from rollgen.format.rewards import MAX_FURTHER, Rewards, ScorerRecord, part_schema, reward_names, rewards_in_force
from rollgen.format.row_groups import OpenShards
from rollgen.rollouts import REWARD

if TYPE_CHECKING:
    from rollgen.curate.layout import KeyColumns
    from rollgen.rollouts import Int64Array

_PART_ROWS: Final = 1 << 18
_PART_BYTES: Final = 64 << 20
"""Of a file, after which the next one is begun."""


class Carried(NamedTuple):
    """Rewards of one name."""

    name: str
    scorer: ScorerRecord
    of_sources: tuple[Rewards, ...]

    @property
    def columns(self) -> list[str]:
        """The further ones that any of them has."""
        return [
            name for name in dict.fromkeys(name for part in self.of_sources for name in part.values) if name != REWARD
        ]


def common_rewards(sources: Sequence[Source]) -> tuple[tuple[Carried, ...], tuple[str, ...]]:
    """Those that can be carried over, and the names of all others. Raises DatasetError for damage."""
    names = [set(reward_names(source.place)) for source in sources]
    carried = []
    for name in sorted(set.intersection(*names)):
        found = tuple(rewards_in_force(source.place, name, source.manifest.config_digest, None) for source in sources)
        scorer = found[0].scorer
        if scorer is not None and all(part.scorer == scorer for part in found):
            together = Carried(name, scorer, found)
            if len(together.columns) <= MAX_FURTHER:
                carried.append(together)
    others = set.union(*names) - {each.name for each in carried}
    return tuple(carried), tuple(sorted(others))


def write_rewards(out: Path, config_digest: str, carried: Sequence[Carried], rows: SourceRows) -> None:
    """Write them beside the shards of the merged dataset, a part in memory at a time.

    Raises DatasetError when they cannot be written, and for ids that cannot be read.
    """
    for each in carried:
        with RewardWriter(out, each.name, config_digest) as writer:
            for table in _parts(each, rows):
                writer.write(table, each.columns, each.scorer, scoring=1, closes=False)


def _parts(carried: Carried, rows: SourceRows) -> Iterator[pa.Table]:
    """A row for each current row that has a reward, in the order of the sources, as one table at least."""
    tables, count, size = [part_schema(carried.columns).empty_table()], 0, 0
    for table in _by_row_group(carried, rows):
        tables.append(table)
        count, size = count + len(table), size + table.nbytes
        if count >= _PART_ROWS or size >= _PART_BYTES:
            yield pa.concat_tables(tables)
            tables, count, size = [], 0, 0
    if tables:
        yield pa.concat_tables(tables)


def _by_row_group(carried: Carried, rows: SourceRows) -> Iterator[pa.Table]:
    """The same of each stored row group that has such rows, with their ids out of there."""
    index, starts = rows.index, rows.index.starts
    with closing(OpenShards(limit=1)) as shards:
        for first, end, rewards in zip(rows.ends[:-1], rows.ends[1:], carried.of_sources, strict=True):
            at = rewards.rows_of(rows.stored.take(slice(first, end)))
            scored = rows.current[first:end] & (at >= 0)
            scored[scored] = ~np.isnan(rewards.values[REWARD][at[scored]])
            for row_group in range(*np.searchsorted(starts, [first, end]).tolist()):
                begin = int(starts[row_group])
                chosen = np.flatnonzero(scored[begin - first : int(starts[row_group + 1]) - first])
                if chosen.size:
                    shard, number = index.row_groups[row_group]
                    ids = read_row_group(shards[index.shards[shard]], number, ["prompt_id"])["prompt_id"]
                    ids = ids.take(pa.array(chosen))
                    yield _table(carried, rewards, ids, index.rows, begin + chosen, at[begin - first + chosen])


def _table(
    carried: Carried,
    rewards: Rewards,
    prompt_ids: pa.ChunkedArray,
    keys: KeyColumns,
    chosen: Int64Array,
    at: Int64Array,
) -> pa.Table:
    """Of the `chosen` rows, whose rewards are `at` these places."""
    schema = part_schema(carried.columns)
    nothing = pa.nulls(len(at))
    columns = {
        "prompt_id": prompt_ids,
        "prompt_index": keys.prompt_index[chosen],
        "sample_index": keys.sample_index[chosen],
        "generation": keys.generation[chosen],
        "tokens_crc32": rewards.tokens_crc32[at],
        "error": nothing.cast(pa.string()),
    }
    for name in (REWARD, *carried.columns):
        values = rewards.values.get(name)
        columns[name] = nothing.cast(pa.float64()) if values is None else pa.array(values[at], from_pandas=True)
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)
