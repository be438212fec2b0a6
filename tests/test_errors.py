"""The exception tree: exit codes, and the drawing that documents them."""

from __future__ import annotations

import re

import pytest

from rollgen import errors
from rollgen.errors import (
    EXIT_CODES_HELP,
    CaptureError,
    DatasetError,
    EngineError,
    IncompleteSupport,
    MissingFile,
    ResumeRefused,
    RollgenError,
    TooManyFailures,
    UnfitEngine,
    Unreadable,
    Unsent,
    UsageError,
)
from rollgen.loop.stop import Interrupted

FAILED = (
    *(RollgenError, DatasetError, MissingFile, Unreadable, Unsent, EngineError, UnfitEngine),
    *(CaptureError, IncompleteSupport, TooManyFailures),
)
CODES: dict[type[RollgenError], int] = {**dict.fromkeys(FAILED, 1), UsageError: 2, ResumeRefused: 4}


@pytest.mark.parametrize(("kind", "code"), CODES.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_exit_codes(kind: type[RollgenError], code: int) -> None:
    """Scripts rely on them."""
    assert kind.exit_code == code
    assert issubclass(kind, RollgenError)
    assert str(kind("what, and the fix")) == "what, and the fix"


def test_usage_errors_are_value_errors() -> None:
    """Library users may catch either."""
    assert issubclass(UsageError, ValueError)


def test_the_drawing_shows_every_class_with_its_code() -> None:
    """The module's docstring is the documentation: nothing missing, nothing extra."""
    assert errors.__doc__ is not None
    drawn = dict(re.findall(r"(\w+) +exit (\d)", errors.__doc__))
    assert drawn == {kind.__name__: str(code) for kind, code in CODES.items()}
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined == set(drawn)


def test_help_lists_every_exit_code() -> None:
    """Those of errors, of a run with failed samples (3), and of signals (128 + 1, 2 and 15)."""
    listed = set(map(int, re.findall(r"\b(\d+)\b", EXIT_CODES_HELP)))
    assert listed == {0, 3, 129, 130, 143} | set(CODES.values())


@pytest.mark.parametrize(("number", "name"), [(1, "SIGHUP"), (2, "SIGINT"), (15, "SIGTERM")])
def test_interruption_names_its_signal(number: int, name: str) -> None:
    """And says what became of the work."""
    for stored, expected in (
        (None, "finished samples are committed"),
        (0, "no sample was finished, and nothing new is stored"),
        (1, "1 finished sample is committed"),
        (1234, "1,234 finished samples are committed"),
    ):
        error = Interrupted(number, stored)
        assert error.signal_number == number
        assert str(error) == f"interrupted by {name}; {expected}, --resume continues"
    full = Interrupted(number, 7, DatasetError("out: disk full"))
    assert "; the samples that were finished last could not be committed: out: disk full, --resume" in str(full)
