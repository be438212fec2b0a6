"""The tools that people open a dataset with, and rollgen's own loader: what each finds, as flat arrays to compare."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import duckdb
import numpy as np
import numpy.typing as npt
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq

from rollgen import RolloutDataset

KEYS = ["prompt_id", "sample_index"]
COLUMNS = [*KEYS, "token_ids", "logprobs", "sampling_mask"]
Array = npt.NDArray[Any]


class Found(NamedTuple):
    """All rows, sorted by prompt_id and sample_index, one after the other."""

    keys: list[tuple[str, int]]
    lengths: Array
    """[rows], tokens of each."""
    token_ids: Array
    logprobs: Array
    mask_lengths: Array
    """[tokens], ids of each support; -1 for one that is null."""
    mask_ids: Array

    def assert_equals(self, other: Found) -> None:
        """Every number, bit by bit."""
        assert self.keys == other.keys
        for name in self._fields[1:]:
            mine, others = getattr(self, name), getattr(other, name)
            assert mine.shape == others.shape, name
            assert (mine == others).all(), name


def with_the_loader(directory: Path) -> Found:
    """`RolloutDataset`, sample by sample."""
    dataset = RolloutDataset(directory)
    rollouts = sorted((dataset[index] for index in range(len(dataset))), key=lambda r: (r.prompt_id, r.sample_index))
    sizes = [np.diff(rollout.support.offsets.numpy()) for rollout in rollouts]
    return Found(
        keys=[(rollout.prompt_id, rollout.sample_index) for rollout in rollouts],
        lengths=np.array([len(rollout.token_ids) for rollout in rollouts]),
        token_ids=np.concatenate([rollout.token_ids.numpy() for rollout in rollouts]),
        logprobs=np.concatenate([rollout.logprobs.numpy() for rollout in rollouts]),
        mask_lengths=np.concatenate([np.where(size == 0, -1, size) for size in sizes]),
        mask_ids=np.concatenate([rollout.support.ids.numpy() for rollout in rollouts]),
    )


def of_arrow(table: pa.Table) -> Found:
    """From an Arrow table, whatever its chunks and list types."""
    rows = table.select(COLUMNS).sort_by([(name, "ascending") for name in KEYS])
    tokens, logprobs, masks = (rows[name].combine_chunks() for name in COLUMNS[2:])
    supports = pc.list_flatten(masks)
    return Found(
        keys=list(zip(*(rows[name].to_pylist() for name in KEYS), strict=True)),
        lengths=pc.list_value_length(tokens).to_numpy(),
        token_ids=pc.list_flatten(tokens).to_numpy(),
        logprobs=pc.list_flatten(logprobs).to_numpy(),
        mask_lengths=pc.fill_null(pc.list_value_length(supports), -1).to_numpy(),
        mask_ids=pc.list_flatten(supports).to_numpy(),
    )


def with_pyarrow(directory: Path) -> Found:
    return of_arrow(pa.concat_tables([pq.read_table(file) for file in sorted(directory.glob("data/*.parquet"))]))


def with_pyarrow_dataset(directory: Path) -> Found:
    return of_arrow(pa.dataset.dataset(directory / "data", format="parquet").to_table())


def with_polars(directory: Path) -> Found:
    return of_arrow(pl.read_parquet(directory / "data/*.parquet").to_arrow())


def with_polars_streaming(directory: Path) -> Found:
    rows = pl.scan_parquet(directory / "data/*.parquet").select(COLUMNS)
    return of_arrow(rows.collect(engine="streaming").to_arrow())


def with_duckdb(directory: Path) -> Found:
    return of_arrow(duckdb.read_parquet(f"{directory}/data/*.parquet").to_arrow_table())


def with_pandas(directory: Path) -> Found:
    """Its cells are NumPy arrays of arrays; a null support is None."""
    rows = pd.read_parquet(directory / "data").sort_values(KEYS)
    supports = np.concatenate(rows["sampling_mask"].tolist())
    return Found(
        keys=list(rows[KEYS].itertuples(index=False, name=None)),
        lengths=rows["token_ids"].map(len).to_numpy(),
        token_ids=np.concatenate(rows["token_ids"].tolist()),
        logprobs=np.concatenate(rows["logprobs"].tolist()),
        mask_lengths=np.array([-1 if support is None else len(support) for support in supports]),
        mask_ids=np.concatenate([np.empty(0, np.int32), *(support for support in supports if support is not None)]),
    )


def _load(directory: Path, cache: str, **options: Any) -> Any:
    return datasets.load_dataset(str(directory), split="train", cache_dir=cache, **options)


def with_datasets(directory: Path) -> Found:
    """Hugging Face's, from the directory itself: the front matter of its card says where the rows are."""
    with tempfile.TemporaryDirectory() as cache:
        return of_arrow(_load(directory, cache).with_format("arrow")[:])


def with_datasets_streaming(directory: Path) -> Found:
    """The same without a copy in its cache, in Python objects."""
    with tempfile.TemporaryDirectory() as cache:
        rows = list(_load(directory, cache, streaming=True).select_columns(COLUMNS))
    kinds = {"token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32())}
    kinds["sampling_mask"] = pa.list_(kinds["token_ids"])
    return of_arrow(pa.table({name: pa.array([row[name] for row in rows], kinds.get(name)) for name in COLUMNS}))


READERS: dict[str, Callable[[Path], Found]] = {
    "pyarrow": with_pyarrow,
    "pyarrow.dataset": with_pyarrow_dataset,
    "polars": with_polars,
    "polars, streaming": with_polars_streaming,
    "duckdb": with_duckdb,
    "pandas": with_pandas,
    "datasets": with_datasets,
    "datasets, streaming": with_datasets_streaming,
}
