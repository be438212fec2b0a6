"""Fixtures of the tensor operations."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

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


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _by_make_dual(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(value, torch.ones_like(value)))


@pytest.fixture(
    params=[
        pytest.param(lambda function, value: torch.func.jvp(function, (value,), (value,)), id="jvp"),
        pytest.param(lambda function, value: torch.func.jacfwd(function)(value), id="jacfwd"),
        pytest.param(_by_make_dual, id="make_dual"),
    ]
)
def forward_mode(request: pytest.FixtureRequest) -> Callable[[Callable[[Tensor], Tensor], Tensor], object]:
    """Differentiates a function at a tensor in forward mode."""
    return request.param
