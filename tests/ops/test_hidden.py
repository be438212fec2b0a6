"""support_logprobs_from_hidden and its dense twin against the float64 oracle, through the chain rule of the head.

Inputs in bfloat16 and float16 are exact numbers, and all is accumulated in float32, so that values get the tolerance of
float32; gradients are returned in the dtype of the inputs, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from models.supports import SHAPES, draw, draw_targets, oracle
from torch import Tensor

from rollgen.errors import UsageError
from rollgen.ops import Support, SupportLogprobs, reference, support_logprobs, support_logprobs_from_hidden

Op = Callable[..., Any]
both = pytest.mark.parametrize(
    "op", [support_logprobs_from_hidden, reference.support_logprobs_from_hidden], ids=["sparse", "dense"]
)
WIDTH = 6
"""Hidden size H."""
TOLERANCE = 1e-5


class Case(NamedTuple):
    """Arguments of the op; `leaves` are those that get a gradient."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    support: Support
    targets: Tensor
    temperature: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias, self.temperature

    def run(self, op: Op, **changes: Any) -> Any:
        arguments = {"bias": self.bias, "entropy": True} | changes
        return op(self.hidden, self.weight, self.support, self.targets, self.temperature, **arguments)


def make(lengths: list[int], vocab_size: int, padding: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    support, count, rows = draw(lengths, vocab_size, generator), len(lengths), vocab_size + padding
    # float32 at least, as for the ops: a temperature in float64 is needed for gradcheck only.
    precise = torch.promote_types(dtype, torch.float32)
    temperature = torch.rand(count, generator=generator).add(0.5).to(precise).requires_grad_()
    targets = draw_targets(support, generator)
    return Case(tensor(count, WIDTH), tensor(rows, WIDTH), tensor(rows), support, targets, temperature)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "vocab_size", "padding"), SHAPES)
