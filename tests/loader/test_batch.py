"""collate and RolloutBatch: places, masks and the causal shift, on rollouts small enough to write out."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rollgen.errors import UsageError
from rollgen.loader import Rollout, RolloutBatch, RolloutDataset, collate
from rollgen.loader.batch import Layout
from rollgen.ops import Support
from rollgen.rollouts import Completion

VOCAB_SIZE = 12


def rollout(prompt: list[int], response: list[int], rows: list[list[int]], *, temperature: float = 1.0) -> Rollout:
    """A rollout with log-probabilities -1, -2, ... and these support rows."""
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    ids = torch.tensor([i for row in rows for i in row], dtype=torch.int32)
    return Rollout(
        prompt_id="p",
        sample_index=len(prompt),
        prompt_index=0,
        prompt_ids=torch.tensor(prompt),
        token_ids=torch.tensor(response),
        logprobs=-torch.arange(1.0, len(response) + 1),
        support=Support(ids, offsets, VOCAB_SIZE),
        temperature=temperature,
        finish_reason="stop",
        stop_reason=None,
        top_p=1.0,
        min_p=0.0,
        top_k=2,
        max_tokens=9,
        seed=0,
        replayable=True,
        text="x",
        prompt=None,
        metadata='{"answer": 1}',
    )


@pytest.fixture
def rollouts() -> list[Rollout]:
    """Lengths 1 + 3 and 3 + 2; the second row of the first support is not truncated."""
    return [
        rollout([4], [5, 6, 7], [[5, 9], [], [7]], temperature=0.5),
        rollout([1, 2, 3], [8, 9], [[0, 8, 11], [9]], temperature=2.0),
    ]


def test_an_empty_prompt_is_refused() -> None:
    """No logits predict its first token: the place before it belongs to another row."""
    with pytest.raises(UsageError, match="'p': the prompt is empty"):
        collate([rollout([], [3], [[3]])])


def test_collate_places(rollouts: list[Rollout]) -> None:
    """Right padding; each token's log-probability and support row stand at the token's own place."""
    batch = collate(rollouts, pad_id=10)
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 10], [1, 2, 3, 8, 9]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert batch.logprobs.tolist() == [[0, -1, -2, -3, 0], [0, 0, 0, -1, -2]]
    assert batch.response_places.tolist() == [1, 2, 3, 8, 9]
    assert batch.support.lengths.tolist() == [2, 0, 1, 3, 1]
    assert batch.support.ids.tolist() == [5, 9, 7, 0, 8, 11, 9]
    assert batch.temperature.tolist() == [0.5, 2.0]
    assert batch.sample_index.tolist() == [1, 3]
    assert (batch.prompt_id, batch.metadata, batch.text) == (["p", "p"], ['{"answer": 1}'] * 2, ["x", "x"])
    assert (len(batch), batch.vocab_size) == (2, VOCAB_SIZE)


def test_packed_places(rollouts: list[Rollout]) -> None:
    """One row without padding; the first token of the second rollout stands right after the last of the first."""
    batch = collate(rollouts, layout="packed", pad_id=10)
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 1, 2, 3, 8, 9]]
    assert batch.attention_mask.tolist() == [[True] * 9]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 1, 0, 0, 0, 1, 1]]
    assert batch.logprobs.tolist() == [[0, -1, -2, -3, 0, 0, 0, -1, -2]]
    assert batch.response_places.tolist() == [1, 2, 3, 7, 8]
    assert (len(batch), batch.prompt_id) == (2, ["p", "p"])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_both_layouts_say(rollouts: list[Rollout], layout: Layout) -> None:
    """Where rollouts start, the longest, whose each token is: two rollouts of lengths 4 and 5, three and two tokens."""
    batch = collate(rollouts, layout=layout)
    assert (batch.cu_seqlens.tolist(), batch.max_length) == ([0, 4, 9], 5)
    assert batch.response_rollouts.tolist() == [0, 0, 0, 1, 1]
    assert batch.response_temperature().tolist() == [0.5, 0.5, 0.5, 2, 2]
    assert batch.response_places.tolist() == batch.response_mask.flatten().nonzero().flatten().tolist()
    assert batch.input_ids.flatten()[batch.response_places].tolist() == [5, 6, 7, 8, 9]
    assert batch.support.lengths.tolist() == [2, 0, 1, 3, 1]
    assert batch.support.has_full_rows
    assert (batch.dataset_index.tolist(), batch.lost, batch.cursor) == ([0, 0], 0, None)


def test_positions_go_on_over_padding(rollouts: list[Rollout]) -> None:
    """Padding is on the right: positions are the columns."""
    assert collate(rollouts).position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_no_full_rows(rollouts: list[Rollout]) -> None:
    """Known from the data: nobody has to ask the device."""
    assert collate(rollouts[1:]).support.has_full_rows is False


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_batch_of_one(rollouts: list[Rollout], layout: Layout) -> None:
    """Both layouts are the same then."""
    batch = collate(rollouts[1:], layout=layout)
    assert batch.input_ids.tolist() == [[1, 2, 3, 8, 9]]
    assert batch.attention_mask.all()
    assert (batch.cu_seqlens.tolist(), batch.response_places.tolist()) == ([0, 5], [3, 4])


def packed_logits(batch: RolloutBatch, logits: Tensor) -> Tensor:
    """[1, L, V] of a packed batch, from those [B, L, V] of the padded one: padding taken out."""
    return logits[batch.attention_mask][None]


def test_packed_log_probabilities_are_the_padded_ones(rollouts: list[Rollout]) -> None:
    """The shift stays inside a rollout; values and gradients of both layouts agree token by token."""
    padded, packed = collate(rollouts), collate(rollouts, layout="packed")
    logits = torch.randn(2, 5, VOCAB_SIZE, requires_grad=True, generator=torch.Generator().manual_seed(1))
    gradients, values = [], []
    for batch, outputs in ((padded, logits), (packed, packed_logits(padded, logits))):
        found = batch.support_logprobs(outputs)
        assert found.shape == batch.input_ids.shape
        assert (found[~batch.response_mask] == 0).all()
        values.append(found[batch.response_mask])
        gradients.append(torch.autograd.grad(values[-1].square().sum(), logits, retain_graph=True)[0])
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_from_hidden_states(rollouts: list[Rollout], layout: Layout) -> None:
    """The same as from the logits that the hidden states would give."""
    batch = collate(rollouts, layout=layout)
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(*batch.input_ids.shape, 6, generator=random)
    weight, bias = torch.randn(VOCAB_SIZE, 6, generator=random), torch.randn(VOCAB_SIZE, generator=random)
    for added in (None, bias):
        logits = torch.nn.functional.linear(hidden, weight, added)
        torch.testing.assert_close(
            batch.support_logprobs_from_hidden(hidden, weight, added), batch.support_logprobs(logits)
        )


@pytest.mark.parametrize("shape", [(2, 5, 6), (1, 8, 6), (9, 6)], ids=str)
def test_outputs_must_fit_the_layout(rollouts: list[Rollout], shape: tuple[int, ...]) -> None:
    """A packed batch has outputs [1, 9, ...]: those of the padded one are refused, under the name they were given."""
    batch = collate(rollouts, layout="packed")
    with pytest.raises(UsageError, match=r"logits are \[.*\], input_ids \[1, 9\]"):
        batch.support_logprobs(torch.zeros(shape))
    with pytest.raises(UsageError, match=r"hidden are \[.*\], input_ids \[1, 9\]"):
        batch.support_logprobs_from_hidden(torch.zeros(shape), torch.zeros(VOCAB_SIZE, 6))


def test_rollouts_are_copied(rollouts: list[Rollout]) -> None:
    """Writing into a batch of one does not change the rollout."""
    batch = collate(rollouts[:1])
    for tensor in (batch.input_ids, batch.logprobs, batch.support.ids, batch.support.offsets):
        tensor.fill_(0)
    assert rollouts[0].token_ids.tolist() == [5, 6, 7]
    assert rollouts[0].logprobs.tolist() == [-1, -2, -3]
    assert (rollouts[0].support.ids.tolist(), rollouts[0].support.offsets.tolist()) == ([5, 9, 7], [0, 2, 2, 3])


def test_dtypes(rollouts: list[Rollout]) -> None:
    """Ids are int64 as embeddings want them, masks bool, the rest float32."""
    batch = collate(rollouts)
    for ids in (batch.input_ids, batch.position_ids, batch.sample_index, batch.generation, batch.prompt_index):
        assert ids.dtype == torch.int64
    assert batch.dataset_index.dtype == batch.response_places.dtype == batch.response_rollouts.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32  # what flash attention takes
    assert batch.attention_mask.dtype == batch.response_mask.dtype == torch.bool
    assert batch.logprobs.dtype == batch.temperature.dtype == torch.float32
    assert (batch.support.ids.dtype, batch.support.offsets.dtype) == (torch.int32, torch.int64)


def expected_logprobs(batch: RolloutBatch, rollouts: list[Rollout], logits: Tensor) -> Tensor:
    """Token by token from the definition, in float64."""
    result = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    for b, one in enumerate(rollouts):
        for t, token in enumerate(one.token_ids.tolist()):
            place = one.prompt_ids.numel() + t
            row = one.support[t : t + 1].to_bool(logits.shape[2])[0]
            z = logits[b, place - 1].double() / one.temperature
            result[b, place] = z[token] - z[row].logsumexp(0)
    return result


@pytest.mark.parametrize("padding", [0, 5], ids=["equal", "padded vocabulary"])
def test_support_logprobs(rollouts: list[Rollout], padding: int) -> None:
    """The logits one place before a token are used, divided by that rollout's temperature; 0 outside the response."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    batch = collate(rollouts)
    logits = torch.randn(2, 5, VOCAB_SIZE + padding, generator=torch.Generator().manual_seed(seed))
    values = batch.support_logprobs(logits)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected_logprobs(batch, rollouts, logits), atol=1e-5, rtol=1e-5)
    assert (values[~batch.response_mask] == 0).all()


