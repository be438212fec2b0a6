"""torch.compile takes both ops whole: fullgraph, forward and backward, once for all sizes of a batch.

The cheap backend aot_eager traces all there is to trace; inductor is what users run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.supports import draw, draw_targets
from torch import Tensor
from torch._dynamo.utils import counters

from rollgen.ops import Support, support_logprobs, support_logprobs_from_hidden

Step = Callable[[Tensor, Tensor, Support, Tensor, Tensor], Tensor]
VOCAB_SIZE, PADDING, WIDTH = 40, 4, 8


def plain(hidden: Tensor, weight: Tensor, support: Support, targets: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities alone, by both ops."""
    logits = hidden @ weight.T
    from_logits = support_logprobs(logits, support, targets, temperature)
    return (from_logits * 2 + support_logprobs_from_hidden(hidden, weight, support, targets, temperature)).sum()


def with_flags(hidden: Tensor, weight: Tensor, support: Support, targets: Tensor, temperature: Tensor) -> Tensor:
    """All results of both ops, of rows that are given."""
    rows = torch.arange(targets.numel()).flip(0)
    one = support_logprobs(hidden @ weight.T, support, targets, temperature, rows=rows, entropy=True, kept_mass=True)
    other = support_logprobs_from_hidden(
        hidden, weight, support, targets, temperature, rows=rows, bias=weight[:, 0], entropy=True
    )
    assert one.entropy is not None
    assert one.log_kept_mass is not None
    assert other.entropy is not None
    return (one.logprobs + one.entropy + one.log_kept_mass + other.logprobs * other.entropy).sum()


def difference(step: Step, compiled: Step, lengths: list[int], generator: torch.Generator) -> float:
    """The largest of all values and gradients between a step and the same step compiled, on a batch of its own."""
    support = draw(lengths, VOCAB_SIZE, generator)
    targets = draw_targets(support, generator)
    leaves = [
        torch.randn(len(lengths), WIDTH, generator=generator),
        torch.randn(VOCAB_SIZE + PADDING, WIDTH, generator=generator),
        torch.rand(len(lengths), generator=generator) + 0.5,
    ]
    hidden, weight, temperature = (leaf.requires_grad_() for leaf in leaves)
    values = [run(hidden, weight, support, targets, temperature) for run in (step, compiled)]
    ours, theirs = ([value, *torch.autograd.grad(value, leaves)] for value in values)
    return max((one - other).detach().abs().max().item() for one, other in zip(ours, theirs, strict=True))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Nothing compiled before, nothing counted yet."""
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("step", [plain, with_flags], ids=["plain", "with flags"])
def test_compiled_once_for_all_sizes(step: Step, generator: torch.Generator) -> None:
    """Batches of any N and nnz run through one graph, and a second one once there are rows that are not truncated.

    Sizes are 2 and more: torch itself compiles 0 and 1 apart.
    """
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 1, 5], [2] * 9, [1, 30, 7, 1], [4, 4, 40, 1, 6, 9, 9]):
        assert difference(step, compiled, lengths, generator) < 1e-4
    assert counters["stats"]["unique_graphs"] == 1
    for lengths in ([3, 0, 5], [0, 4], [1, 9, 0, 0, 2, 2]):
        assert difference(step, compiled, lengths, generator) < 1e-4
    assert counters["stats"]["unique_graphs"] == 2


def test_inductor(generator: torch.Generator) -> None:
    """The default backend, two batches of different sizes."""
    compiled = torch.compile(plain, fullgraph=True, dynamic=True)
    for lengths in ([3, 1, 5], [2, 1, 8, 1, 1, 30]):
        assert difference(plain, compiled, lengths, generator) < 1e-4
    assert counters["stats"]["unique_graphs"] == 1


def test_a_number_as_temperature_is_no_constant(generator: torch.Generator) -> None:
    """A temperature that changes with every step, as under a schedule, is compiled once."""
    support = draw([3, 1, 5], VOCAB_SIZE, generator)
    targets = draw_targets(support, generator)
    hidden, weight = (torch.randn(count, WIDTH, generator=generator) for count in (3, VOCAB_SIZE))

    def step(temperature: float) -> Tensor:
        from_logits = support_logprobs(hidden @ weight.T, support, targets, temperature)
        return from_logits + support_logprobs_from_hidden(hidden, weight, support, targets, temperature)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for temperature in (0.7, 1.0, 0.85, 1.3, 2.0):
        torch.testing.assert_close(compiled(temperature), step(temperature))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("full", [False, True], ids=["truncated", "with full rows"])
def test_registrations(full: bool, generator: torch.Generator) -> None:
    """What torch itself checks of an operator: schema, shapes without data, autograd, tracing with dynamic shapes."""
    support = draw([2, 0 if full else 1, 5], VOCAB_SIZE, generator)
    shared = (support.ids, support.offsets, draw_targets(support, generator), torch.ones(3), torch.arange(3))
    hidden = torch.randn(3, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB_SIZE, WIDTH, generator=generator, requires_grad=True)
    logits = torch.randn(3, VOCAB_SIZE, generator=generator, requires_grad=True)
    ops = torch.ops.rollgen
    for flag in (False, True):
        torch.library.opcheck(ops.support_logprobs.default, (logits, *shared, VOCAB_SIZE, full, flag, flag))
        arguments = (hidden, weight, None, *shared, VOCAB_SIZE, full, flag)
        torch.library.opcheck(ops.support_logprobs_from_hidden.default, arguments)
