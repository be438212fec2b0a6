"""What vLLM's processes do before anything else."""

from __future__ import annotations

import logging

import pytest

from rollgen.engines.children import quiet_imports


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("ERROR", logging.ERROR), ("info", logging.INFO), ("", logging.CRITICAL), ("loud", logging.CRITICAL)],
)
def test_imports_are_as_quiet_as_asked_for(monkeypatch: pytest.MonkeyPatch, setting: str, expected: int) -> None:
    """The level of vLLM's loggers; a level that is none is left to vLLM, which refuses it."""
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "level", logging.CRITICAL)
    assert quiet_imports(setting) == setting
    assert logger.level == expected
