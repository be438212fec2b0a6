"""A few seconds of what `make soak` does for minutes."""

from __future__ import annotations

import secrets

from soak.fuzz import run


def test_fuzz() -> None:
    """Changed files are read or refused, and nothing else. The seed of a failure is in its message."""
    assert "changed files" in run(3.0, secrets.randbits(32))
