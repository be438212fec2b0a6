"""Files that were changed at random, through everything that reads them: it succeeds, or it is a RollgenError.

Bytes are flipped, cut, repeated and replaced; Thrift structs (footers, page headers) and JSON are taken apart, changed
in one place and put together again, and hashes made to fit, so that a change is looked at and not only its hash.

Hypothesis chooses, in batches that follow from a seed and their numbers: of a reader that crashes, the smallest change
that makes it is printed. The readers run in a process of their own: when it dies, hangs or takes gigabytes, what it was
at is on disk, the batch and the changed files, and `keep_failure` says where. A batch is done again by

    python -m soak.fuzz DIRECTORY SEED SECONDS [BATCH]        (that process, in tests/, from that batch on)
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

TESTS: Final = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS.parent / "schema" / "conformance"))

import hostile_changes  # noqa: E402
import parquet_bytes  # noqa: E402
from hostile_dataset import JOURNAL, MANIFEST, Hostile, write_base  # noqa: E402
from models.hostile import READERS, limit_memory, outcome  # noqa: E402

from rollgen.format.journal import file_sha256  # noqa: E402
from rollgen.prompts.readers import parse_object  # noqa: E402
from rollgen.prompts.sources import PromptFiles  # noqa: E402

NUMBERS: Final = (0, 1, -1, 5, 2**15, 2**31 - 1, -(2**31), 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
RETRY: Final = "retry-1.parquet"
FAILURES: Final = "failures/w0.jsonl"
FAILURE: Final = {"prompt_id": "7", "prompt_index": 1, "sample_index": 2, "stage": "engine", "error": "", "time": ""}
SECONDS: Final = 180
"""For one attempt, of which there are some fifty a second."""
BATCH: Final = 50
"""Attempts that Hypothesis plans together: about a second's."""
END_SECONDS: Final = 300
"""For the process to begin, to shrink what it has found, and to end."""
ATTEMPT: Final = "attempt.json"
"""What the process is at."""

Rng = random.Random
Spoil = Callable[[Hostile, Rng], None]


def run(seconds: float, seed: int) -> str:
    """Fuzz for so long. Returns one line of figures. Raises AssertionError at the first crash, naming its seed."""
    with tempfile.TemporaryDirectory(prefix="rollgen-fuzz-") as scratch:
        command = [sys.executable, "-m", "soak.fuzz", scratch, str(seed), str(seconds)]
        environment = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": scratch}
        done = subprocess.run(
            command,
            cwd=TESTS,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=seconds + END_SECONDS,
        )
        if done.returncode != 0:
            kept = keep_failure(Path(scratch))
            at = kept / ATTEMPT
            attempt = at.read_text() if at.exists() else "before the first attempt"
            raise AssertionError(f"exit {done.returncode} at {attempt}; kept in {kept}\n{done.stderr[-4000:]}")
        return done.stdout.splitlines()[-1]


def keep_failure(scratch: Path) -> Path:
    """Copy what was being read to a place that stays, and say where."""
    kept = Path(tempfile.mkdtemp(prefix="rollgen-fuzz-failure-"))
    shutil.copytree(scratch, kept, dirs_exist_ok=True, symlinks=True)
    return kept


def mutated_bytes(content: bytes, rng: Rng) -> bytes:
    """One to three changes."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 2, 8, 64, 1000))
        change = rng.choice(("flip", "overwrite", "remove", "repeat", "zero", "cut"))
        note(f"{change} at byte {at}, {length} bytes")
        match change:
            case "flip" if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case "overwrite":
                changed[at : at + length] = rng.randbytes(length)
            case "remove":
                del changed[at : at + length]
            case "repeat":
                changed[at:at] = changed[at : at + length]
            case "zero":
                changed[at : at + length] = bytes(length)
            case _:
                del changed[at:]
    return bytes(changed)


Place = tuple[Any, Any]
"""A container, and the key or index of one of its values."""


def places_of(value: Any) -> Iterator[Place]:
    """Every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from places_of(item)


def mutated_json(value: Any, rng: Rng) -> Any:
    """One value replaced, removed or nested."""
    container, key = rng.choice(list(places_of(value)))
    others = (
        *NUMBERS,
        10**30,
        0.5,
        float("nan"),
        True,
        None,
        "",
        "\ud800",
        "../..",
        "x" * 5000,
        [],
        {},
        container[key],
    )
    note(("changed", key, container[key]))
    if rng.randrange(8) == 7:
        del container[key]
    elif rng.randrange(8) == 7:
        container[key] = [container[key]]
    else:
        container[key] = rng.choice(others)
    note(("now", container))
    return value


def thrift_places(fields: parquet_bytes.Fields) -> Iterator[Place]:
    """Every field of a struct, and of the structs in it."""
    for field, (kind, value) in list(fields.items()):
        yield fields, field
        if kind == parquet_bytes.STRUCT:
            yield from thrift_places(value)
        elif kind == parquet_bytes.LIST and value[0] == parquet_bytes.STRUCT:
            for item in value[1]:
                yield from thrift_places(item)


def mutate_struct(fields: parquet_bytes.Fields, rng: Rng) -> None:
    """One field of it changed or removed, or put in place of another."""
    container, field = rng.choice(list(thrift_places(fields)))
    kind, value = container[field]
    note(("changed field", field, kind, value))
    if rng.randrange(6) == 5:
        del container[field]
    elif kind in (4, 5, 6):
        container[field] = (kind, rng.choice((*NUMBERS, value + 1, value - 1, value * 2)))
    elif kind == parquet_bytes.BINARY:
        container[field] = (kind, mutated_bytes(value, rng))
    elif kind == parquet_bytes.LIST:
        element, items = value
        container[field] = (kind, (element, rng.choice((items[:-1], items + items[:1], [], items[::-1]))))
    else:
        container[rng.randrange(1, 20)] = (kind, value)
    note(("now", container))


