"""`python -m models.cluster_program ENGINE ADDRESS PROMPTS MODEL OUT N`: a run on a Ray cluster with fake engines.

Starts or continues; ends like the command line: 0, 1, or 128 and the number of the signal.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from models.runs import Recorder

from rollgen.cluster.crew import RayCrew
from rollgen.config import RunConfig
from rollgen.loop.run import generate
from rollgen.loop.stop import Interrupted


def main(engine: str, address: str, prompts: str, model: str, out: str, n: str) -> int:
    """Returns the exit code."""
    settings = {"model": model, "n": n, "ray": address, "max_tokens": 8, "top_k": 8, "replicas": 2}
    try:
        stats = generate(
            [Path(prompts)],
            RunConfig.model_validate(settings | {"commit_interval": 0.2}),
            out,
            reporter=Recorder(),
            make_crew=partial(RayCrew, make_engine=f"models.cluster_engines:{engine}"),
            resume=True,
        )
    except Interrupted as stop:
        return 128 + stop.signal_number
    return stats.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
