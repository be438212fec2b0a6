"""support_logprobs and its dense twin against a float64 oracle, at odd shapes and extreme logits.

Tolerances: float32 sums over at most 501 terms of magnitude <= 30 are good to 1e-5; inputs in bfloat16 and float16 are
exact numbers, so they get the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models.supports import SHAPES, draw, draw_targets, oracle
from torch import Tensor

from rollgen.errors import UsageError
from rollgen.ops import Support, SupportLogprobs, reference, support_logprobs

Op = Callable[..., Any]
both = pytest.mark.parametrize("op", [support_logprobs, reference.support_logprobs], ids=["sparse", "dense"])
TOLERANCE = 1e-5


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "vocab_size", "padding"), SHAPES)
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
    expected = oracle(logits.detach().double().numpy(), support, targets, temperature)
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(values.detach().numpy(), expected.logprobs, rtol=TOLERANCE, atol=TOLERANCE)
    assert logits.grad is not None
    # The gradient is returned in the dtype of the logits: half a unit in its last place, at values up to 2.
    tolerance = max(TOLERANCE, 2 * torch.finfo(dtype).eps)
    np.testing.assert_allclose(logits.grad.double().numpy(), expected.gradient, atol=tolerance)
    outside = ~support.to_bool(logits.shape[1])
    assert (logits.grad[outside] == 0).all()


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths", "vocab_size", "padding"), SHAPES)
@pytest.mark.usefixtures("blocks")
def test_entropy_and_kept_mass(
    op: Op, dtype: torch.dtype, lengths: list[int], vocab_size: int, padding: int, generator: torch.Generator
) -> None:
    """Entropy and log kept mass agree with the oracle, and so does the gradient of all three results together."""
    support = draw(lengths, vocab_size, generator)
    targets = draw_targets(support, generator)
    logits = (3 * torch.randn(len(lengths), vocab_size + padding, generator=generator)).to(dtype).requires_grad_()
    temperature = torch.rand(len(lengths), generator=generator) + 0.5

    results = op(logits, support, targets, temperature, entropy=True, kept_mass=True)
    weights = (1.0, 0.5, -2.0)
    sum(weight * result.sum() for weight, result in zip(weights, results, strict=True)).backward()
    expected = oracle(logits.detach().double().numpy(), support, targets, temperature, weights)
    for value, right in zip(results, expected, strict=False):
        np.testing.assert_allclose(value.detach().numpy(), right, rtol=TOLERANCE, atol=TOLERANCE)
    assert logits.grad is not None
    # Values up to 6: each is rounded once, so to half a unit in its last place.
    tolerance = max(TOLERANCE, 3 * torch.finfo(dtype).eps)
    np.testing.assert_allclose(logits.grad.double().numpy(), expected.gradient, atol=tolerance)
    assert (results.log_kept_mass[support.lengths == 0] == 0).all()
    assert (results.entropy[support.lengths == 1] == 0).all()


def test_kept_mass_is_at_most_one(generator: torch.Generator) -> None:
    """A support of every id keeps all mass: log 1 = 0 but for rounding, and never above it."""
    support = draw([300] * 64, 300, generator)
    logits = torch.randn(64, 300, generator=generator)
    masses = support_logprobs(logits, support, draw_targets(support, generator), kept_mass=True).log_kept_mass
    assert masses is not None
    assert (masses <= 0).all()
    assert (masses > -TOLERANCE).all()


@both
def test_only_what_is_asked_for(op: Op, generator: torch.Generator) -> None:
    """A tensor without flags; with one, a named tuple with None for what was not asked."""
    support = draw([2, 3], 4, generator)
    arguments = torch.randn(2, 4, generator=generator), support, draw_targets(support, generator)
    logprobs, entropy, log_kept_mass = op(*arguments, entropy=True, kept_mass=True)
    assert torch.equal(op(*arguments), logprobs)
    one, other = op(*arguments, entropy=True), op(*arguments, kept_mass=True)
    assert isinstance(one, SupportLogprobs)
    assert torch.equal(one.entropy, entropy)
    assert one.log_kept_mass is None
    assert torch.equal(other.log_kept_mass, log_kept_mass)
    assert other.entropy is None


@both
@pytest.mark.parametrize("lengths", [[3], [0]], ids=["truncated", "full row"])
def test_minus_infinity_inside(op: Op, lengths: list[int], generator: torch.Generator) -> None:
    """An id of the support with logit -inf has no mass: all is as if it were not listed, and no gradient is NaN."""
    support = draw(lengths, 3, generator)
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    temperature = torch.tensor([2.0], requires_grad=True)
    results = op(logits, support, torch.tensor([2]), temperature, entropy=True, kept_mass=True)
    sum(result.sum() for result in results).backward()
    # sigmoid(1 / 2) = 0.62246: log 0.62246 = -0.47408, -(p log p + q log q) = 0.66284
    assert results.logprobs.item() == pytest.approx(-0.474077, abs=1e-5)
    assert results.entropy.item() == pytest.approx(0.662843, abs=1e-5)
    assert results.log_kept_mass.item() == 0
    assert logits.grad is not None
    assert logits.grad[0, 1] == 0
    assert logits.grad.isfinite().all()


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
@pytest.mark.parametrize("result", [0, 1, 2], ids=["logprobs", "entropy", "log kept mass"])
def test_gradcheck(op: Op, full: bool, result: int, generator: torch.Generator) -> None:
    """The gradient in the logits and in the temperature is that of finite differences, in float64."""
    support = draw([3, 0 if full else 2, 5, 1], 6, generator)
    targets = draw_targets(support, generator)
    logits = torch.randn(4, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    temperature = torch.rand(4, dtype=torch.float64, generator=generator).add(0.5).requires_grad_()

    def run(logits: Tensor, temperature: Tensor) -> Tensor:
        return op(logits, support, targets, temperature, entropy=True, kept_mass=True)[result]

    assert torch.autograd.gradcheck(run, (logits, temperature))


def test_differentiating_twice_is_refused(generator: torch.Generator) -> None:
    """The gradient has no gradient: an error, not zeros."""
    support = draw([3], 5, generator)
    logits = torch.randn(1, 5, generator=generator, requires_grad=True)
    values = support_logprobs(logits, support, draw_targets(support, generator))
    (gradient,) = torch.autograd.grad(values.sum(), logits, create_graph=True)
    with pytest.raises(UsageError, match="differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("place", [0, 1], ids=["logits", "temperature"])
def test_forward_mode_is_refused(place: int, forward_mode: Callable[..., object], generator: torch.Generator) -> None:
    """A custom operator has no such derivative, and torch would take it for zero: an error instead."""
    support = draw([3], 5, generator)
    targets = draw_targets(support, generator)
    inputs = [torch.randn(1, 5, generator=generator), torch.ones(1)]

    def run(value: Tensor) -> Tensor:
        logits, temperature = (*inputs[:place], value, *inputs[place + 1 :])
        return support_logprobs(logits, support, targets, temperature)

    with pytest.raises(UsageError, match="no forward-mode derivative"):
        forward_mode(run, inputs[place])


def test_forward_mode_over_the_backward_is_refused(generator: torch.Generator) -> None:
    """Also where what comes from above is what is differentiated by."""
    support = draw([3], 5, generator)
    logits = torch.randn(1, 5, generator=generator, requires_grad=True)
    values = support_logprobs(logits, support, draw_targets(support, generator))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UsageError, match="no forward-mode derivative"):
        torch.autograd.grad(values, logits, torch.autograd.forward_ad.make_dual(torch.ones(1), torch.ones(1)))


def test_logits_are_not_kept(generator: torch.Generator) -> None:
    """Where only listed logits are read, all of them may be written over before the backward."""
    support = draw([3, 1], 5, generator)
    leaf = torch.randn(2, 5, generator=generator, requires_grad=True)
    arguments = support, draw_targets(support, generator)
    (expected,) = torch.autograd.grad(support_logprobs(leaf, *arguments).sum(), leaf)
    logits = leaf.clone()
    values = support_logprobs(logits, *arguments)
    logits.detach().zero_()
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    assert torch.equal(gradient, expected)


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kept_mass", [False, True], ids=["logprobs", "kept mass"])
@pytest.mark.parametrize("lengths", [[3, 1, 9, 40], [3, 0, 9, 0]], ids=["truncated", "with full rows"])
@pytest.mark.usefixtures("blocks")
def test_repeated_rows_are_rounded_once(
    op: Op, dtype: torch.dtype, kept_mass: bool, lengths: list[int], generator: torch.Generator
) -> None:
    """Rows of logits that 30 tokens share: the sum of their gradients is off by its own rounding, not by 30."""
    support = draw(lengths * 15, 41, generator)
    targets = draw_targets(support, generator)
    rows = torch.randint(0, 2, (60,), generator=generator) * 2  # the row between is not used
    logits = torch.randn(3, 45, generator=generator).to(dtype).requires_grad_()
    results = op(logits, support, targets, 0.8, rows=rows, kept_mass=True)
    value = results.logprobs.sum() + (results.log_kept_mass.sum() if kept_mass else 0)
    (gradient,) = torch.autograd.grad(value, logits)

    copies = logits.detach().double().numpy()[rows]
    expected = oracle(copies, support, targets, torch.full((60,), 0.8), (1, 0, float(kept_mass))).gradient
    sums = np.zeros((3, 45))
    np.add.at(sums, rows.numpy(), expected)
    # Half a unit in the last place, and sums of 60 numbers of float32.
    np.testing.assert_allclose(gradient.double().numpy(), sums, rtol=torch.finfo(dtype).eps / 2, atol=2e-5)


@both
@pytest.mark.parametrize("lengths", [[4], [0]], ids=["truncated", "full row"])
@pytest.mark.parametrize("upper", [1e31, 3e38], ids=str)
@pytest.mark.usefixtures("blocks")
def test_logits_near_the_largest_number(op: Op, lengths: list[int], upper: float, generator: torch.Generator) -> None:
    """Differences that overflow leave no NaN: two equal logits, and two that are nothing beside them."""
    logits = torch.tensor([[-3e38, upper, 0.0, upper]], requires_grad=True)
    temperature = torch.ones(1, requires_grad=True)
    results = op(logits, draw(lengths, 4, generator), torch.tensor([3]), temperature, entropy=True)
    assert results.logprobs.item() == pytest.approx(-0.693147, abs=1e-6)  # log 0.5
    assert results.entropy.item() == pytest.approx(0.693147, abs=1e-6)
    (gradient,) = torch.autograd.grad((results.logprobs + 2 * results.entropy).sum(), logits)
    # [v = target] - pi; the entropy is at its maximum over the two.
    torch.testing.assert_close(gradient, torch.tensor([[0, -0.5, 0, 0.5]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_bit_by_bit(dtype: torch.dtype, set_threads: Callable[[int], None], generator: torch.Generator) -> None:
    """Over numbers of threads, on a vocabulary of which torch sums a single row on all of them."""
    vocab_size = 151_936
    logits = (3 * torch.randn(3, vocab_size, generator=generator)).to(dtype).requires_grad_()
    temperature = torch.rand(3, generator=generator).add(0.5).requires_grad_()
    for lengths in ([0, 12, 5], [1, 7, 30]):  # one row, then three, that need the whole vocabulary
        support = draw(lengths, vocab_size, generator)
        arguments = logits, support, support.to_padded_ids(0)[:, 0].long(), temperature
        results = []
        for count in (1, 2, 3):
            set_threads(count)
            values = support_logprobs(*arguments, entropy=True, kept_mass=0 not in lengths)
            total = sum(value.sum() for value in values if value is not None)
            gradients = torch.autograd.grad(total, (logits, temperature))
            results.append([value for value in (*values, *gradients) if value is not None])
        for result in results[1:]:
            assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))


@pytest.mark.parametrize("upstream", [torch.inf, torch.nan], ids=str)
def test_singletons_have_no_gradient_whatever_comes_from_above(upstream: float, generator: torch.Generator) -> None:
    """A loss that is inf or NaN at a token of one id does not reach its logits or its temperature."""
    support = draw([1, 3], 9, generator)
    logits = torch.randn(2, 9, generator=generator, requires_grad=True)
    temperature = torch.ones(2, requires_grad=True)
    results = support_logprobs(logits, support, draw_targets(support, generator), temperature, entropy=True)
    above = torch.tensor([upstream, 1.0])
    in_logits, in_scale = torch.autograd.grad(results[:2], (logits, temperature), (above, above))
    assert not in_logits[0].any()
    assert in_scale[0] == 0
    assert in_logits.isfinite().all()


@both
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param([0, 9], "rows must be 0 to 8, one is 9", id="too large"),
        pytest.param([-1, 0], "rows must be 0 to 8, one is -1", id="negative"),
        pytest.param([[0, 1]], r"rows must be \[2\], not \[1, 2\]", id="2-D"),
    ],
)
def test_rows_are_checked(op: Op, rows: list[int], message: str) -> None:
    """A row that is not there is no other row: negative ones do not count from the end."""
    support = Support(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 2]), 5)
    with pytest.raises(UsageError, match=message):
        op(torch.zeros(9, 5), support, torch.zeros(2).long(), rows=torch.tensor(rows))


BAD_TEMPERATURES = [0.0, -1.0, 1e-46, 1e39, float("inf"), float("nan")]


@both
@pytest.mark.parametrize("temperature", BAD_TEMPERATURES, ids=str)
@pytest.mark.parametrize("wrap", [float, torch.tensor, lambda t: torch.tensor([1.0, t])], ids=["number", "0-D", "1-D"])
def test_temperatures_are_checked(op: Op, wrap: Callable[[float], float | Tensor], temperature: float) -> None:
    """What is not a finite number above 0 in float32, where 1e-46 is 0 and 1e39 is inf, divides nothing."""
    support = Support(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 2]), 5)
    with pytest.raises(UsageError, match="finite number above 0 in float32"):
        op(torch.zeros(2, 5), support, torch.zeros(2).long(), wrap(temperature))


@both
@pytest.mark.parametrize(
    ("temperature", "message"),
    [
        pytest.param(torch.ones(2).int(), "not torch.int32 on cpu", id="int"),
        pytest.param(torch.ones(2) * 1j, "not torch.complex64 on cpu", id="complex"),
        pytest.param(torch.ones(2, device="meta"), "not torch.float32 on meta", id="device"),
        pytest.param(torch.ones(3), r"a number or \[2\]", id="more"),
    ],
)
def test_tensors_of_temperatures_are_checked(op: Op, temperature: Tensor, message: str) -> None:
    """One real number, or one for each row, where the logits are."""
    support = Support(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 2]), 5)
    with pytest.raises(UsageError, match=message):
        op(torch.zeros(2, 5), support, torch.zeros(2).long(), temperature)


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
