"""From files to what a training loop takes: rollgen beside other stores of the same completions.

    python -m tests.benchmarks.loading [--masks FILE]

Every reader runs in a process of its own, on one core, from the page cache, in turns with the others. In the first pass
its memory is measured, and all must have read the same; the later ones are timed. rollgen verifies as always, and makes
padded batches; the others make no batches of tensors, Lance aside, so that a trainer has more to do.

The other packages are not part of the environment: `make bench` puts them into .cache/bench-packages, from where they
are imported here only. Without one of them, its rows say so.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import create_manifest
from rollgen.format.writer import build_row_groups, footer_metadata, manifest_schema, write_parquet
from tests.benchmarks import stores
from tests.benchmarks.masks import RawCompletion, read_completions, real_completions, synthetic_completions
from tests.benchmarks.memory import peak_kib
from tests.benchmarks.stores import Reader
from tests.conftest import random_completion, some_manifest

PACKAGES = Path(__file__).parents[2] / ".cache" / "bench-packages"
TOKENS = 1_000_000
SHUFFLED_TOKENS = 4_000_000
"""More, because a DataLoader's worker has to be started first: that is timed too."""
ROUNDS = 3
ROUND_SECONDS, LONGEST_SECONDS = 0.5, 2.0
"""A fast reader makes several passes in the first, a slow one is stopped after the second."""
SMALL_SHARDS = 10_000


class Case(NamedTuple):
    """One row of a table."""

    label: str
    read: Reader
    store: str
    """Name below the directory of all stores."""
    verifies: str
    package: str | None = None
    cores: int = 1


CHECKS = "checksums, headers, values"

CASES = (
    Case("rollgen RolloutStream", stores.rollgen_stream, "rollgen", CHECKS),
    Case("rollgen row groups, CSR tensors", stores.rollgen_row_groups, "rollgen", CHECKS),
    Case("rollgen RolloutDataset, collate", stores.rollgen_dataset, "rollgen", CHECKS),
    Case("HF datasets, Python rows", stores.huggingface_rows, "huggingface", "nothing", "datasets"),
    Case("HF datasets, torch format", stores.huggingface_torch, "huggingface", "nothing", "datasets"),
    Case("HF datasets, rows to tensors", stores.huggingface_tensors, "huggingface", "nothing", "datasets"),
    Case("HF datasets, Arrow, no tensors", stores.huggingface_arrow, "huggingface", "nothing", "datasets"),
    Case("JSON lines + zstd, orjson to tensors", stores.jsonl_tensors, "jsonl.zst", "JSON syntax", "orjson"),
    Case("pickle, to tensors", stores.pickle_tensors, "pickle", "nothing"),
    Case("MosaicML StreamingDataset, to tensors", stores.mds_stream, "mds", "nothing", "streaming"),
    Case("MosaicML, predownload without end", stores.mds_ahead, "mds", "nothing", "streaming"),
    Case("MosaicML LocalDataset, to tensors", stores.mds_local, "mds", "nothing", "streaming"),
    Case("Lance, to tensors", stores.lance_tensors, "lance", "nothing", "lance"),
)
SHUFFLED = (
    Case("in order", stores.rollgen_stream, "rollgen", CHECKS),
    Case("shuffled", stores.rollgen_shuffled, "rollgen", CHECKS),
    Case("shuffled, a DataLoader worker, 2 cores", stores.rollgen_worker, "rollgen", CHECKS, cores=2),
)


class FirstPass(NamedTuple):
    """What came out of a store, to be the same for all, and the memory that reading it took beyond the open reader."""

    tokens: int
    mask_ids: int
    """Sum over all supports."""
    logprobs: float
    """Sum over all tokens."""
    mib: float


class Opening(NamedTuple):
    """What opening a dataset took."""

    seconds: float
    mib: float


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masks", type=Path, help="a Parquet file to use as the second data set")
    arguments = parser.parse_args()
    sys.path.append(str(PACKAGES))  # last: the environment's own packages come first. Processes started here inherit it
    second = read_completions(arguments.masks) if arguments.masks else synthetic_completions()
    for name, data in (("real masks", real_completions()), ("synthetic masks", second)):
        rows = _repeated(data, TOKENS)
        tokens = sum(len(row.token_ids) for row in rows)
        ids = sum(len(mask) for row in data for mask in row.masks) / sum(len(row.token_ids) for row in data)
        print(f"\n{name}: {tokens:,} tokens, {ids:.1f} ids a support, medians of {ROUNDS} rounds")
        with tempfile.TemporaryDirectory() as scratch:
            stores.fill_stores(rows, Path(scratch))
            _print_table(CASES, Path(scratch))
    print(f"\nRolloutStream, synthetic masks, batches of {stores.BATCH_TOKENS:,} tokens")
    with tempfile.TemporaryDirectory() as scratch:
        stores.fill_rollgen(_repeated(second, SHUFFLED_TOKENS), Path(scratch))
        _print_table(SHUFFLED, Path(scratch))
    print(f"\nopening a dataset of {SMALL_SHARDS:,} shards")
    _print_openings()


def _repeated(data: list[RawCompletion], tokens: int) -> list[RawCompletion]:
    return data * math.ceil(tokens / sum(len(row.token_ids) for row in data))


