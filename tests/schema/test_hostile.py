"""Every hostile dataset, through every reader: what the corpus says comes of it, and neither a crash nor a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
CONFORMANCE = TESTS.parent / "schema" / "conformance"
HOSTILE = CONFORMANCE / "hostile"
TABLE: dict[str, dict[str, Any]] = json.loads((HOSTILE / "hostile.json").read_text(encoding="utf-8"))
ROWS = 5
"""Of the sound dataset that all are made from."""
RECIPES = (
    "pipe-shard",
    "pipe-new-shard",
    "pipe-journal",
    "pipe-manifest",
    "pipe-plan",
    "folder-shard",
    "folder-journal",
    "folder-manifest",
    "device-manifest",
    "device-journal",
    "gigabyte-manifest",
    "gigabyte-line",
    "group-flood",
    "linked-shard",
)
MAX_MIB = 200
"""By which the process that reads them all grows: measured 63. The smallest bomb is one of 2 GiB."""

Outcomes = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The module `make_hostile`."""
    sys.path.insert(0, str(CONFORMANCE))
    try:
        import make_hostile

        yield make_hostile
    finally:
        sys.path.remove(str(CONFORMANCE))


def run_readers(directories: list[Path]) -> Outcomes:
    """What comes of all readers, by the name of the directory. A process that dies says in which."""
    command = [sys.executable, "-m", "models.hostile", *map(str, directories)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{directories[len(lines)].name}: {done.stderr[-2000:]}"
    assert max(line["mib"] for line in lines) < MAX_MIB
    return {line["name"]: line["outcomes"] for line in lines}


@pytest.fixture(scope="module")
def outcomes(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of the stored cases, and of those that no repository can hold."""
    made = tmp_path_factory.mktemp("made")
    for name, case in script.RECIPES.items():
        case.spoil(script.write_base(made / name))
    return run_readers([*(HOSTILE / name for name in TABLE), *(made / name for name in RECIPES)])


def check(expected: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """The outcome of all readers is that of the table."""
    assert not [outcome for outcome in found.values() if "crashed" in outcome]
    findings = found["verify"]["read"]
    if expected["must"] == "read":
        assert findings == []
        assert [found[name] for name in ("load", "stream", "inspect", "status")] == [{"read": ROWS}] * 4
        return
    assert [expected["finding"]["kind"], expected["finding"]["file"]] in findings
    for name in ("load", "stream"):
        assert set(found[name]) == {"refused" if expected["must"] == "refuse" else "read"}, found[name]
        if "refused" in found[name] and expected["finding"]["kind"] != "replacement":  # which is of all files
            assert Path(expected["finding"]["file"]).name in found[name]["refused"]


@pytest.mark.parametrize("name", TABLE)
def test_case(outcomes: Outcomes, name: str) -> None:
    """A verifier reports it, a loader refuses what it must, and whatever else happens is a RollgenError."""
    check(TABLE[name], outcomes[name])


@pytest.mark.parametrize("name", RECIPES)
def test_made_case(script: Any, outcomes: Outcomes, name: str) -> None:
    """The same of pipes, devices and files of a gigabyte."""
    check(script.expectation(script.RECIPES[name]), outcomes[name])


def test_the_table_is_that_of_the_script(script: Any) -> None:
    """Every case is there, in the order of the script, and no other."""
    assert {name: script.expectation(case) for name, case in script.CASES.items()} == TABLE
    assert sorted(path.name for path in HOSTILE.iterdir() if path.is_dir()) == sorted(TABLE)
    assert set(RECIPES) == set(script.RECIPES)


def test_script_makes_cases(script: Any, tmp_path: Path) -> None:
    """Bytes may change with the Parquet library; which files there are does not."""
    names = ["later-minor", "key-in-two-shards", "page-values"]
    script.write_hostile(tmp_path, only=names)
    for name in names:
        files = [
            sorted(str(path.relative_to(root / name)) for path in (root / name).rglob("*"))
            for root in (tmp_path, HOSTILE)
        ]
        assert files[0] == files[1]


def test_hostile_is_small() -> None:
    """It lives in the repository."""
    assert sum(path.stat().st_size for path in HOSTILE.rglob("*") if path.is_file()) < 1_500_000
