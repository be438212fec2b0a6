"""What SECURITY.md and section 13 of the format promise: promises name tests that exist; no code comes from data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollgen
from rollgen.config import RunConfig

ROOT = Path(__file__).parents[2]
PACKAGE = Path(rollgen.__file__).parent
TEST = re.compile(r"`(tests/[\w/]+\.py)`")
EXECUTES = frozenset("pickle cPickle dill cloudpickle marshal shelve joblib runpy code imp".split())
"""Modules that turn bytes into code."""
CALLS = frozenset("eval exec compile __import__ system popen".split())


def promises() -> dict[str, str]:
    """Both pages: of the format its section 13."""
    specification = (ROOT / "schema" / "SPEC.md").read_text(encoding="utf-8")
    return {
        "SECURITY.md": (ROOT / "SECURITY.md").read_text(encoding="utf-8"),
        "SPEC.md": specification.split("\n## 13. What is promised\n")[1].split("\n## ")[0],
    }


@pytest.mark.parametrize("page", ["SECURITY.md", "SPEC.md"])
def test_promises_name_tests_that_exist(page: str) -> None:
    """A promise whose test is gone is none."""
    named = TEST.findall(promises()[page])
    assert len(set(named)) >= 5
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_promise_names_a_test() -> None:
    """Each paragraph of the section that begins in bold."""
    section = promises()["SECURITY.md"].split("\n## What is promised\n")[1].split("\n## ")[0]
    paragraphs = [text for text in section.split("\n\n") if text.strip().startswith("**")]
    assert len(paragraphs) >= 6
    assert [text for text in paragraphs if not TEST.search(text)] == []


def uses(path: Path) -> Iterator[str]:
    """Names of modules that a file imports and of functions that it calls."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_module(node.func.value):
            yield node.func.attr


def _is_module(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"os", "importlib", "builtins"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    """In no module of the package. (`re.compile` and `torch.compile` compile nothing that a file says.)"""
    found = {path.name: used for path in PACKAGE.rglob("*.py") if (used := {*uses(path)} & (EXECUTES | CALLS))}
    assert found == {}


def test_remote_code_is_off_unless_asked_for() -> None:
    """And nothing but the run's own setting turns it on: everywhere else it is a literal False."""
    assert RunConfig().trust_remote_code is False
    values = {
        ast.unparse(keyword.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "trust_remote_code"
    }
    assert values <= {"False", "config.trust_remote_code"}
