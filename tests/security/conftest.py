"""The `rollgen` command in this process, for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from models.printed import Printed

from rollgen.cli.app import main


@pytest.fixture
def rollgen(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """`rollgen("inspect", ..., terminal=True)`: the entry point in this process."""

    def run(*arguments: object, terminal: bool = False) -> Printed:
        monkeypatch.setattr(sys, "argv", ["rollgen", *map(str, arguments)])
        monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
        monkeypatch.setenv("COLORTERM", "truecolor")
        monkeypatch.setenv("TERM", "xterm-256color")
        with pytest.raises(SystemExit) as exited:
            main()
        return Printed(int(exited.value.code or 0), *capfd.readouterr())

    return run
