"""The order in which `make test` runs files."""

from __future__ import annotations

from pathlib import Path

from models.schedule import CHAINS, LONG, Schedule, place_of

TESTS = Path(__file__).parent


def test_whatever_starts_vllm_is_in_a_chain() -> None:
    """Or more than two engines could be loaded at a time; files that are named are there, once."""
    named = [file for files in (*CHAINS, LONG) for file in files]
    assert len({*named}) == len(named)
    assert all((TESTS / f"{file}.py").is_file() for file in named)
    starting = {path for path in TESTS.glob("integration/test_*.py") if "mark.vllm" in path.read_text()}
    assert starting <= {TESTS / f"{file}.py" for chain in CHAINS for file in chain}


def test_a_chain_is_one_unit() -> None:
    """Other files are one each; long ones are before short ones."""
    ray, ties, long, short = ("integration/test_ray", "integration/test_ties", "remote/test_runs", "test_errors")
    tests = [f"tests/{file}.py::test[x::y]" for file in (ray, ties, long, short)]
    units = [Schedule._split_scope(None, test) for test in tests]  # type: ignore[arg-type]
    assert units == ["chain 0", "chain 0", long, short]
    places = [place_of(test) for test in tests]
    assert places == sorted({*places})