@pytest.mark.usefixtures("blocks")
def test_values_and_gradients(
    op: Op, dtype: torch.dtype, lengths: list[int], vocab_size: int, padding: int, generator: torch.Generator
) -> None:
    """Values, entropies and the gradients in hidden, weight and bias are those of the oracle."""
    case = make(lengths, vocab_size, padding, dtype, generator)
    results = case.run(op)
    weights = (1.0, 0.5, 0.0)
    in_hidden, in_weight, in_bias = torch.autograd.grad(
        results.logprobs.sum() + 0.5 * results.entropy.sum(), case.leaves[:3]
    )

    hidden, weight, bias = (leaf.detach().double().numpy() for leaf in case.leaves[:3])
    expected = oracle(hidden @ weight.T + bias, case.support, case.targets, case.temperature, weights)
    assert results.logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(results.logprobs.detach().numpy(), expected.logprobs, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(results.entropy.detach().numpy(), expected.entropy, rtol=TOLERANCE, atol=TOLERANCE)
    for gradient, right in (
        (in_hidden, expected.gradient @ weight),
        (in_weight, expected.gradient.T @ hidden),
        (in_bias, expected.gradient.sum(0)),
    ):
        assert gradient.dtype == dtype
        # The dense twin rounds once too, after sums in float32; full rows are added to listed ones: twice.
        close = {"rtol": max(TOLERANCE, 2 * torch.finfo(dtype).eps), "atol": max(TOLERANCE, torch.finfo(dtype).eps)}
        np.testing.assert_allclose(gradient.double().numpy(), right, **close)


@both
@pytest.mark.parametrize("full", [False, True], ids=["truncated", "with full rows"])
@pytest.mark.parametrize("result", [0, 1], ids=["logprobs", "entropy"])
def test_gradcheck(op: Op, full: bool, result: int, generator: torch.Generator) -> None:
    """The gradients in all four inputs are those of finite differences, in float64."""
    case = make([3, 0 if full else 2, 5, 1], 6, 2, torch.float64, generator)

    def run(*leaves: Tensor) -> Tensor:
        hidden, weight, bias, temperature = leaves
        return case._replace(hidden=hidden, weight=weight, bias=bias, temperature=temperature).run(op)[result]

    assert torch.autograd.gradcheck(run, case.leaves)


@both
@pytest.mark.usefixtures("blocks")
def test_rows_may_repeat(op: Op, generator: torch.Generator) -> None:
    """`rows` gives what selecting the hidden states first gives, gradients included, also for one used twice."""
    case = make([3, 0, 1, 6, 0, 2], 9, 0, torch.float64, generator)
    rows = torch.tensor([4, 0, 2, 4, 0, 0])
    values, expected = case.run(op, rows=rows), case._replace(hidden=case.hidden[rows]).run(op)
    torch.testing.assert_close(values.logprobs, expected.logprobs)
    one = torch.autograd.grad(values.logprobs.sum(), case.leaves)
    other = torch.autograd.grad(expected.logprobs.sum(), case.leaves)
    torch.testing.assert_close(one, other)


def test_strides_do_not_matter(generator: torch.Generator) -> None:
    """Hidden states and a head that are views of something larger give what their copies give."""
    case = make([3, 0, 1, 6], 9, 0, torch.float32, generator)
    hidden = torch.randn(WIDTH, 8, generator=generator)[:, ::2].T.requires_grad_()
    weight = torch.randn(WIDTH, 9, generator=generator).T.requires_grad_()
    assert not hidden.is_contiguous()
    views, copies = (hidden, weight), tuple(leaf.detach().contiguous().requires_grad_() for leaf in (hidden, weight))
    results = []
    for leaves in (views, copies):
        values = case._replace(hidden=leaves[0], weight=leaves[1]).run(support_logprobs_from_hidden).logprobs
        results.append((values, *torch.autograd.grad(values.sum(), leaves)))
    torch.testing.assert_close(*results)


@both
def test_flags(op: Op, generator: torch.Generator) -> None:
    """A tensor without `entropy`, a SupportLogprobs without kept mass with it; the bias may be left out."""
    case = make([3, 1], 5, 0, torch.float32, generator)
    results = case.run(op)
    assert isinstance(results, SupportLogprobs)
    assert results.log_kept_mass is None
    assert torch.equal(case.run(op, entropy=False), results.logprobs)
    without = case._replace(bias=torch.zeros_like(case.bias)).run(op, entropy=False)
    torch.testing.assert_close(case.run(op, bias=None, entropy=False), without)


@both
@pytest.mark.parametrize("target", [1, 3, 4, -100], ids=["not kept", "padded id", "beyond the head", "ignore index"])
def test_target_outside_the_support(op: Op, target: int, generator: torch.Generator) -> None:
    """-inf without gradient, as is a singleton that is not the target; full rows know only ids of the vocabulary."""
    support = Support(torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([0, 2, 3]), 3)
    hidden = torch.randn(2, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(4, WIDTH, generator=generator, requires_grad=True)
    values = op(hidden, weight, support, torch.tensor([target, target]))
    values.exp().sum().backward()
    assert values.tolist() == [-torch.inf, -torch.inf]
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()
    if target != 1:
        full = Support(support.ids[:0], torch.tensor([0, 0, 0]), 3)
        assert op(hidden, weight, full, torch.tensor([target, 2]))[0] == -torch.inf


def test_nothing_is_read_for_one_id(generator: torch.Generator) -> None:
    """A row of one id is exactly 0 with no gradient, even where the head holds NaN; so are ids that no row lists."""
    support = draw([1] * 9, 20, generator)
    hidden = torch.randn(9, WIDTH, generator=generator, requires_grad=True)
    weight = torch.full((20, WIDTH), torch.nan, requires_grad=True)
    values = support_logprobs_from_hidden(hidden, weight, support, support.ids.long())
    values.sum().backward()
    assert (values == 0).all()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_inputs_get_no_gradient(frozen: str, generator: torch.Generator) -> None:
    """What is frozen stays without a gradient, and the others have theirs."""
    case = make([3, 0, 4], 7, 0, torch.float32, generator)
    getattr(case, frozen).requires_grad_(False)
    expected = torch.autograd.grad(
        case.run(reference.support_logprobs_from_hidden).logprobs.sum(), [x for x in case.leaves if x.requires_grad]
    )
    case.run(support_logprobs_from_hidden).logprobs.sum().backward()
    assert getattr(case, frozen).grad is None
    gradients = [leaf.grad for leaf in case.leaves if leaf.requires_grad]
    torch.testing.assert_close(gradients, list(expected), atol=1e-5, rtol=1e-4)


def test_the_gradient_of_the_head_is_taken_as_it_is(generator: torch.Generator) -> None:
    """Autograd keeps the one tensor that the backward made, rather than a copy: for a large head that is half a GB."""
    case = make([3, 4], 7, 0, torch.float32, generator)
    made = []
    case.weight.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    case.run(support_logprobs_from_hidden).logprobs.sum().backward()
    assert case.weight.grad is not None
    assert made == [case.weight.grad.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_bit_by_bit(dtype: torch.dtype, set_threads: Callable[[int], None], generator: torch.Generator) -> None:
    """Values and gradients over repeats and numbers of threads; large enough that torch does split the work."""
    lengths = torch.randint(1, 40, (80,), generator=generator).tolist()
    support = draw(lengths, 300, generator)
    targets = draw_targets(support, generator)
    leaves = [
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((80, 256), (300, 256), (300,))
    ]
    results = []
    for count in (1, 1, 2, 3):
        set_threads(count)
        values = support_logprobs_from_hidden(*leaves[:2], support, targets, 0.7, bias=leaves[2])
        results.append((values, *torch.autograd.grad(values.sum(), leaves)))
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))


@pytest.mark.parametrize("lengths", [[3, 5], [0, 4]], ids=["truncated", "with full rows"])
def test_autocast_changes_nothing(lengths: list[int], generator: torch.Generator) -> None:
    """float32 stays float32 under autocast, the matrix product of full rows included."""
    case = make(lengths, 9, 0, torch.float32, generator)
    expected = case.run(support_logprobs_from_hidden).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = case.run(support_logprobs_from_hidden).logprobs
        gradients = torch.autograd.grad(values.sum(), case.leaves)
    assert torch.equal(values, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), case.leaves))


