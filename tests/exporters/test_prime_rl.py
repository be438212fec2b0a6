"""prime-rl: files are decoded as its transport and its data loader do it, and compared token by token.

`MicroBatch` and its parts repeat the fields, in order, of `prime_rl/transports/batch/types.py` (September 2026): the
structs are positional, and msgspec checks types while it decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from models.rewards import write_rewards

import rollgen
from rollgen.errors import UsageError

Rows = Callable[[Path], dict[tuple[str, int], dict[str, Any]]]


class RoutedExperts(msgspec.Struct, array_like=True):
    data: bytes
    shape: list[int]
    dtype: str


class SamplingMask(msgspec.Struct, array_like=True):
    ids: bytes
    counts: bytes
    logprobs: bytes | None = None


class MicroBatch(msgspec.Struct, array_like=True):
    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: RoutedExperts | None = None
    mm_refs: None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    sampling_mask: SamplingMask | None = None
    trace_ids: list[str] | None = None
    branch_indices: list[int] | None = None


def read(out: Path, ranks: int = 1) -> list[list[list[MicroBatch]]]:
    """By step and rank, the micro batches that the trainer's receiver gets."""
    steps = []
    while (directory := out / "batches" / f"step_{len(steps) + 1}").exists():
        files = [directory / f"rank_{rank}.bin" for rank in range(ranks)]
        assert sorted(directory.iterdir()) == files
        steps.append([msgspec.msgpack.decode(file.read_bytes(), type=list[MicroBatch]) for file in files])
    assert len(list((out / "batches").iterdir())) == len(steps)
    return steps


def masks_of(batch: MicroBatch) -> npt.NDArray[np.int32]:
    """int32 [L, K], as the data loader makes them: padded with -1 to the widest."""
    if batch.sampling_mask is None:
        return np.full((len(batch.input_ids), 1), -1, np.int32)
    counts = np.frombuffer(batch.sampling_mask.counts, np.int32)
    padded = np.full((len(counts), max(int(counts.max()), 1)), -1, np.int32)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = np.frombuffer(batch.sampling_mask.ids, np.int32)
    return padded


def samples_of(batch: MicroBatch) -> dict[tuple[str, int], dict[str, Any]]:
    """What the trainer sees of each sample: everything about token t where the logits of t - 1 meet it."""
    length = len(batch.input_ids)
    for name in ("loss_mask", "advantages", "inference_logprobs", "position_ids", "temperatures", "env_names"):
        assert len(getattr(batch, name)) == length
    assert batch.seq_lens == batch.sequence_lengths
    assert sum(batch.sequence_lengths) == length
    assert batch.trace_ids is not None
    assert batch.branch_indices is not None
    labels = np.roll(batch.input_ids, -1)  # of the last token nothing is read
    masks = np.roll(masks_of(batch), -1, axis=0)
    mask_logprobs = iter(mask_logprobs_of(batch))
    samples, start = {}, 0
    for name, index, size in zip(batch.trace_ids, batch.branch_indices, batch.sequence_lengths, strict=True):
        trained = start + np.flatnonzero(batch.loss_mask[start : start + size])
        assert trained[0] > start  # the first token has no logits of its own sample
        assert batch.position_ids[start : start + size] == list(range(size))
        rows = [masks[place - 1][masks[place - 1] >= 0].tolist() for place in trained]
        samples[name, index] = {
            "prompt_token_ids": batch.input_ids[start : trained[0]],
            "token_ids": labels[trained - 1].tolist(),
            "logprobs": [batch.inference_logprobs[place] for place in trained],
            "sampling_mask": [row or None for row in rows],
            "support_logprobs": [[next(mask_logprobs) for _ in row] or None for row in rows],
            "temperature": {batch.temperatures[place - 1] for place in trained},
            "advantage": {batch.advantages[place] for place in trained},
            "weight": {1.0 if batch.rl_weights is None else batch.rl_weights[place] for place in trained},
        }
        start += size
    return samples


