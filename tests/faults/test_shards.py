"""`--shard i/N`: several processes make one dataset, whoever of them dies, and whenever they start."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from models.datasets import read_rows
from models.program import Program, Running

PROMPTS, N, OF = 40, 2, 4


class Shards:
    """Starts the processes of one dataset."""

    def __init__(self, program: Program, directory: Path, model: Path) -> None:
        self.program = program
        self.directory = directory
        self.out = directory / "out"
        self.model = model
        self.prompts = directory / "prompts.jsonl"
        self.write_prompts(PROMPTS)

    def write_prompts(self, count: int) -> None:
        self.prompts.write_text(
            "".join(json.dumps({"id": f"p{i}", "prompt": f"Prompt {i}"}) + "\n" for i in range(count))
        )

    def arguments(self, *extra: object, out: Path | None = None) -> list[object]:
        settings = ("--model", self.model, "--n", N, "--max-tokens", 20, "--commit-interval", 0.1)
        return ["generate", self.prompts, "--out", out or self.out, *settings, *extra]

    def start(self, shard: str, *extra: object, **faults: Any) -> Running:
        return self.program.start(*self.arguments("--resume", "--shard", shard, *extra), **faults)

    def start_all(self, *extra: object, **faults: Any) -> list[Running]:
        return [self.start(f"{number}/{OF}", *extra, **faults) for number in range(OF)]

    def undisturbed(self, *extra: object) -> list[dict[str, Any]]:
        """What one process makes, elsewhere."""
        out = self.directory / "whole"
        self.program(*self.arguments(*extra, out=out))
        return read_rows(out)

    def check(self, *extra: object) -> None:
        """Every planned sample is there once, as one process would have made it, and nothing else."""
        self.program("verify", self.out)
        assert read_rows(self.out) == self.undisturbed(*extra)


@pytest.fixture
def shards(program: Program, tiny_model: Path, tmp_path: Path) -> Shards:
    return Shards(program, tmp_path, tiny_model)


def wait_for_commit(shards: Shards, running: Running, writer: str) -> None:
    """Until this writer's journal has a line."""
    journal = shards.out / "journal" / f"{writer}.jsonl"
    deadline = time.monotonic() + 180
    while not journal.exists() or not journal.read_bytes():
        assert running.alive, running.wait()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_four_at_once_and_one_killed(shards: Shards) -> None:
    """They begin the dataset together; one is killed and comes back, then the others; no other N meanwhile."""
    running = shards.start_all(hang_after=12)
    for number, one in enumerate(running):
        wait_for_commit(shards, one, f"s{number}of4")
    running[2].kill()
    for refused in ("0/3", "2/5", "1/4"):
        ended = shards.start(refused).wait()
        assert ended.code == 4, (refused, ended)
        assert "is alive and makes part" in ended.stderr or "another rollgen is writing" in ended.stderr
    ended = shards.start(f"2/{OF}").wait()
    assert ended.code == 0, ended
    for one in (running[0], running[1], running[3]):
        assert one.alive
        one.kill()
    for number, one in enumerate(shards.start_all()):
        ended = one.wait()
        assert ended.code == 0, (number, ended)
    shards.check()
    writers = {path.stem for path in (shards.out / "journal").glob("*.jsonl")}
    assert writers == {"s0of4", "s1of4", "s2of4", "s3of4"}
    assert (shards.out / "README.md").read_text().count("80, of 40 prompts") == 1


def test_another_division_goes_on(shards: Shards) -> None:
    """All four are killed; two take over, then a whole run finds nothing more to do."""
    running = shards.start_all(delay=0.5)
    wait_for_commit(shards, running[1], "s1of4")
    for one in running:
        one.kill()
    assert [one.wait().code for one in [shards.start("0/2"), shards.start("1/2")]] == [0, 0]
    assert "nothing is owed" in shards.program(*shards.arguments("--resume")).stderr
    shards.check()


def test_a_larger_n_for_all(shards: Shards) -> None:
    """All four start together with a larger n and more prompts: whoever is first extends the plan, all work by it."""
    assert [one.wait().code for one in shards.start_all()] == [0] * OF
    shards.write_prompts(PROMPTS + 6)
    more = ("--n", 3)
    running = shards.start_all(*more, delay=0.05)
    for one in running:
        ended = one.wait()
        assert ended.code == 0, ended
    shards.check(*more)


def test_growth_beside_one_that_works_is_refused(shards: Shards) -> None:
    """It works by the plan it has: exit 4, and the plan stays."""
    first = shards.start("0/4", hang_after=3)
    deadline = time.monotonic() + 180
    while not (shards.out / "rollgen.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ended = shards.start("1/4", "--n", N + 1).wait()
    assert ended.code == 4, ended
    assert "the plan cannot grow from 80 to 120 samples while writer 's0of4' works on it" in ended.stderr
    first.kill()
    assert [one.wait().code for one in shards.start_all()] == [0] * OF
    shards.check()


def test_parts_without_prompts(shards: Shards) -> None:
    """Two prompts for four: two processes have nothing to do, whoever comes first, and say so."""
    shards.write_prompts(2)
    ended = [shards.start(f"{number}/{OF}").wait() for number in (3, 0, 2, 1)]
    assert [one.code for one in ended] == [0] * OF
    assert ["nothing is owed: every planned sample of part" in one.stderr for one in ended] == [
        True,
        False,
        True,
        False,
    ]
    shards.check()


@pytest.mark.parametrize("flag", [("--clean",), ("--retry", "finish_reason=length")])
def test_what_is_for_the_whole_run(shards: Shards, flag: tuple[str, ...]) -> None:
    """Exit 2: it would be done to the others' samples too."""
    ended = shards.program.start(*shards.arguments(*flag, "--shard", "0/4")).wait()
    assert ended.code == 2
    assert f"{flag[0]}: is for the whole run" in ended.stderr
    assert not shards.out.exists()
