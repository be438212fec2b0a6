"""Versions and fields decide what an installed vLLM can do, without importing it."""

from __future__ import annotations

import pytest

from rollgen.engines.requirements import NATIVE_ARGUMENT, check_vllm, is_older, native_cost, native_problem


@pytest.mark.parametrize(
    ("installed", "older"),
    [
        ("0.29.4", True),
        ("0.9.2", True),  # by number, not by text
        ("0.29.1rc1.dev3+g1234567.cu130", True),
        ("0.30.0", False),
        ("0.30.0rc2", False),
        ("0.33.1+cpu", False),
        ("1.0", False),
        ("0.1.dev4321+g1234567", False),  # built from source without tags: says nothing
        ("unknown", False),
    ],
)
def test_versions(installed: str, older: bool) -> None:
    """Whether a version is known to come before 0.30."""
    assert is_older(installed, (0, 30)) is older


@pytest.mark.parametrize(
    ("installed", "arguments", "problem"),
    [
        ("0.28.0", [NATIVE_ARGUMENT], "vLLM 0.28.0 is installed, sampling masks need 0.30 or later"),
        ("0.32.0", ["model"], "the installed vLLM 0.32.0 has no engine argument return_sampling_mask"),
        ("0.1.dev7", ["model"], "the installed vLLM 0.1.dev7 has no engine argument return_sampling_mask"),
        ("0.32.0", ["model", NATIVE_ARGUMENT], None),
        ("0.1.dev7", [NATIVE_ARGUMENT], None),
    ],
)
def test_native_problem(installed: str, arguments: list[str], problem: str | None) -> None:
    """The version first, then the field itself."""
    assert native_problem(installed, arguments) == problem


def test_the_installed_vllm_will_do() -> None:
    """Whichever distribution it comes from."""
    check_vllm()


@pytest.mark.parametrize(
    ("smallest", "largest", "says"),
    [
        (0, 0, None),  # nothing truncates
        (50, 50, None),
        (50, 200, None),  # four times as wide: not worth splitting
        (50, 201, "top_k differs between prompts, from 50 to 201"),
        (1, 50, "top_k differs between prompts, from 1 to 50"),
        (2048, 2048, None),
        (2049, 2049, "top_k 2049: vLLM unpacks masks of more than 2048 ids on the CPU"),
    ],
)
def test_native_cost(smallest: int, largest: int, says: str | None) -> None:
    """A batch's masks are as wide as its largest top_k, up to the width where vLLM changes its way."""
    found = native_cost(smallest, largest)
    assert found is None if says is None else found is not None and found.startswith(says)
