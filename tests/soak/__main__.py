"""`make soak`: the fault tests of `tests/faults` at length, and with real vLLM. Some fifteen minutes on two cores.

    python -m tests.soak [--kills N] [--prompts N] [--vllm-kills N] [--flips N] [--no-steps] [--fuzz-minutes M]
                         [--seed S]

    steps   a small dataset's life, killed in front of each of its steps
    kills   one long generation, ended N times at random moments
    vllm    the same with the real engine
    flips   single bits, each of which is reported or harmless
    fuzz    files changed at random, through everything that reads them

Prints a figure for each part, and exits with 1 when one of them fails; 0 leaves a part out. All that is temporary lies
in one directory, which is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))  # as in the test suite: `models`, `soak`

Part = Callable[[], object]
"""Returns the figure. Raises AssertionError, or whatever went wrong."""


def main() -> int:
    """Run the parts one after the other. Returns the exit code."""
    arguments = _parse()
    print(f"seed {arguments.seed}", flush=True)
    with TemporaryDirectory(prefix="rollgen-soak-") as name:
        os.environ["TMPDIR"] = name
        parts = _parts(arguments, Path(name))
        return 1 if [part for part, run in parts.items() if not _passes(part, run)] else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Fault tests at length.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=5000, help="of the long generation")
    parser.add_argument("--vllm-kills", type=int, default=10)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fuzz-minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    return parser.parse_args()


def _parts(arguments: argparse.Namespace, directory: Path) -> dict[str, Part]:
    """Those that are wanted and can be run."""
    from models.flips import flip_bits, make_dataset
    from models.kills import Hunt
    from models.program import Program
    from models.stages import Life
    from models.tiny import make_tiny_model
    from soak import fuzz, vllm_kills
    from transformers.utils.logging import disable_progress_bar

    def place(part: str) -> Path:
        (directory / part).mkdir()
        return directory / part

    def flips() -> object:
        tally = flip_bits(make_dataset(program, place("flips"), model), arguments.flips, arguments.seed)
        assert not tally.wrong, "\n".join([str(tally), *tally.wrong])
        return tally

    def kills() -> object:
        wanted = {"prompts": arguments.prompts, "kills": arguments.kills, "seed": arguments.seed}
        return Hunt(program, place("kills"), model, **wanted).run()

    def vllm() -> object:
        return vllm_kills.run(place("vllm"), model, kills=arguments.vllm_kills, seed=arguments.seed)

    disable_progress_bar()
    program, model = Program(place("scratch")), make_tiny_model(directory / "tiny")
    parts: dict[str, tuple[float, Part]] = {
        "steps": (arguments.steps, lambda: Life(program, place("steps"), model).kill_at_all_steps()),
        "kills": (arguments.kills, kills),
        "flips": (arguments.flips, flips),
        "vllm": (arguments.vllm_kills and find_spec("vllm") is not None, vllm),
        "fuzz": (arguments.fuzz_minutes, lambda: fuzz.run(60 * arguments.fuzz_minutes, arguments.seed)),
    }
    return {name: part for name, (wanted, part) in parts.items() if wanted}


def _passes(name: str, part: Part) -> bool:
    """Run a part and print its figure, or what went wrong."""
    started = time.monotonic()
    try:
        figure = part()
    except Exception:  # noqa: BLE001  # the next part is run all the same
        print(f"{name}: FAILED after {time.monotonic() - started:.0f} s\n{traceback.format_exc()}", flush=True)
        return False
    print(f"{name}: {figure} ({time.monotonic() - started:.0f} s)", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
