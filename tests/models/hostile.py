"""All readers of a dataset over directories that may be hostile, in a process whose memory is bounded.

    python -m models.hostile DIRECTORY...

prints one JSON line for each: `{"name", "mib", "outcomes": {reader: outcome}}`.

An outcome is what the reader returned, `{"read": ...}`, a RollgenError, `{"refused": message}`, or anything else,
`{"crashed": ...}`. `mib` is by how much the process has grown at most since its imports. It cannot take more than
MEMORY_BYTES of addresses, so that a bomb ends it rather than the machine.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from rollgen.errors import RollgenError
from rollgen.format.reader import open_dataset
from rollgen.inspect.rewards import stored_rewards
from rollgen.inspect.sample import read_sample
from rollgen.inspect.sample_view import render_sample
from rollgen.inspect.stats import stats_of
from rollgen.inspect.status import run_status
from rollgen.loader.dataset import RolloutDataset
from rollgen.loader.stream import RolloutStream
from rollgen.verify.dataset import verify_dataset

MEMORY_BYTES: Final = 4 << 30
SECONDS: Final = 120
"""For all readers of one directory: far more than they need, far less than a pipe or a device would take."""


def verify(directory: Path) -> list[tuple[str, str]]:
    """Kind and file of each finding."""
    found = verify_dataset(directory)
    json.dumps(found.to_json(), allow_nan=False)
    return [(finding.kind, finding.file) for finding in found.findings]


def load(directory: Path) -> int:
    """Every sample of the map-style dataset."""
    dataset = RolloutDataset(directory)
    return len([dataset[index] for index in range(len(dataset))])


def stream(directory: Path) -> int:
    """One shuffled epoch."""
    return sum(len(batch.prompt_id) for batch in RolloutStream(directory, batch_tokens=64, shuffle=True, seed=0))


def inspect(directory: Path) -> int:
    """The figures, as JSON."""
    dataset = open_dataset(directory)
    stats = stats_of(dataset, stored_rewards(dataset))
    json.dumps(stats.to_json(), allow_nan=False)
    return stats.samples.samples


def sample(directory: Path) -> int:
    """One sample with all that `inspect --sample` shows, as JSON and as text."""
    found = read_sample(directory, "emoji-😀:0")
    shown = found.to_json(at=0)
    json.dumps(shown, allow_nan=False)
    for at in (None, 0):
        render_sample(found, Console(file=io.StringIO()), at)
    return len(shown["tokens"])


def status(directory: Path) -> int:
    """How the run stands."""
    found = run_status(directory)
    json.dumps(found.to_json(), allow_nan=False)
    return found.stored


READERS: Final[dict[str, Callable[[Path], Any]]] = {
    reader.__name__: reader for reader in (verify, load, stream, inspect, sample, status)
}


def outcome(reader: Callable[[Path], Any], directory: Path) -> dict[str, Any]:
    """What comes of one reader."""
    try:
        return {"read": reader(directory)}
    except RollgenError as error:
        return {"refused": str(error)}
    except BaseException as error:  # noqa: BLE001  (whatever it is, it is to be reported)
        return {"crashed": f"{type(error).__name__}: {error}"}


def limit_memory() -> None:
    """MEMORY_BYTES from here on; one thread for torch."""
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Run all readers over the directories that are named."""
    limit_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for argument in sys.argv[1:]:
        directory = Path(argument)
        signal.alarm(SECONDS)  # ends the process
        outcomes = {name: outcome(reader, directory) for name, reader in READERS.items()}
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        print(json.dumps({"name": directory.name, "mib": grown, "outcomes": outcomes}), flush=True)


if __name__ == "__main__":
    main()
