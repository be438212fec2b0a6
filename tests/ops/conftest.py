"""Fixtures of the tensor operations."""

from __future__ import annotations

import secrets

import pytest
import torch

from rollgen.ops import gradients, hidden, logprobs


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh seed each time; pytest shows what is printed when the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=[None, 1, 24], ids=["usual blocks", "blocks of one", "blocks of 24"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes small enough that every loop over blocks is gone through more than once, with a remainder."""
    if request.param is not None:
        for module in (gradients, hidden, logprobs):
            monkeypatch.setattr(module, "block_elements", lambda _device: request.param)