def test_gradient_reaches_only_predicting_places(rollouts: list[Rollout]) -> None:
    """Only logits at t - 1 of a generated token get a gradient, and only inside its support."""
    batch = collate(rollouts)
    logits = torch.randn(2, 5, VOCAB_SIZE, requires_grad=True)
    batch.support_logprobs(logits).sum().backward()
    assert logits.grad is not None
    touched = logits.grad.abs().sum(2) > 0
    # Predicting places are 0, 1, 2 and 2, 3 of the two rows; 2 of the first and 3 of the second predict singletons.
    assert touched.int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
    assert logits.grad[0, 0].nonzero().flatten().tolist() == [5, 9]


@pytest.mark.parametrize("shape", [(2, 4, VOCAB_SIZE), (5, VOCAB_SIZE), (2, 5, VOCAB_SIZE - 1)], ids=str)
def test_logits_must_fit(rollouts: list[Rollout], shape: tuple[int, ...]) -> None:
    """Logits cut to the response, flattened, or narrower than the vocabulary are refused."""
    with pytest.raises(UsageError, match=r"logits (are|have)"):
        collate(rollouts).support_logprobs(torch.zeros(shape))


@pytest.mark.parametrize("changed", [False, True], ids=["nothing", "two vocabularies"])
def test_collate_refuses(rollouts: list[Rollout], changed: bool) -> None:
    """An empty batch, or rollouts of two models, are refused."""
    other = replace(rollouts[1], support=replace(rollouts[1].support, vocab_size=99))
    with pytest.raises(UsageError, match="one vocabulary"):
        collate([rollouts[0], other] if changed else [])


