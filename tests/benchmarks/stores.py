"""Where people keep rollouts today, beside rollgen: how each store is filled, and how a competent user reads it.

A reader opens a store and returns a function that reads all of it once, as `Piece`s. Opening is not timed. Rows of
Python lists become one tensor an array, masks flattened to ids and sizes. Where a batch size can be chosen, it is that
of rollgen's batches.

rollgen          the dataset directory
huggingface      the Arrow cache that `datasets` makes of rollgen's Parquet files on first use; made here beforehand
jsonl.zst        one JSON object a line, zstd level 3
pickle           one pickle of lists a completion
mds              MosaicML streaming, four flat ndarray columns, not compressed
lance            a table of the same columns and types as rollgen's
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec, module_from_spec
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards
from rollgen.format.manifest import create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion, Sampling
from tests.benchmarks.masks import COMPLETION_TOKENS, RawCompletion
from tests.conftest import some_manifest

VOCAB_SIZE = 151_936
GROUP = 8
BATCH_TOKENS = 65_536
BATCH_ROWS = BATCH_TOKENS // COMPLETION_TOKENS
COLUMNS = ["token_ids", "logprobs", "sampling_mask"]
MDS_COLUMNS = {
    "token_ids": "ndarray:int32",
    "logprobs": "ndarray:float32",
    "mask_ids": "ndarray:int32",
    "mask_sizes": "ndarray:int32",
}


class Piece(NamedTuple):
    """What one step of reading gives: a completion or a batch, in whatever types the reader has."""

    tokens: int
    token_ids: Any
    logprobs: Any
    mask_ids: Any
    """Flat, or a list or tensor for each support."""
    mask_sizes: Any
    """Or offsets; None where `mask_ids` is nested."""


ReadAll = Callable[[], Iterable[Piece]]
Reader = Callable[[Path], ReadAll]


def fill_stores(rows: Sequence[RawCompletion], directory: Path) -> None:
    """All stores below `directory`; one whose package is not installed is left out."""
    fill_rollgen(rows, directory)
    if find_spec("datasets"):
        _hugging_face(directory)
    if find_spec("orjson"):
        _fill_jsonl(rows, directory / "jsonl.zst")
    _fill_pickle(rows, directory / "pickle")
    if find_spec("streaming"):
        _fill_mds(rows, directory / "mds")
    if find_spec("lance"):
        import lance

        lance.write_dataset(pq.read_table(list_shards(directory / "rollgen"), columns=COLUMNS), directory / "lance")


def fill_rollgen(rows: Sequence[RawCompletion], directory: Path) -> None:
    """The dataset `directory / "rollgen"`."""
    dataset = directory / "rollgen"
    manifest = some_manifest(vocab_size=VOCAB_SIZE)
    dataset.mkdir()
    assert create_manifest(dataset, manifest)
    with WriterSlot(dataset, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for index, row in enumerate(rows):
            writer.add(_completion(index, row))


def _completion(index: int, row: RawCompletion) -> Completion:
    mask_ids, sizes = _flat_masks(row)
    return Completion(
        prompt_id=f"prompt-{index // GROUP}",
        sample_index=index % GROUP,
        prompt_index=index // GROUP,
        prompt_token_ids=np.asarray(row.prompt_token_ids, np.int32),
        token_ids=np.asarray(row.token_ids, np.int32),
        logprobs=np.asarray(row.logprobs, np.float32),
        mask_ids=mask_ids,
        mask_offsets=np.concatenate([[0], sizes.cumsum(dtype=np.int64)]),
        finish_reason="length",
        sampling=Sampling(),
        seed=index,
    )


def _flat_masks(row: RawCompletion) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.fromiter(map(len, row.masks), np.int32)
    return np.fromiter(chain.from_iterable(row.masks), np.int32, sizes.sum()), sizes


def _fill_jsonl(rows: Sequence[RawCompletion], path: Path) -> None:
    import orjson

    with path.open("wb") as file, zstandard.ZstdCompressor(3).stream_writer(file) as out:
        for row in rows:
            fields = zip(COLUMNS, (row.token_ids, row.logprobs, row.masks), strict=True)
            out.write(orjson.dumps(dict(fields)) + b"\n")


def _fill_pickle(rows: Sequence[RawCompletion], path: Path) -> None:
    with path.open("wb") as file:
        for row in rows:
            pickle.dump((row.token_ids, row.logprobs, row.masks), file, protocol=5)


def _fill_mds(rows: Sequence[RawCompletion], directory: Path) -> None:
    with _streaming().MDSWriter(out=str(directory), columns=MDS_COLUMNS) as out:
        for row in rows:
            values = (np.asarray(row.token_ids, np.int32), np.asarray(row.logprobs, np.float32), *_flat_masks(row))
            out.write(dict(zip(MDS_COLUMNS, values, strict=True)))


def rollgen_row_groups(directory: Path) -> ReadAll:
    """Verified row groups as CSR tensors: what a batch is made of, before it is made."""
    return lambda: _read_row_groups(directory / "rollgen")


def _read_row_groups(dataset: Path) -> Iterator[Piece]:
    from torch import from_numpy

    from rollgen.format.reader import open_dataset
    from rollgen.loader.row_groups import load_row_group

    for stored in open_dataset(dataset).shards:
        with stored.open() as shard:
            for index in range(len(shard.row_group_rows)):
                rows = load_row_group(shard, index, VOCAB_SIZE, scalars=())
                arrays = (rows.token_ids.values, rows.logprobs, rows.mask_ids, rows.mask_lengths)
                yield Piece(len(rows.logprobs), *(from_numpy(array.copy()) for array in arrays))  # some are read-only


def rollgen_stream(directory: Path) -> ReadAll:
    """`RolloutStream` in the order of the files."""
    return _stream(directory, shuffle=False)


def rollgen_shuffled(directory: Path) -> ReadAll:
    """`RolloutStream`, shuffled."""
    return _stream(directory, shuffle=True)


def rollgen_worker(directory: Path) -> ReadAll:
    """`RolloutStream`, shuffled, read by one worker of a DataLoader."""
    from torch.utils.data import DataLoader

    from rollgen import RolloutStream

    stream = RolloutStream(directory / "rollgen", batch_tokens=BATCH_TOKENS, shuffle=True)
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork")  # as in a main process
    return lambda: map(_batch, loader)


def _stream(directory: Path, **options: Any) -> ReadAll:
    from rollgen import RolloutStream

    stream = RolloutStream(directory / "rollgen", batch_tokens=BATCH_TOKENS, **options)
    return lambda: map(_batch, stream)


def rollgen_dataset(directory: Path) -> ReadAll:
    """`RolloutDataset` in order, and `collate`."""
    from rollgen import RolloutDataset, collate

    dataset = RolloutDataset(directory / "rollgen")
    starts = range(0, len(dataset), BATCH_ROWS)
    ends = [min(start + BATCH_ROWS, len(dataset)) for start in starts]
    return lambda: (
        _batch(collate([dataset[index] for index in range(start, end)]))
        for start, end in zip(starts, ends, strict=True)
    )


def _batch(batch: Any) -> Piece:
    support = batch.support
    return Piece(len(batch.response_places), batch.input_ids, batch.logprobs, support.ids, support.offsets)


def huggingface_rows(directory: Path) -> ReadAll:
    """What `for row in dataset` gives: Python lists."""
    dataset = _hugging_face(directory)
    return lambda: (Piece(len(row["token_ids"]), *(row[name] for name in COLUMNS), None) for row in dataset)


def huggingface_tensors(directory: Path) -> ReadAll:
    """The lists, as tensors."""
    dataset = _hugging_face(directory)
    return lambda: (_tensors(*(row[name] for name in COLUMNS)) for row in dataset)


def huggingface_torch(directory: Path) -> ReadAll:
    """What `with_format("torch")` gives: a tensor for each support."""
    dataset = _hugging_face(directory).with_format("torch")
    return lambda: (Piece(len(row["token_ids"]), *(row[name] for name in COLUMNS), None) for row in dataset)


def huggingface_arrow(directory: Path) -> ReadAll:
    """Arrow tables, as they are mapped into memory."""
    dataset = _hugging_face(directory).with_format("arrow")
    return lambda: map(_table, dataset.iter(batch_size=BATCH_ROWS))


def _table(table: pa.Table) -> Piece:
    tokens, logprobs, masks = (table[name].combine_chunks().flatten() for name in COLUMNS)
    return Piece(len(tokens), tokens, logprobs, masks.flatten(), masks.value_lengths())


def _hugging_face(directory: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(
        "parquet",
        data_files=[str(path) for path in list_shards(directory / "rollgen")],
        split="train",
        columns=COLUMNS,
        cache_dir=str(directory / "huggingface"),
    )


def jsonl_tensors(directory: Path) -> ReadAll:
    """JSON lines by orjson, the fastest parser there is for Python, as tensors."""
    return lambda: _read_jsonl(directory / "jsonl.zst")


def _read_jsonl(path: Path) -> Iterator[Piece]:
    import orjson

    with zstandard.open(path, "rb") as file:
        for line in io.BufferedReader(file, 1 << 20):
            row = orjson.loads(line)
            yield _tensors(*(row[name] for name in COLUMNS))


def pickle_tensors(directory: Path) -> ReadAll:
    """Lists, as tensors."""
    return lambda: _read_pickle(directory / "pickle")


def _read_pickle(path: Path) -> Iterator[Piece]:
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < size:
            yield _tensors(*pickle.load(file))


def _tensors(token_ids: list[int], logprobs: list[float], masks: list[list[int]]) -> Piece:
    from torch import float32, int32, tensor

    return Piece(
        len(token_ids),
        tensor(token_ids, dtype=int32),
        tensor(logprobs, dtype=float32),
        tensor(list(chain.from_iterable(masks)), dtype=int32),
        tensor(list(map(len, masks)), dtype=int32),
    )


def mds_stream(directory: Path) -> ReadAll:
    """The loader for training, as it comes: it waits 7 ms each time that it is `predownload` samples ahead."""
    return _mds_stream(directory)


def mds_ahead(directory: Path) -> ReadAll:
    """The same, allowed to be so far ahead that it never waits."""
    return _mds_stream(directory, predownload=1 << 20)


def _mds_stream(directory: Path, **options: Any) -> ReadAll:
    dataset = _streaming().StreamingDataset(
        local=str(directory / "mds"), shuffle=False, batch_size=BATCH_ROWS, **options
    )
    return lambda: map(_mds_sample, dataset)


def mds_local(directory: Path) -> ReadAll:
    """The same files as a plain list of samples: no shuffling, no division among ranks, no resuming."""
    dataset = _streaming().LocalDataset(str(directory / "mds"))
    return lambda: (_mds_sample(dataset[index]) for index in range(len(dataset)))


def _mds_sample(sample: dict[str, np.ndarray]) -> Piece:
    from torch import from_numpy

    arrays = [sample[name] for name in MDS_COLUMNS]
    return Piece(len(arrays[0]), *(from_numpy(array.copy()) for array in arrays))  # they are read-only


def _streaming() -> ModuleType:
    """`streaming.base`, without the rest of `streaming`, which wants a torchvision that fits this torch."""
    if "streaming" not in sys.modules:
        spec = find_spec("streaming")
        assert spec is not None
        sys.modules["streaming"] = module_from_spec(spec)  # not executed: that would import all of it
    import streaming.base

    return streaming.base


def lance_tensors(directory: Path) -> ReadAll:
    """Record batches to tensors of values and sizes, without a copy."""
    import lance

    dataset = lance.dataset(directory / "lance")
    return lambda: map(_record_batch, dataset.to_batches(columns=COLUMNS, batch_size=BATCH_ROWS))


def _record_batch(batch: pa.RecordBatch) -> Piece:
    from torch import from_dlpack

    tokens, logprobs, masks = (batch[name].flatten() for name in COLUMNS)
    arrays = (tokens, logprobs, masks.flatten(), masks.value_lengths())
    return Piece(len(tokens), *map(from_dlpack, arrays))
