"""What `import rollgen` offers, and how little it loads."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

import rollgen

HEAVY = ("torch", "vllm", "transformers", "pyarrow", "polars", "numpy", "pydantic", "rich", "typer")


def test_all_is_what_is_public() -> None:
    """Every name of `__all__` is there, in order, and `dir` shows the same."""
    assert rollgen.__all__ == sorted(rollgen.__all__, key=str)
    assert dir(rollgen) == sorted(rollgen.__all__)
    for name in rollgen.__all__:
        assert getattr(rollgen, name) is not None
    assert set(rollgen.__all__) == {
        *("RollgenError", "Rollout", "RolloutBatch", "RolloutDataset", "RolloutStream", "RolloutWriter", "RunConfig"),
        *("__version__", "Answer", "collate", "export", "generate", "merge", "ops", "score"),
    }


def test_every_public_name_is_documented() -> None:
    """`help(rollgen.x)` says something of its own."""
    for name in set(rollgen.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(rollgen, name)), name


def test_generate_is_a_function_always() -> None:
    """No module of that name gets in its way, whatever is imported first."""
    code = "import rollgen.cli.generate, rollgen.loop.run, rollgen.api, rollgen; print(rollgen.generate.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180)
    assert done.stdout == "rollgen.api\n"


def test_version_is_that_of_the_distribution() -> None:
    """One number, in two files."""
    assert rollgen.__version__ == version("rollgen")


def test_unknown_name_is_an_attribute_error() -> None:
    """As for any module: `hasattr` works."""
    with pytest.raises(AttributeError, match=r"^module 'rollgen' has no attribute 'Rolout'$"):
        rollgen.Rolout  # noqa: B018
    assert not hasattr(rollgen, "generate_everything")


def loaded_by(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=180)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    """Not even numpy."""
    assert loaded_by("import rollgen; rollgen.RollgenError; rollgen.__version__; dir(rollgen)") == set()


def test_config_needs_pydantic_alone() -> None:
    """The command line is built from it."""
    assert loaded_by("import rollgen.config") == {"pydantic"}


def test_loader_needs_no_engine() -> None:
    """A trainer reads datasets without vLLM, transformers or polars (which hangs in forked workers)."""
    assert (
        loaded_by("import rollgen; rollgen.RolloutDataset; rollgen.collate; rollgen.ops")
        & {*("vllm", "transformers", "polars", "rich", "typer")}
        == set()
    )


def test_generation_loop_loads_no_engine() -> None:
    """vLLM is loaded after the preflight has passed, by `generate`, or by a loop that brings its own."""
    assert "vllm" not in loaded_by("import rollgen; rollgen.generate; rollgen.RolloutWriter")