def test_stored_support_logprobs_join(rollouts: list[Rollout]) -> None:
    """They are joined when every rollout has them, and absent as soon as one has none."""
    first = replace(rollouts[0], stored_support_logprobs=torch.tensor([-1.0, -2.0, -3.0]))
    second = replace(rollouts[1], stored_support_logprobs=torch.tensor([-4.0, -5.0, -6.0, -7.0]))
    joined = collate([first, second]).stored_support_logprobs
    assert joined is not None
    assert joined.tolist() == [-1, -2, -3, -4, -5, -6, -7]
    assert collate([first, rollouts[1]]).stored_support_logprobs is None


def test_to_moves_every_tensor(rollouts: list[Rollout]) -> None:
    """The meta device stands for any other: no tensor of the batch stays behind."""
    moved = collate(rollouts).to("meta", non_blocking=True)
    parts = [getattr(moved, field.name) for field in fields(moved)]
    tensors = [part for part in parts if isinstance(part, Tensor)] + [moved.support.ids, moved.support.offsets]
    assert len(tensors) == 16
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_reach_the_device(
    write_shards: Callable[..., Path], make_completion: Callable[..., Completion]
) -> None:
    """A DataLoader with pin_memory gives pinned batches, and CUDA computes what the CPU computes."""
    ds = RolloutDataset(write_shards([[make_completion(p, 0, full=p == 1) for p in range(3)]]))
    (batch,) = DataLoader(ds, batch_size=3, collate_fn=collate, pin_memory=True)
    assert batch.input_ids.is_pinned()
    assert batch.support.ids.is_pinned()
    logits = torch.randn(*batch.input_ids.shape, ds.vocab_size)
    on_device = batch.to("cuda", non_blocking=True).support_logprobs(logits.cuda())
    torch.testing.assert_close(on_device.cpu(), batch.support_logprobs(logits), atol=1e-5, rtol=1e-5)
