"""support_logprobs and its dense twin against a float64 oracle written here, at odd shapes and extreme logits.

The oracle goes row by row in numpy, so that it shares no code with either. Tolerances: float32 sums over at most 501
terms of magnitude <= 30 are good to 1e-5; inputs in bfloat16 and float16 are exact numbers, so they get the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rollgen.errors import UsageError
from rollgen.ops import Support, reference, support_logprobs

Op = Callable[..., Tensor]
both = pytest.mark.parametrize("op", [support_logprobs, reference.support_logprobs], ids=["sparse", "dense"])
TOLERANCE = 1e-5


def draw(lengths: list[int], vocab_size: int, generator: torch.Generator) -> Support:
    """A support with rows of these lengths; 0 is a full row."""
    rows = [torch.randperm(vocab_size, generator=generator)[:length].sort().values for length in lengths]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
    return Support(ids.int(), torch.tensor([0, *lengths]).cumsum(0), vocab_size)


def draw_targets(support: Support, generator: torch.Generator) -> Tensor:
    """One id of each row's support, at random."""
    weights = support.to_bool().float()
    return weights.multinomial(1, generator=generator).squeeze(1) if len(support) else torch.empty(0, dtype=torch.int64)


def oracle(
    logits: Tensor, support: Support, targets: Tensor, temperature: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """float64 values [N] and gradient [N, V] of their sum, row by row from the definition."""
    raw = logits.detach().double().numpy()
    values, gradient = np.empty(len(support)), np.zeros(raw.shape)
    for row, scale in enumerate(temperature):
        start, stop = support.offsets[row : row + 2].tolist()
        ids = support.ids[start:stop].numpy() if stop > start else np.arange(support.vocab_size)
        z = raw[row, ids] / scale
        exp = np.exp(z - z.max())
        values[row] = raw[row, targets[row]] / scale - z.max() - np.log(exp.sum())
        gradient[row, ids] = -exp / exp.sum() / scale
        gradient[row, targets[row]] += 1 / scale
    return values, gradient


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh seed each time; pytest shows what is printed when the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "vocab_size", "padding"),
    [
        pytest.param([1], 1, 0, id="one id in all"),
        pytest.param([3, 1, 7, 7, 2], 7, 0, id="up to the vocabulary"),
        pytest.param([5, 0, 1, 0, 13], 13, 4, id="full rows and a padded vocabulary"),
        pytest.param([0, 0, 0], 501, 3, id="full rows only"),
        pytest.param([1] * 17, 33, 0, id="singletons only"),
        pytest.param([1, 62, 50, 3, 1, 1, 229], 501, 11, id="like a real batch"),
    ],
)
def test_values_and_gradient(
    op: Op, dtype: torch.dtype, lengths: list[int], vocab_size: int, padding: int, generator: torch.Generator
) -> None:
    """Values and gradients agree with the oracle, which is given the same rounded logits."""
    support = draw(lengths, vocab_size, generator)
    targets = draw_targets(support, generator)
    logits = (8 * torch.randn(len(lengths), vocab_size + padding, generator=generator)).to(dtype).requires_grad_()
    temperature = torch.rand(len(lengths), generator=generator) + 0.5

    values = op(logits, support, targets, temperature)
    values.sum().backward()
    expected, gradient = oracle(logits, support, targets, temperature.double().tolist())
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(values.detach().numpy(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert logits.grad is not None
    # The gradient is returned in the dtype of the logits: half a unit in its last place, at values up to 2.
    np.testing.assert_allclose(logits.grad.double().numpy(), gradient, atol=max(TOLERANCE, 2 * torch.finfo(dtype).eps))
    outside = ~support.to_bool(logits.shape[1])
    assert (logits.grad[outside] == 0).all()


@both
def test_temperature_divides_the_logits(op: Op) -> None:
    """Logits 2 and 0 at T = 2: log(e / (e + 1)) = -0.3133; dividing log-probabilities would give -0.0635."""
    support = Support(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 2]), 3)
    value = op(torch.tensor([[2.0, 9.0, 0.0]]), support, torch.tensor([0]), 2.0)
    assert value.item() == pytest.approx(-0.313262, abs=1e-6)


@both
def test_singletons_are_exactly_zero(op: Op, generator: torch.Generator) -> None:
    """A support of one id gives exactly 0.0 and exactly no gradient, whatever the logits and the temperature."""
    support = draw([1] * 64, 100, generator)
    logits = (1000 * torch.randn(64, 100, generator=generator)).requires_grad_()
    values = op(logits, support, support.ids.long(), 0.37)
    values.sum().backward()
    assert (values == 0).all()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@both