def test_differentiating_twice_is_refused(generator: torch.Generator) -> None:
    """The gradient has no gradient: an error, not zeros."""
    case = make([3], 5, 0, torch.float32, generator)
    values = case.run(support_logprobs_from_hidden).logprobs
    (gradient,) = torch.autograd.grad(values.sum(), case.hidden, create_graph=True)
    with pytest.raises(UsageError, match="differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("place", range(4), ids=["hidden", "weight", "bias", "temperature"])
def test_forward_mode_is_refused(place: int, forward_mode: Callable[..., object], generator: torch.Generator) -> None:
    """For each input: an error, not zeros."""
    case = make([3], 5, 0, torch.float32, generator)
    inputs = [leaf.detach() for leaf in case.leaves]

    def run(value: Tensor) -> Tensor:
        hidden, weight, bias, temperature = (*inputs[:place], value, *inputs[place + 1 :])
        return case._replace(hidden=hidden, weight=weight, bias=bias, temperature=temperature).run(
            support_logprobs_from_hidden, entropy=False
        )

    with pytest.raises(UsageError, match="no forward-mode derivative"):
        forward_mode(run, inputs[place])


def test_forward_mode_over_the_backward_is_refused(generator: torch.Generator) -> None:
    """Also where what comes from above is what is differentiated by."""
    case = make([3], 5, 0, torch.float32, generator)
    values = case.run(support_logprobs_from_hidden, entropy=False)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UsageError, match="no forward-mode derivative"):
        torch.autograd.grad(values, case.hidden, torch.autograd.forward_ad.make_dual(torch.ones(1), torch.ones(1)))


@pytest.mark.parametrize("lengths", [[4], [0]], ids=["truncated", "full row"])
@pytest.mark.usefixtures("blocks")
def test_logits_near_the_largest_number(lengths: list[int], generator: torch.Generator) -> None:
    """Differences that overflow leave no NaN: two equal logits, and two that are nothing beside them."""
    weight = torch.tensor([[-3e38], [1e38], [0.0], [1e38]])
    hidden = torch.ones(1, 1, requires_grad=True)
    bias = torch.zeros(4, requires_grad=True)
    results = support_logprobs_from_hidden(
        hidden, weight, draw(lengths, 4, generator), torch.tensor([3]), bias=bias, entropy=True
    )
    assert results.logprobs.item() == pytest.approx(-0.693147, abs=1e-6)  # log 0.5
    assert results.entropy.item() == pytest.approx(0.693147, abs=1e-6)
    (gradient,) = torch.autograd.grad((results.logprobs + 2 * results.entropy).sum(), bias)
    torch.testing.assert_close(gradient, torch.tensor([0, -0.5, 0, 0.5]))


