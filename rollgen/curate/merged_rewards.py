"""The rewards of datasets that are merged, under the keys that their samples have then.

Carried over are rewards of a name that all of them have, by the same scorer: with its checksum of the tokens, so that a
reward which did not stand does not stand afterwards either. Samples that could not be scored are left to be scored.
Those that would have more further columns than `rollgen score` goes on with are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rollgen.curate.sources import Source, SourceRows
from rollgen.format.reader import read_columns
from rollgen.format.reward_writer import RewardWriter
from rollgen.format.rewards import MAX_FURTHER, Rewards, ScorerRecord, part_schema, reward_names, rewards_in_force
from rollgen.rollouts import REWARD


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


def write_rewards(
    out: Path, config_digest: str, carried: Sequence[Carried], sources: Sequence[Source], rows: SourceRows
) -> None:
    """Write them beside the shards of the merged dataset. Raises DatasetError when they cannot be written."""
    if not carried:
        return
    prompt_ids = _prompt_ids(sources)
    for each in carried:
        table = _table(each, prompt_ids, rows)
        with RewardWriter(out, each.name, config_digest) as writer:
            writer.write(table, each.columns, each.scorer, scoring=1, closes=False)


def _prompt_ids(sources: Sequence[Source]) -> pa.ChunkedArray:
    """Of all rows of all sources."""
    chunks = []
    for stored in (stored for source in sources for stored in source.dataset.shards):
        with stored.open() as shard:
            chunks += read_columns(shard, ["prompt_id"])["prompt_id"].chunks
    return pa.chunked_array(chunks, pa.string())


def _table(carried: Carried, prompt_ids: pa.ChunkedArray, rows: SourceRows) -> pa.Table:
    """A row for each current row that has a reward, in the order of the sources."""
    tables, schema = [], part_schema(carried.columns)
    for first, end, rewards in zip(rows.ends[:-1], rows.ends[1:], carried.of_sources, strict=True):
        current = first + np.flatnonzero(rows.current[first:end])
        at = rewards.rows_of(rows.stored.take(current))
        scored = at >= 0
        scored[scored] = ~np.isnan(rewards.values[REWARD][at[scored]])
        current, at = current[scored], at[scored]
        keys = rows.index.rows
        nothing = pa.nulls(len(at))
        columns = {
            "prompt_id": prompt_ids.take(pa.array(current)),
            "prompt_index": keys.prompt_index[current],
            "sample_index": keys.sample_index[current],
            "generation": keys.generation[current],
            "tokens_crc32": rewards.tokens_crc32[at],
            "error": nothing.cast(pa.string()),
        }
        for name in (REWARD, *carried.columns):
            values = rewards.values.get(name)
            columns[name] = nothing.cast(pa.float64()) if values is None else pa.array(values[at], from_pandas=True)
        tables.append(pa.table({name: columns[name] for name in schema.names}, schema=schema))
    return pa.concat_tables(tables)
