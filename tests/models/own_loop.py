"""A process of a loop with several: it makes half of its part, says so, and the rest when it is let.

python own_loop.py OUT PROMPTS MODEL NUMBER OF RELEASE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from models.outputs import plain

from rollgen.rollout_writer import RolloutWriter


def main() -> None:
    out, prompts, model, number, of, release = sys.argv[1:]
    with RolloutWriter(
        out,
        prompts=prompts,
        writer=f"w{number}",
        part=(int(number), int(of)),
        model=model,
        max_tokens=8,
        top_k=8,
        n=2,
        commit_interval=1e-6,  # whenever the one before is done
    ) as writer:
        requests = list(writer.owed())
        print("owes", len(requests), flush=True)
        for place, request in enumerate(requests):
            if place == len(requests) // 2:
                print("half", flush=True)
                wait_for(Path(release))
            writer.add(request, plain(request))
    print("done", flush=True)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