def mask_logprobs_of(batch: MicroBatch) -> list[float | None]:
    mask = batch.sampling_mask
    if mask is None:
        return []
    if mask.logprobs is None:
        return [None] * (len(mask.ids) // 4)
    return np.frombuffer(mask.logprobs, np.float32).tolist()


@pytest.mark.parametrize(
    ("features", "ranks"),
    [
        pytest.param({}, 1, id="one rank"),
        pytest.param({}, 3, id="three ranks"),
        pytest.param({"support_logprobs": True}, 1, id="support_logprobs"),
        pytest.param({"temperatures": (0.75, 1.0, 1.3), "untruncated": (2, 5)}, 2, id="mixed sampling"),
        pytest.param({"untruncated": tuple(range(6))}, 1, id="nothing truncated"),
        pytest.param({"extras": True}, 1, id="weights and experts"),
    ],
)
def test_every_token(
    features: dict[str, Any], ranks: int, write_odd: Callable[..., Path], current: Rows, tmp_path: Path
) -> None:
    """Ids, log-probabilities, masks, temperatures and advantages are those of the dataset, bit by bit."""
    rows = current(directory := write_odd(**features))
    rollgen.export(
        directory, "prime-rl", tmp_path / "out", reward="correct", prompts_per_step=4, ranks=ranks, seq_len=40
    )
    steps = read(tmp_path / "out", ranks)
    assert len(steps) == 2  # four prompts, and two
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for batch in (batch for step in steps for rank in step for batch in rank if batch.trace_ids):
        assert len(batch.input_ids) <= 40
        assert set(batch.env_names) == {"offline"}
        samples = samples_of(batch)
        assert not found.keys() & samples.keys()
        found |= samples
    assert found.keys() == rows.keys()
    for key, sample in found.items():
        row = rows[key]
        for name in ("prompt_token_ids", "token_ids", "logprobs", "sampling_mask"):
            assert sample[name] == row[name], (key, name)
        if "support_logprobs" in row:
            assert sample["support_logprobs"] == row["support_logprobs"]
        assert sample["temperature"] == {row["temperature"]}
        assert sample["advantage"] == {float(np.float32(row["advantage"]))}
        assert sample["weight"] == {float(row["advantage"] != 0)}


def test_prompts_of_a_step_stay_together(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """A step is a batch of the optimizer: prompts p0 to p3, then p4 and p5."""
    rollgen.export(write_odd(), "prime-rl", tmp_path / "out", reward="correct", prompts_per_step=4)
    steps = [
        {name for rank in step for batch in rank for name in batch.trace_ids or ()} for step in read(tmp_path / "out")
    ]
    assert steps == [{"p0", "p1", "p2", "p3"}, {"p4", "p5"}]


def test_prompts_of_merged_runs_are_told_apart(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Both runs have p0 to p5: traces and branches are unique together, and no run is lost."""
    directories = [make_run(tmp_path / name, number) for number, name in enumerate(("base", "step-1"))]
    for directory in directories:
        write_rewards(directory, "correct", lambda row: float(row["sample_index"]))
    rollgen.merge(directories, tmp_path / "merged")
    exported = rollgen.export(tmp_path / "merged", "prime-rl", tmp_path / "out", reward="correct")
    batches = [batch for step in read(tmp_path / "out") for rank in step for batch in rank]
    keys = [key for batch in batches for key in zip(batch.trace_ids or (), batch.branch_indices or (), strict=True)]
    assert len(set(keys)) == len(keys) == exported.samples == 24
    assert ("step-1/p0", 1) in keys
    assert "run" not in exported.lost


def test_steps_that_train_nothing_are_told(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """All samples of p4 have the same reward."""
    told = rollgen.export(write_odd(), "prime-rl", tmp_path / "out", reward="correct", prompts_per_step=1).advice
    assert any(line.startswith("prime-rl: in 1 of 6 steps all advantages are 0") for line in told)


def test_ranks_without_work_train_nothing(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """All ranks have equally many micro batches; copies have no loss, no masks and no identity."""
    directory = write_odd()
    rollgen.export(directory, "prime-rl", tmp_path / "out", reward="correct", prompts_per_step=1, ranks=5)
    for step in read(tmp_path / "out", ranks=5):
        assert {len(rank) for rank in step} == {1}
        batches = [batch for rank in step for batch in rank]
        copies = [batch for batch in batches if batch.trace_ids is None]
        assert len(copies) == 1  # four samples, each a micro batch, for five ranks
        assert not any(copies[0].loss_mask)
        assert copies[0].sampling_mask is copies[0].rl_weights is copies[0].branch_indices is None
        assert set(copies[0].advantages) == {0.0}
        assert copies[0].input_ids in [batch.input_ids for batch in batches if batch.trace_ids is not None]


def test_log_probabilities_of_the_trainer(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Its formula, z[label] - logsumexp(z[mask]) of logits over temperature, gives what `support_logprobs` gives."""
    directory = write_odd(temperatures=(0.75, 1.3), untruncated=(2,))
    rollgen.export(directory, "prime-rl", tmp_path / "out", reward="correct")
    ((batch,),) = read(tmp_path / "out")[0]
    logits = torch.randn(len(batch.input_ids), 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scaled = logits / torch.tensor(batch.temperatures, dtype=torch.float64)[:, None]
    labels = torch.tensor(batch.input_ids).roll(-1)
    masks = torch.from_numpy(masks_of(batch)).roll(-1, 0).long()
    kept = scaled.gather(1, masks.clamp(min=0)).masked_fill(masks < 0, -torch.inf)
    normaliser = torch.where((masks >= 0).any(1), kept.logsumexp(1), scaled.logsumexp(1))
    theirs = (scaled.gather(1, labels[:, None])[:, 0] - normaliser).roll(1)

    dataset = rollgen.RolloutDataset(directory)
    by_key = {(rollout.prompt_id, rollout.sample_index): rollout for rollout in dataset}
    assert batch.trace_ids is not None
    assert batch.branch_indices is not None
    keys = zip(batch.trace_ids, batch.branch_indices, strict=True)
    packed = rollgen.collate([by_key[key] for key in keys], layout="packed")
    ours = packed.support_logprobs(logits[None])[0]
    trained = packed.response_mask[0]
    assert trained.tolist() == batch.loss_mask
    torch.testing.assert_close(ours[trained], theirs[trained].to(ours.dtype), rtol=1e-5, atol=1e-5)


def test_experts(write_odd: Callable[..., Path], current: Rows, tmp_path: Path) -> None:
    """Those of each token; of the last one of a sample, which never went through the model, zeros."""
    rows = current(directory := write_odd(extras=True))
    rollgen.export(directory, "prime-rl", tmp_path / "out", reward="correct", routed_experts=True)
    ((batch,),) = read(tmp_path / "out")[0]
    experts = batch.routed_experts
    assert experts is not None
    assert (experts.dtype, experts.shape) == ("uint8", [len(batch.input_ids), 3, 2])
    numbers = np.frombuffer(experts.data, np.uint8).reshape(experts.shape)
    assert batch.trace_ids is not None
    assert batch.branch_indices is not None
    start = 0
    for name, index, size in zip(batch.trace_ids, batch.branch_indices, batch.sequence_lengths, strict=True):
        assert numbers[start : start + size - 1].ravel().tolist() == rows[name, index]["routed_experts"]
        assert not numbers[start + size - 1].any()
        start += size


def test_what_is_lost(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Every column without a place is counted; those that say nothing are not."""
    exported = rollgen.export(write_odd(extras=True), "prime-rl", tmp_path / "out", reward="correct")
    everywhere = (
        "finish_reason",
        "max_tokens",
        "metadata",
        "prompt",
        "prompt_index",
        "routed_experts",
        "seed",
    )
    sampling = ("text", "top_k", "top_p", "weight_versions")
    assert exported.lost == dict.fromkeys((*everywhere, *sampling), 24) | {"generation": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"seq_len": 16},
            r"^--option seq_len: the longest sample has 17 tokens; set seq_len to 17, or more$",
            id="too long",
        ),
        pytest.param({"env_name": "all"}, r"^--option env_name: .*'all' is what prime-rl calls", id="reserved"),
        pytest.param({"ranks": 0}, r"^--option ranks: Input should be greater than or equal to 1", id="no rank"),
        pytest.param({"seqlen": 8}, r"^--option seqlen: not an option of prime-rl; it has routed_experts, ", id="typo"),
    ],
)
def test_refused(options: dict[str, Any], message: str, write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """What the trainer would cut, mix up or never read; nothing is left then."""
    with pytest.raises(UsageError, match=message):
        rollgen.export(write_odd(), "prime-rl", tmp_path / "out", reward="correct", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"dataset"}


def test_needs_a_reward(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Its trainer knows advantages alone."""
    with pytest.raises(
        UsageError, match=r"^prime-rl trains on rewards: name a stored one with --reward; `rollgen score`"
    ):
        rollgen.export(write_odd(), "prime-rl", tmp_path / "out")


def test_wide_supports_are_told(
    write_odd: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer pads a micro batch to the widest: here of more than ten ids."""
    monkeypatch.setattr("rollgen.exporters.prime_rl.TOP_K_BOUND", 10)
    exported = rollgen.export(write_odd(), "prime-rl", tmp_path / "out", reward="correct")
    assert exported.advice[-1].startswith("prime-rl: a support has 12 ids, and the trainer pads all of a micro batch")


def test_padding_for_context_parallelism(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """As prime-rl pads: a length that 8 GPUs share, tokens that train nothing and belong to the last sample."""
    directory = write_odd(extras=True)
    options = {"reward": "correct", "seq_len": 30, "routed_experts": True}
    rollgen.export(directory, "prime-rl", tmp_path / "plain", **options | {"seq_len": 24})
    rollgen.export(directory, "prime-rl", tmp_path / "out", **options, context_parallel=8)
    plain, shared = (
        [batch for rank in step for batch in rank] for step in (read(tmp_path / "plain")[0], read(tmp_path / "out")[0])
    )
    assert len(plain) == len(shared) > 1
    tails = {"input_ids": 1, "loss_mask": False, "advantages": 0, "inference_logprobs": 0, "temperatures": 1}
    for before, after in zip(plain, shared, strict=True):
        length = len(before.input_ids)
        padding = -length % 8
        assert len(after.input_ids) == length + padding <= 24
        for name, fill in (tails | {"env_names": ""}).items():
            assert getattr(after, name) == getattr(before, name) + [fill] * padding
        assert after.position_ids == before.position_ids + list(range(padding))
        lengths = before.sequence_lengths
        assert after.seq_lens == after.sequence_lengths == [*lengths[:-1], lengths[-1] + padding]
        assert (after.trace_ids, after.branch_indices) == (before.trace_ids, before.branch_indices)
        assert masks_of(after).tolist() == masks_of(before).tolist() + [[-1] * masks_of(before).shape[1]] * padding
        assert before.routed_experts is not None
        assert after.routed_experts is not None
        assert after.routed_experts.data == before.routed_experts.data + bytes(6 * padding)  # 3 layers, 2 experts
        assert after.routed_experts.shape == [length + padding, 3, 2]


def test_padding_needs_room(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """18 tokens hold one of 17, but not one that is padded to 24."""
    with pytest.raises(UsageError, match=r"^--option seq_len: .* 17 tokens; set seq_len to 24, or more$"):
        rollgen.export(write_odd(), "prime-rl", tmp_path / "out", reward="correct", seq_len=18, context_parallel=8)