@pytest.mark.parametrize("outside", [1e4, 3e38, float("inf"), float("nan")], ids=str)
def test_logits_outside_are_never_looked_at(op: Op, outside: float, generator: torch.Generator) -> None:
    """Masking happens before exp: whatever stands outside the support changes no value and no gradient."""
    support = draw([4, 1, 9], 20, generator)
    targets = draw_targets(support, generator)
    mask = support.to_bool()
    inside = torch.randn(3, 20, generator=generator)
    clean = inside.clone().requires_grad_()
    dirty = inside.masked_fill(~mask, outside).requires_grad_()
    expected, values = op(clean, support, targets), op(dirty, support, targets)
    (expected.sum() + values.sum()).backward()
    assert torch.equal(values, expected)
    assert clean.grad is not None
    assert dirty.grad is not None
    assert torch.equal(dirty.grad[mask], clean.grad[mask])
    assert (dirty.grad[~mask] == 0).all()


@both
def test_large_logits_inside(op: Op) -> None:
    """Logits of 1e4 and 1e4 - 1 inside the support: -log(1 + 1/e) = -0.3133, with no overflow."""
    support = Support(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 2]), 3)
    value = op(torch.tensor([[1e4, 1e4 - 1, 0.0]]), support, torch.tensor([0]))
    assert value.item() == pytest.approx(-0.313262, abs=1e-6)


@both
@pytest.mark.parametrize(
    ("first_row", "target"),
    [
        pytest.param([0, 2], 1, id="not kept"),
        pytest.param([0, 2], 3, id="padded id"),
        pytest.param([0, 2], 4, id="beyond the logits"),
        pytest.param([0, 2], -100, id="ignore index"),
        pytest.param([], 3, id="padded id of a full row"),
        pytest.param([], 4, id="beyond the logits of a full row"),
        pytest.param([], -100, id="ignore index of a full row"),
    ],
)
def test_target_outside_the_support(op: Op, first_row: list[int], target: int) -> None:
    """A target outside its support is -inf and has no gradient, and leaves its neighbour (a singleton) alone."""
    size = len(first_row)
    support = Support(torch.tensor([*first_row, 2], dtype=torch.int32), torch.tensor([0, size, size + 1]), 3)
    logits = torch.randn(2, 4, requires_grad=True)
    values = op(logits, support, torch.tensor([target, 2]))
    values.exp().sum().backward()
    assert values.tolist() == [-torch.inf, 0.0]
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(2, 4))


@both
@pytest.mark.parametrize("full", [False, True], ids=["truncated", "with full rows"])
def test_gradcheck(op: Op, full: bool, generator: torch.Generator) -> None:
    """The gradient in the logits and in the temperature is that of finite differences, in float64."""
    support = draw([3, 0 if full else 2, 5, 1], 6, generator)
    targets = draw_targets(support, generator)
    logits = torch.randn(4, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    temperature = torch.rand(4, dtype=torch.float64, generator=generator).add(0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda z, t: op(z, support, targets, t), (logits, temperature))


@both
def test_rows_pick_logits_without_a_copy(op: Op, generator: torch.Generator) -> None:
    """`rows` gives what selecting the logits first gives, gradients included."""
    support = draw([3, 0, 1, 6], 9, generator)
    targets = draw_targets(support, generator)
    rows = torch.tensor([6, 0, 2, 5])
    logits = torch.randn(7, 9, generator=generator, requires_grad=True)
    values = op(logits, support, targets, 0.8, rows=rows)
    expected = op(logits[rows], support, targets, 0.8)
    assert torch.equal(values, expected)
    (one,) = torch.autograd.grad(values.sum(), logits)
    (other,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(one, other)


@both
def test_no_rows(op: Op) -> None:
    """No rows in, no values out, and a gradient of zeros."""
    support = Support(torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 5)
    logits = torch.randn(0, 5, requires_grad=True)
    values = op(logits, support, torch.empty(0, dtype=torch.int64))
    values.sum().backward()
    assert values.shape == (0,)


@both
@pytest.mark.parametrize(
    ("logits", "targets", "rows", "message"),
    [
        pytest.param(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), None, "4 columns", id="narrow logits"),
        pytest.param(torch.zeros(3, 5), torch.zeros(2, dtype=torch.int64), None, "3 rows of logits", id="more logits"),
        pytest.param(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64), None, "targets are", id="more targets"),
        pytest.param(torch.zeros(1, 2, 5), torch.zeros(2, dtype=torch.int64), None, "float", id="3-D logits"),
        pytest.param(
            torch.zeros(9, 5), torch.zeros(2, dtype=torch.int64), torch.zeros(3).long(), "3 rows", id="more rows"
        ),
        pytest.param(torch.zeros(2, 5), torch.zeros(2).long(), torch.zeros(2).int(), "must be int64", id="int32 rows"),
        pytest.param(torch.zeros(2, 5), torch.zeros(2).int(), None, "must be int64", id="int32 targets"),
        pytest.param(torch.zeros(2, 5), torch.zeros(2).long(), torch.ones(2).bool(), "must be int64", id="bool rows"),
    ],
)
def test_shapes_are_checked(op: Op, logits: Tensor, targets: Tensor, rows: Tensor | None, message: str) -> None:
    """Arguments that do not fit are refused: a gather over narrow logits would read the next row's."""
    support = Support(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 2]), 5)
    with pytest.raises(UsageError, match=message):
        op(logits, support, targets, rows=rows)
