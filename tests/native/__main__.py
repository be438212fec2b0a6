"""`make native-gpu`: the proof of `tests/native/proof.py` on a CUDA device, with its table.

    python -m tests.native [--model MODEL] [--prompts N] [--max-tokens N]

The model is a local directory or a Hugging Face id; without one, the embedded demo model if it has been made, else a
tiny one made on the spot. Exits 0 when every token agrees and also, saying so, where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rollgen.config import EMBEDDED_MODEL
from tests.models.tiny import make_tiny_model
from tests.native import proof

DTYPES = ("float32", "bfloat16")
COMMAND = (sys.executable, "-c", "from rollgen.cli.app import main; main()", "generate")
N = 16
"""Samples of each prompt where throughput is measured."""


def main() -> int:
    """Parse, prove, print. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.native", description="Proof of native sampling masks.")
    parser.add_argument("--model", help="local directory or Hugging Face id")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"native-gpu: skipped, torch {torch.__version__} sees no CUDA device (another environment: PYTHON=...)")
        return 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = arguments.model or _default_model(directory)
        varied = proof.write_prompts(directory / "varied.jsonl", arguments.prompts)
        uniform = proof.write_prompts(directory / "uniform.jsonl", arguments.prompts, varied=False)
        print(f"{torch.cuda.get_device_name()}, model {model}, {arguments.prompts} prompts")
        exact = True
        for dtype in DTYPES:
            flags = ("--model", model, "--dtype", dtype, "--max-tokens", arguments.max_tokens)
            found = proof.prove(generate, varied, directory / dtype, *flags, "--enforce-eager")
            print(f"\n{dtype}\n{found}")
            exact &= found.exact
            for way in proof.SPEEDS:
                rate = proof.speed(generate, way, uniform, directory / dtype, "--n", N, *flags)
                print(f"{way:8} {rate:10.0f} tokens/s")
    return 0 if exact else 1


def generate(*arguments: object) -> dict[str, Any]:
    """See `proof.Generate`. Raises CalledProcessError when samples failed; the reason is on stderr."""
    command = [*COMMAND, *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def _default_model(directory: Path) -> Path:
    return EMBEDDED_MODEL if EMBEDDED_MODEL.is_dir() else make_tiny_model(directory / "tiny")


if __name__ == "__main__":
    sys.exit(main())