def mutated_parquet(content: bytes, rng: Rng) -> bytes:
    """As bytes, in the footer, or in the header of a page."""
    match rng.randrange(4):
        case 0:
            return mutated_bytes(content, rng)
        case 1:
            start = parquet_bytes.footer_start(content)
            return parquet_bytes.with_raw_footer(content, mutated_bytes(content[start:-8], rng))
        case 2:
            return parquet_bytes.with_footer(content, lambda fields: mutate_struct(fields, rng))
        case _:
            fields, _ = parquet_bytes.decode(content, parquet_bytes.footer_start(content))
            leaf = rng.randrange(len(parquet_bytes.first_group(fields)[parquet_bytes.CHUNKS][1][1]))
            return parquet_bytes.with_page_header(content, leaf, lambda header: mutate_struct(header, rng))


def spoil_shard(case: Hostile, rng: Rng) -> None:
    """With a journal line that fits."""
    case.shard_bytes(lambda content: mutated_parquet(content, rng))


def spoil_plan(case: Hostile, rng: Rng) -> None:
    """With its hash in the manifest."""
    case.plan_bytes(lambda content: mutated_parquet(content, rng))


def spoil_retry(case: Hostile, rng: Rng) -> None:
    """With its hash in the manifest."""
    path = case.path(RETRY)
    path.write_bytes(mutated_parquet(path.read_bytes(), rng))
    [retry] = json.loads(case.path(MANIFEST).read_text())["retries"]
    case.manifest(retries=[retry | {"sha256": file_sha256(path)}])


def spoil_json(name: str) -> Spoil:
    """The first line of a file, or all of it, as JSON or as bytes."""

    def spoil(case: Hostile, rng: Rng) -> None:
        path = case.path(name)
        content = path.read_bytes()
        if rng.randrange(2):
            path.write_bytes(mutated_bytes(content, rng))
            return
        value = mutated_json(json.loads(content), rng)
        if name == MANIFEST:
            value.pop("sha256", None)  # as an older writer's
        path.write_text(json.dumps(value) + "\n")

    return spoil


DATASETS: Final[dict[str, Spoil]] = {
    "shard": spoil_shard,
    "plan": spoil_plan,
    "retry list": spoil_retry,
    "manifest": spoil_json(MANIFEST),
    "journal": spoil_json(JOURNAL),
    "failures": spoil_json(FAILURES),
}


def make_base(directory: Path) -> Hostile:
    """A sound dataset with one of every kind of file."""
    case = write_base(directory)
    hostile_changes.retry(case, [(2, 0)])
    hostile_changes.failures(case, json.dumps(FAILURE) + "\n")
    return case


def make_prompts() -> dict[str, bytes]:
    """Sound prompt files by name."""
    rows = [
        {"id": "a", "prompt": "héllo 😀", "n": 2, "meta": {"a": [1, None, 1e300]}},
        {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5, "stop": ["a"]},
        {"prompt_token_ids": [1, 2, 3], "seed": 2**62},
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return {
        "p.jsonl": text,
        "p.jsonl.gz": gzip.compress(text),
        "p.jsonl.zst": zstandard.compress(text),
        "p.parquet": sink.getvalue().to_pybytes(),
    }


def read_prompts(path: Path) -> int:
    """Every row of a prompt file, taken apart."""
    rows = 0
    with PromptFiles([str(path)]) as files:
        for line in files:
            try:
                parse_object(line.data)
            except ValueError:  # what the planner makes a UsageError of, with the line in front
                continue
            rows += 1
    return rows


class Fuzzer:
    """Changes files in a directory and has them read."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._base = make_base(scratch / "base").directory
        self._prompts = make_prompts()
        self._targets = [(kind, reader) for kind in DATASETS for reader in READERS]
        self._targets += 2 * [(name, read_prompts.__name__) for name in self._prompts]
        self.tally: Counter[str] = Counter()
        """Attempts by what came of them."""

    def batch(self, seed: int, number: int) -> None:
        """BATCH attempts. Raises AssertionError, with notes that say what was changed, for one that crashes."""

        @seeded(f"{seed} {number}")
        @settings(
            max_examples=BATCH,
            phases=(Phase.generate, Phase.shrink),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(st.sampled_from(self._targets), st.randoms(use_true_random=False))
        def attempt(target: tuple[str, str], rng: Rng) -> None:
            said = {"seed": seed, "batch": number, "target": target}
            (self._scratch / ATTEMPT).write_text(json.dumps(said))
            signal.alarm(SECONDS)
            found = self._read_changed(*target, rng)
            signal.alarm(0)
            assert "crashed" not in found, found
            self.tally.update(found.keys())

        attempt()

    def _read_changed(self, kind: str, reader: str, rng: Rng) -> dict[str, Any]:
        if kind in self._prompts:
            path = self._scratch / kind
            change = mutated_parquet if path.suffix == ".parquet" else mutated_bytes
            path.write_bytes(change(self._prompts[kind], rng))
            return outcome(read_prompts, path)
        directory = self._scratch / "dataset"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._base, directory)
        DATASETS[kind](Hostile(directory), rng)
        return outcome(READERS[reader], directory)


def main() -> None:
    """Batches until the time is over. Exits with 1 at the first crash."""
    scratch, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    fuzzer, number = Fuzzer(scratch), int(*sys.argv[4:])
    limit_memory()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fuzzer.batch(seed, number)
        number += 1
    tally = fuzzer.tally
    print(f"{tally.total():,} changed files: {tally['refused']:,} refused, {tally['read']:,} read, nothing else")


if __name__ == "__main__":
    main()