def _print_table(cases: Sequence[Case], directory: Path) -> None:
    print(f"{'':40}{'Mtokens/s':>10}{'rollgen is':>12}{'peak MiB':>10}{'bytes/token':>13}  verifies", flush=True)
    installed = [case for case in cases if case.package is None or find_spec(case.package)]
    firsts, speeds = _measure(installed, directory)
    _check_equal(firsts)
    base = speeds[cases[0].label]
    for case in cases:
        if case not in installed:
            print(f"{case.label:40}  not installed")
            continue
        speed, first = speeds[case.label], firsts[case.label]
        size = _bytes(directory / case.store) / first.tokens
        row = f"{speed / 1e6:>10.2f}{base / speed:>11.2f}x{first.mib:>10.0f}{size:>13.2f}"
        print(f"{case.label:40}{row}  {case.verifies}", flush=True)


def _measure(cases: Sequence[Case], directory: Path) -> tuple[dict[str, FirstPass], dict[str, float]]:
    """First pass and median tokens a second, by label."""
    with ExitStack() as resources:
        workers = [resources.enter_context(_process(case.cores)) for case in cases]
        wait([worker.submit(bool) for worker in workers])  # all are started, at the same time
        firsts = {
            case.label: worker.submit(first_pass, case.read, directory).result()
            for case, worker in zip(cases, workers, strict=True)
        }
        speeds: dict[str, list[float]] = {case.label: [] for case in cases}
        for _ in range(ROUNDS):  # interleaved, so that a slow moment of the machine hits all alike
            for case, worker in zip(cases, workers, strict=True):
                speeds[case.label].append(worker.submit(timed_passes, case.read, directory).result())
    return firsts, {label: statistics.median(values) for label, values in speeds.items()}


def _check_equal(firsts: dict[str, FirstPass]) -> None:
    """A reader that returned other values than the first one would have measured something else."""
    expected = next(iter(firsts.values()))
    for label, first in firsts.items():
        assert first.tokens == expected.tokens, f"{label}: {first}"
        assert first.mask_ids == expected.mask_ids, f"{label}: {first}"
        assert math.isclose(first.logprobs, expected.logprobs, rel_tol=1e-5), f"{label}: {first}"


def _bytes(store: Path) -> int:
    files = [store] if store.is_file() else store.rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def _process(cores: int) -> ProcessPoolExecutor:
    """A fresh process that stays, on so many cores."""
    chosen = sorted(os.sched_getaffinity(0))[-cores:]
    spawn = multiprocessing.get_context("spawn")  # MosaicML's shared memory is cleaned up at a regular exit only
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=limit_threads, initargs=(chosen,))


def limit_threads(cores: Sequence[int]) -> None:
    """Of this process. Threads that it starts from now on stay on these cores; the imports take any."""
    import pyarrow as pa
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    pa.set_cpu_count(1)


def first_pass(read: Reader, directory: Path) -> FirstPass:
    """Read everything once. A mapped file counts as memory where it has been read, a DataLoader's worker does not."""
    read_all = read(directory)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    before = psutil.Process().memory_info().rss
    tokens, mask_ids, logprobs = 0, 0, 0.0
    for piece in read_all():
        tokens += piece.tokens
        mask_ids += int(_total(piece.mask_ids))
        logprobs += float(_total(piece.logprobs))
    return FirstPass(tokens, mask_ids, logprobs, (peak_kib() * 1024 - before) / (1 << 20))


def _total(values: Any) -> float:
    import pyarrow as pa
    import pyarrow.compute as pc
    import torch

    if isinstance(values, pa.Array):
        return pc.sum(values).as_py()
    if isinstance(values, list):
        return sum(map(_total, values)) if isinstance(values[0], list | torch.Tensor) else sum(values)
    return values.sum(dtype=torch.float64).item()


def timed_passes(read: Reader, directory: Path) -> float:
    """Tokens a second. The store is opened anew for each pass: nothing is left from the last one in any cache."""
    tokens, seconds = 0, 0.0
    end = time.perf_counter() + ROUND_SECONDS
    while time.perf_counter() < end:
        read_all = read(directory)
        gc.collect()
        started = time.perf_counter()
        for piece in read_all():
            tokens += piece.tokens
            elapsed = time.perf_counter() - started
            if elapsed > LONGEST_SECONDS:
                break
        seconds += elapsed
    return tokens / seconds


def _print_openings() -> None:
    """How a dataset of very many very small shards opens."""
    memory = Path("/dev/shm")  # ten thousand commits take a while where a disk takes part
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        _fill_small_shards(Path(scratch))
        print(f"{'':40}{'seconds':>10}{'MiB':>8}", flush=True)
        for name in ("RolloutStream", "RolloutDataset"):
            with _process(1) as worker:
                opening = worker.submit(open_dataset, name, scratch).result()
            print(f"{name:40}{opening.seconds:>10.2f}{opening.mib:>8.0f}", flush=True)


def _fill_small_shards(directory: Path) -> None:
    """Committed as ever, but for reading each one back."""
    manifest = some_manifest()
    assert create_manifest(directory, manifest)
    schema = manifest_schema(manifest).with_metadata(footer_metadata(manifest))
    with WriterSlot(directory, "w0") as slot:
        for index in range(SMALL_SHARDS):
            completion = random_completion(index)
            temporary = slot.temporary()
            write_parquet(temporary, build_row_groups([completion], schema), schema)
            tokens, mask_ids = len(completion.token_ids), len(completion.mask_ids)
            slot.append(slot.publish(temporary, rows=1, tokens=tokens, mask_ids=mask_ids))
            temporary.unlink()


def open_dataset(name: str, directory: str) -> Opening:
    """Open it by the class of that name."""
    import rollgen

    make = getattr(rollgen, name)  # imports what it needs
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    dataset = make(directory)
    elapsed = time.perf_counter() - started
    grown = psutil.Process().memory_info().rss - before
    del dataset
    return Opening(elapsed, grown / (1 << 20))


if __name__ == "__main__":
    main()
