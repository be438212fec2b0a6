"""Damage to a finished dataset, found by `rollgen verify` and mended by `--resume`, or refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from models.datasets import read_rows
from models.program import Program
from models.stages import GROWN, Life

FIRST, LAST = "data/part-w0-000000.parquet", "data/part-w0-000002.parquet"
JOURNAL, PLAN = "journal/w0.jsonl", "plan.parquet"


@pytest.fixture
def out(life: Life, tmp_path: Path) -> Path:
    """A copy of a dataset of three shards."""
    return Path(shutil.copytree(life.finished, tmp_path / "out"))


@pytest.fixture(scope="session")
def others(life: Life, program: Program, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shards of the same prompts: of a run with another seed, and of one with the same settings, cut elsewhere."""
    directory = tmp_path_factory.mktemp("others")
    for name, options in {"another seed": ("--n", 3, "--seed", 1), "the same run": ("--n", 3)}.items():
        assert life.generate(directory / name, *options).wait().code == 0
    return {path.name: path / FIRST for path in directory.iterdir()}


def flip(path: Path, position: int) -> None:
    """One bit of the byte there; from the end when negative."""
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


Damage = Callable[[Path], object]
MENDED: dict[str, tuple[str, Damage]] = {
    "truncated": (FIRST, lambda path: truncate(path, 0.7)),
    "empty": (LAST, lambda path: truncate(path, 0)),
    "a bit of a page": (FIRST, lambda path: flip(path, 400)),
    "a bit of the footer": (LAST, lambda path: flip(path, -700)),
    "longer": (FIRST, lambda path: append(path, b"\0")),
    "gone": (FIRST, Path.unlink),
    "no shard": (FIRST, lambda path: path.write_bytes(b"PAR1" * 9)),
    "torn journal": (JOURNAL, lambda path: truncate(path, 0.99)),
    "no journal": (JOURNAL, Path.unlink),
    "a bit of the plan": (PLAN, lambda path: flip(path, 500)),
    "no plan": (PLAN, Path.unlink),
}


@pytest.mark.parametrize(("name", "damage"), MENDED.values(), ids=MENDED)
def test_what_is_mended(life: Life, program: Program, out: Path, name: str, damage: Damage) -> None:
    """Nothing that was damaged is deleted, every sample is there once, and rows are what they were."""
    damage(out / name)
    assert name in program("verify", out, code=1).stdout or name == JOURNAL
    resumed = life.resume(out)
    assert resumed.code == 0, resumed.stderr
    assert read_rows(out) == life.rows
    program("verify", out)


@pytest.mark.parametrize("other", ["another seed", "the same run"])
def test_a_shard_of_another_dataset(
    life: Life, program: Program, out: Path, others: dict[str, Path], other: str
) -> None:
    """Of the same prompts, under the name of ours: set aside, and the samples that were ours are made again."""
    shutil.copy(others[other], out / FIRST)
    assert FIRST in program("verify", out, code=1).stdout
    resumed = life.resume(out)
    assert resumed.code == 0, resumed.stderr
    assert (out / "quarantine" / Path(FIRST).name).read_bytes() == others[other].read_bytes()
    assert read_rows(out) == life.rows
    program("verify", out)


@dataclass(frozen=True)
class Refused:
    """Damage to a record that a resume cannot do without."""

    file: str
    damage: Damage
    line: str
    fix: str = "from a copy"
    options: tuple[object, ...] = GROWN


LARGER = ("--n", 4)
"""Another plan than the one that is damaged: nobody can say what that was."""
REFUSED = {
    "a journal line": Refused(
        JOURNAL, lambda path: flip(path, 5), "journal/w0.jsonl:1: damaged line", fix="`rollgen repair`"
    ),
    "manifest": Refused("rollgen.json", lambda path: flip(path, 600), "rollgen.json: "),
    "empty manifest": Refused("rollgen.json", lambda path: truncate(path, 0), "rollgen.json: "),
    "no manifest": Refused("rollgen.json", Path.unlink, "holds shards but no rollgen.json"),
    "plan": Refused(PLAN, lambda path: flip(path, 500), "plan.parquet: ", options=LARGER),
    "no plan": Refused(PLAN, Path.unlink, "plan.parquet: ", options=LARGER),
    "retry list": Refused("retry-1.parquet", lambda path: flip(path, 100), "retry-1.parquet: "),
    "no retry list": Refused("retry-1.parquet", Path.unlink, "retry-1.parquet: "),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(life: Life, program: Program, out: Path, case: Refused) -> None:
    """One line with file and fix, and no file of the dataset is touched; with the file back, it goes on."""
    path = out / case.file
    sound = path.read_bytes()
    case.damage(path)
    before = contents(out)
    refused = life.generate(out, *case.options, "--resume").wait()
    assert refused.code in (1, 2, 4)
    assert refused.stdout == ""
    assert refused.stderr.startswith("rollgen: error: ")
    assert refused.stderr.count("\n") == 1
    assert case.line in refused.stderr
    assert case.fix in refused.stderr
    assert contents(out) == before
    program("verify", out, code=1)
    path.write_bytes(sound)
    assert life.resume(out).code == 0
    assert read_rows(out) == life.rows


def contents(directory: Path) -> dict[Path, bytes]:
    """Every file but logs and locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix not in (".log", ".lock"))
    return {path: path.read_bytes() for path in files}
