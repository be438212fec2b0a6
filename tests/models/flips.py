"""Single flipped bits: whatever a dataset says afterwards is what it said before, or it says that it is damaged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from models.datasets import read_rows, write_prompts
from models.program import Program
from models.stages import RETRY, command

from rollgen.errors import RollgenError
from rollgen.format.journal import list_shards, read_journal
from rollgen.format.manifest import read_manifest
from rollgen.loader.dataset import RolloutDataset
from rollgen.verify.dataset import verify_dataset


class Place(NamedTuple):
    """Bytes of a file that are flipped as often as those of any other place."""

    kind: str
    path: Path
    start: int
    stop: int


@dataclass(slots=True)
class Tally:
    """What the flips came to."""

    detected: Counter[str] = field(default_factory=Counter)
    """By kind of place: `verify_dataset` reports it."""
    harmless: Counter[str] = field(default_factory=Counter)
    """It does not, and everything that is decoded is what it was."""
    refused: int = 0
    """Flips because of which `RolloutDataset` raised a RollgenError; else it gave exactly the original rows."""
    wrong: list[str] = field(default_factory=list)
    """All others: something else is decoded and nothing says so, or an error that is not rollgen's."""

    def __str__(self) -> str:
        detected, harmless = self.detected.total(), self.harmless.total()
        kinds = sorted(self.detected | self.harmless)
        by_kind = ", ".join(
            f"{kind} {self.detected[kind]}/{self.detected[kind] + self.harmless[kind]}" for kind in kinds
        )
        return (
            f"{detected + harmless + len(self.wrong):,} flipped bits: {detected:,} detected, {harmless:,} harmless, "
            f"{len(self.wrong)} silently wrong; the loader refused {self.refused:,}; detected by place: {by_kind}"
        )


def make_dataset(program: Program, directory: Path, model: Path) -> Path:
    """Two shards and a compacted one, two retries, journals with retired lines, stored support logprobs."""
    out = directory / "flipped"
    prompts = write_prompts(directory / "prompts.jsonl", 10)
    generate = (*command(model, prompts), "--out", out, "--support-logprobs", "--resume")
    program(*generate, "--n", 1)
    program(*generate, "--n", 2)
    program(*generate, "--n", 2, *RETRY)
    program("compact", out)
    program(*generate, "--n", 3)
    program(*generate, "--n", 3, *RETRY)
    assert len(list_shards(out)) == 3
    return out


def flip_bits(directory: Path, count: int, seed: int) -> Tally:
    """Flip so many bits, each by itself. The dataset is what it was afterwards."""
    rng, tally = random.Random(seed), Tally()
    places = sorted(_places(directory))
    kinds = sorted({place.kind for place in places})
    content, handed_out = _everything(directory), _handed_out(directory)
    assert verify_dataset(directory).is_clean
    for _ in range(count):
        kind = rng.choice(kinds)
        place = rng.choice([one for one in places if one.kind == kind])
        position, bit = rng.randrange(place.start, place.stop), rng.randrange(8)
        name = f"{place.path.relative_to(directory)}, byte {position}, bit {bit}"
        with _flipped(place.path, position, bit):
            try:
                _judge(directory, kind, name, content, handed_out, tally)
            except Exception as error:  # noqa: BLE001  # the finding of such a test
                tally.wrong.append(f"{name}: {type(error).__name__}: {error}")
    return tally


def _judge(directory: Path, kind: str, name: str, content: object, handed_out: object, tally: Tally) -> None:
    again = _or_refused(lambda: _handed_out(directory))
    tally.refused += again is None
    if again not in (None, handed_out):
        tally.wrong.append(f"{name}: the loader hands out something else")
    elif not verify_dataset(directory).is_clean:
        tally.detected[kind] += 1
    elif _or_refused(lambda: _everything(directory)) == content:
        tally.harmless[kind] += 1
    else:
        tally.wrong.append(f"{name}: verified as clean, but something else is decoded")


def _places(directory: Path) -> Iterator[Place]:
    for path in list_shards(directory):
        size = path.stat().st_size
        footer = size - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
        yield Place("pages", path, 0, footer)
        yield Place("footer", path, footer, size)
    files = [
        *((kind, directory / name) for kind, name in (("manifest", "rollgen.json"), ("plan", "plan.parquet"))),
        *(("journal", path) for path in (directory / "journal").glob("*.jsonl")),
        *(("retries", path) for path in directory.glob("retry-*.parquet")),
    ]
    for kind, path in files:
        yield Place(kind, path, 0, path.stat().st_size)


@contextmanager
def _flipped(path: Path, position: int, bit: int) -> Iterator[None]:
    original = path.read_bytes()
    damaged = bytearray(original)
    damaged[position] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        yield
    finally:
        path.write_bytes(original)


def _or_refused(read: Callable[[], Any]) -> Any:
    """What is read, or None when it is refused."""
    try:
        return read()
    except (RollgenError, pa.ArrowException, OSError):  # the latter two from plan and retry lists, which are read plain
        return None


def _everything(directory: Path) -> tuple[object, ...]:
    """All that is decoded from the files that are flipped. Of a retirement, its file alone says what it means."""
    tables = [directory / "plan.parquet", *sorted(directory.glob("retry-*.parquet"))]
    journal = read_journal(directory)
    return (
        read_manifest(directory).model_dump(),
        journal.committed,
        journal.retired.keys(),
        [pq.read_table(path).to_pylist() for path in tables],
        read_rows(directory),
    )


def _handed_out(directory: Path) -> list[list[object]]:
    """All samples of the loader with its default settings."""
    dataset = RolloutDataset(directory)
    return [_plain(dataset[number]) for number in range(len(dataset))]


def _plain(value: Any) -> Any:
    """Tensors as lists, data classes as tuples: comparable."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return [_plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value