@both
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"hidden": torch.zeros(1, 2, 6)}, "hidden must be float", id="3-D hidden"),
        pytest.param({"hidden": torch.zeros(2, 0), "weight": torch.zeros(5, 0)}, "H 1 or more", id="no hidden size"),
        pytest.param({"hidden": torch.zeros(2, 6).long()}, "hidden must be float", id="int hidden"),
        pytest.param({"hidden": torch.zeros(2, 6).bfloat16()}, "bfloat16 on cpu, weight torch.float32", id="dtypes"),
        pytest.param({"weight": torch.zeros(5, 6, device="meta")}, "float32 on meta", id="devices"),
        pytest.param({"weight": torch.zeros(5, 7)}, r"weight must be \[V, 6\]", id="another hidden size"),
        pytest.param({"weight": torch.zeros(4, 6)}, "weight has 4 rows", id="narrow head"),
        pytest.param({"bias": torch.zeros(4)}, r"bias must be \[5\]", id="short bias"),
        pytest.param({"bias": torch.zeros(5).double()}, "bias torch.float64", id="bias of another dtype"),
        pytest.param({"targets": torch.zeros(3).long()}, r"targets are \[3\]", id="more targets"),
        pytest.param({"rows": torch.zeros(3).long()}, "3 rows of hidden", id="more rows"),
        pytest.param({"rows": torch.tensor([0, 2])}, "rows must be 0 to 1, one is 2", id="row too large"),
        pytest.param({"rows": torch.zeros(2).int()}, "must be int64", id="int32 rows"),
        pytest.param({"temperature": torch.ones(3)}, r"a number or \[2\]", id="more temperatures"),
        pytest.param({"temperature": 0.0}, "above 0", id="greedy"),
    ],
)
def test_arguments_are_checked(op: Op, changes: dict[str, Any], message: str) -> None:
    """Arguments that do not fit are refused with both sides named."""
    arguments = {
        "hidden": torch.zeros(2, 6),
        "weight": torch.zeros(5, 6),
        "support": Support(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 2]), 5),
        "targets": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(UsageError, match=message):
        op(**arguments | changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[3, 0, 1, 62, 5], [40] * 90], ids=["with full rows", "truncated"])
def test_cuda_computes_what_the_cpu_computes(
    dtype: torch.dtype, lengths: list[int], generator: torch.Generator
) -> None:
    """Values and gradients of both ops; from hidden states of truncated rows, the same bits each time."""
    case = make(lengths, 101, 3, dtype, generator)
    hidden, weight, bias, temperature = (leaf.detach().cuda().requires_grad_() for leaf in case.leaves)
    moved = Case(hidden, weight, bias, case.support.to("cuda"), case.targets.cuda(), temperature)
    for op in (support_logprobs_from_hidden, _by_way_of_logits):
        here, there, again = (_values_and_gradients(some, op) for some in (case, moved, moved))
        torch.testing.assert_close([part.cpu() for part in there], here, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(there[0].cpu(), here[0], atol=1e-4, rtol=1e-4)
        if op is support_logprobs_from_hidden and 0 not in lengths:
            assert all(torch.equal(one, other) for one, other in zip(there, again, strict=True))


def _values_and_gradients(case: Case, op: Op) -> list[Tensor]:
    results = case.run(op)
    return [
        results.logprobs,
        *torch.autograd.grad(sum(part.sum() for part in results if part is not None), case.leaves),
    ]


def _by_way_of_logits(hidden: Tensor, weight: Tensor, *arguments: Any, bias: Tensor, entropy: bool) -> SupportLogprobs:
    logits = hidden.float() @ weight.float().T + bias
    return support_logprobs(logits, *arguments, entropy=entropy, kept_mass=True)
