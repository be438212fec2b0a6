"""Files that were changed at random, through everything that reads them: it succeeds, or it is a RollgenError.

Bytes are flipped, cut, repeated and replaced; Thrift structs (footers, page headers) and JSON are taken apart, changed
in one place and put together again, and hashes made to fit, so that a change is looked at and not only its hash. All of
it follows from a seed. The readers run in a process of their own: when it dies, hangs or takes gigabytes, the attempt
that did it is on disk, and `keep_failure` says where.

    python -m soak.fuzz DIRECTORY SEED SECONDS        (that process, in tests/)
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
SECONDS: Final = 20
"""For one attempt."""
START_SECONDS: Final = 60
"""For the process to begin and to end."""

Rng = random.Random
Spoil = Callable[[Hostile, Rng], None]


def run(seconds: float, seed: int) -> str:
    """Fuzz for so long. Returns one line of figures. Raises AssertionError at the first crash, naming its seed."""
    with tempfile.TemporaryDirectory(prefix="rollgen-fuzz-") as scratch:
        command = [sys.executable, "-m", "soak.fuzz", scratch, str(seed), str(seconds)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
        done = subprocess.run(
            command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=seconds + START_SECONDS
        )
        lines = done.stdout.splitlines()
        if done.returncode != 0:
            kept = keep_failure(Path(scratch))
            raise AssertionError(
                f"seed {seed}: exit {done.returncode}, {lines[-1:]}; kept in {kept}\n{done.stderr[-2000:]}"
            )
        return lines[-1]


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
        match rng.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at : at + length] = rng.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length]
            case 4:
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
    if rng.randrange(8) == 0:
        del container[key]
    elif rng.randrange(8) == 0:
        container[key] = [container[key]]
    else:
        container[key] = rng.choice(others)
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
    if rng.randrange(6) == 0:
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


def attempt_dataset(base: Path, directory: Path, rng: Rng) -> tuple[str, dict[str, Any]]:
    """One kind of file changed, through one reader."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(base, directory)
    kind = rng.choice(list(DATASETS))
    DATASETS[kind](Hostile(directory), rng)
    return kind, outcome(rng.choice(list(READERS.values())), directory)


def attempt_prompts(sound: dict[str, bytes], directory: Path, rng: Rng) -> tuple[str, dict[str, Any]]:
    """One kind of prompt file changed and read."""
    name = rng.choice(list(sound))
    change = mutated_parquet if name.endswith(".parquet") else mutated_bytes
    path = directory / name
    path.write_bytes(change(sound[name], rng))
    return name, outcome(read_prompts, path)


def main() -> None:
    """Attempts until the time is over, each from a seed of its own; exits with 1 at the first crash."""
    scratch, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    base, prompts = make_base(scratch / "base").directory, make_prompts()
    limit_memory()
    tally: Counter[str] = Counter()
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        rng = random.Random(f"{seed} {number}")
        signal.alarm(SECONDS)
        if rng.randrange(5):
            kind, found = attempt_dataset(base, scratch / "dataset", rng)
        else:
            kind, found = attempt_prompts(prompts, scratch, rng)
        [result] = found
        if result == "crashed":
            print(f"attempt {number}, {kind}: {found[result]}", flush=True)
            sys.exit(1)
        tally[result] += 1
        number += 1
    print(f"{number:,} changed files: {tally['refused']:,} refused, {tally['read']:,} read, nothing else")


if __name__ == "__main__":
    main()
