"""prime-rl: the micro batches that its trainer reads from the filesystem batch transport, advantages and masks inside.

Follows `main` of PrimeIntellect-ai/prime-rl from September 2026 on, after sampling-mask replay (#3431) and the engine's
log-probabilities of the masks: `src/prime_rl/transports/batch/{types,filesystem}.py`, `trainer/batch.py`
(`prepare_batch`), `trainer/rl/{data,train,loss}.py`. Fields stand where commit 0f59b241 has them; that one passes over
the log-probabilities of masks, a mask's last item, and knows one field more, at the end, that may be left out. v0.9.0
and what came before it know no masks: they refuse these files, because position 16 of a micro batch was something else.

    batches/step_<N>/rank_<r>.bin    N from 1, a step of the optimizer; r from 0, a data rank

A file is the MessagePack array of a rank's micro batches, each the array of the 19 fields of `MicroBatch`. Samples are
packed as `prepare_batch` does it, prompt and response of each one after the other, and every list has one entry a
token, at that token's own place: the trainer shifts ids and masks itself. Temperatures stand at the place *before* the
token, because the trainer divides the logits there: the prompt of a sample has the sample's. A mask of no ids means the
full vocabulary. A rank without a micro batch gets a copy of the smallest, of which nothing is trained.

As in prime-rl's orchestrator, tokens of advantage 0 have weight 0: they train nothing, and do not count in the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator
from torch import Tensor

from rollgen.errors import UsageError
from rollgen.exporters import msgpack
from rollgen.exporters.exporter import MAX_RANKS, Count, ExpertsExporter
from rollgen.exporters.packing import pack
from rollgen.exporters.records import Block, Records, take
from rollgen.loader.batch import RolloutBatch, assemble

TOP_K_BOUND: Final = 512
"""prime-rl's own sampling keeps supports below it (`TRAIN_TOP_K_BOUND`): its trainer pads masks to the widest one."""


class PrimeRL(ExpertsExporter):
    """A directory that is the trainer's `output_dir`."""

    follows: ClassVar[str] = "main, September 2026 (#3431; fields as in 0f59b241)"
    needs_reward: ClassVar[bool] = True

    prompts_per_step: Count = Field(64, description="Prompts, with all their samples, of an optimizer step.")
    ranks: Count = Field(1, le=MAX_RANKS, description="Data ranks: the trainer's GPUs, divided by context_parallel.")
    seq_len: Count = Field(8192, description="The trainer's model.seq_len: most tokens of a micro batch.")
    context_parallel: Count = Field(
        1, le=MAX_RANKS, description="GPUs that share a sequence: lengths are padded to a multiple."
    )
    env_name: str = Field("offline", min_length=1, description="Environment under which metrics are logged.")

    @field_validator("env_name")
    @classmethod
    def _not_reserved(cls, name: str) -> str:
        if name == "all":
            raise ValueError("'all' is what prime-rl calls the sum over environments")
        return name

    @property
    def places(self) -> Mapping[str, str]:
        places = {
            "prompt_token_ids": "input_ids",
            "token_ids": "input_ids, loss_mask",
            "logprobs": "inference_logprobs",
            "sampling_mask": "sampling_mask.ids, sampling_mask.counts",
            "support_logprobs": "sampling_mask.logprobs",
            "temperature": "temperatures",
            "advantage": "advantages, rl_weights",
            "reward": "advantages, which are made of it",
            "prompt_id": "trace_ids",
            "run": "trace_ids",
            "sample_index": "branch_indices",
        }
        return places | ({"routed_experts": "routed_experts"} if self.routed_experts else {})

    @property
    def _capacity(self) -> int:
        """Tokens of a micro batch that leave room for its padding."""
        return self.seq_len - self.seq_len % self.context_parallel

    def write(self, records: Records, directory: Path) -> Sequence[str]:
        longest = int(records.lengths.max())
        if longest > self._capacity:
            needed = longest + -longest % self.context_parallel
            raise UsageError(
                f"--option seq_len: the longest sample has {longest} tokens; set seq_len to {needed}, or more"
            )
        steps = widest = idle = 0
        for steps, block in enumerate(records.blocks(self.prompts_per_step), 1):
            self._write_step(block, directory / "batches" / f"step_{steps}")
            widest = max(widest, int(block.samples.mask_lengths.max()))
            assert block.advantage is not None  # `needs_reward`
            idle += not block.advantage.astype(np.float32).any()
        return self._advice(steps, widest, idle)

    def _write_step(self, block: Block, directory: Path) -> None:
        """One file a rank, all with equally many micro batches."""
        directory.mkdir(parents=True)
        lengths = np.diff(block.samples.prompt_ids.offsets) + np.diff(block.samples.token_ids.offsets)
        bins = pack(lengths.tolist(), self._capacity, self.ranks)
        count = -(-len(bins) // self.ranks)
        for rank in range(self.ranks):
            own = bins[rank :: self.ranks]
            with (directory / f"rank_{rank}.bin").open("wb") as file:
                file.write(msgpack.array_header(count))
                for rows in own:
                    file.write(self._micro_batch(block, rows))
                if len(own) < count:
                    file.write(self._micro_batch(block, bins[-1], trained=False))

    def _micro_batch(self, block: Block, rows: Sequence[int], *, trained: bool = True) -> bytes:
        """Samples of a block as an encoded `MicroBatch`; of one that is not `trained`, all ranks do the same work."""
        batch = assemble(take(block.samples, rows), layout="packed")
        lengths = np.diff(batch.cu_seqlens.numpy())
        tokens, multiple = int(lengths.sum()), self.context_parallel
        padding = -tokens % multiple
        padded = lengths + padding * (np.arange(len(lengths)) == len(lengths) - 1)
        sampled = _flat(batch.response_mask) if trained else np.zeros(tokens, np.bool_)
        assert block.advantage is not None  # `needs_reward`
        advantage = np.where(sampled, np.repeat(block.advantage[rows], lengths), 0).astype(np.float32)
        weights = (advantage != 0).astype(np.float32)
        temperatures = np.repeat(batch.temperature.numpy(), lengths)
        fields = {
            "input_ids": msgpack.integers(_padded(_flat(batch.input_ids), multiple, 1)),
            "loss_mask": msgpack.booleans(_padded(sampled, multiple)),
            "advantages": msgpack.floats(_padded(advantage, multiple)),
            "inference_logprobs": msgpack.floats(_padded(_flat(batch.logprobs), multiple)),
            "position_ids": msgpack.integers(np.append(_flat(batch.position_ids), np.arange(padding))),
            "sequence_lengths": msgpack.integers(padded),
            "temperatures": msgpack.floats(_padded(temperatures, multiple, 1)),
            "env_names": msgpack.repeated([(msgpack.text(self.env_name), tokens), (msgpack.text(""), padding)]),
            "seq_lens": msgpack.integers(padded),
            "ref_logprobs": msgpack.NIL,
            "routed_experts": _experts(batch, multiple),
            "mm_refs": msgpack.NIL,
            "mm_token_type_ids": msgpack.NIL,
            "rl_weights": msgpack.NIL
            if np.array_equal(weights, sampled)
            else msgpack.floats(_padded(weights, multiple)),
            "ce_weights": msgpack.NIL,
            "ref_kl_weights": msgpack.NIL,
            "sampling_mask": _sampling_mask(batch, multiple) if trained else msgpack.NIL,
            "trace_ids": msgpack.array([msgpack.text(name) for name in _traces(batch)]) if trained else msgpack.NIL,
            "branch_indices": msgpack.integers(batch.sample_index.numpy()) if trained else msgpack.NIL,
        }
        return msgpack.array(list(fields.values()))

    def _advice(self, steps: int, widest: int, idle: int) -> list[str]:
        advice = [
            f"prime-rl: the trainer's output_dir is this directory; rollout_transport.type = filesystem, max_steps = "
            f"{steps}, model.seq_len >= {self.seq_len}, data ranks: {self.ranks}",
            "prime-rl: start the trainer alone; `rl` would delete batches/ first",
        ]
        if idle:
            advice.append(
                f"prime-rl: in {idle} of {steps} steps all advantages are 0, and nothing is trained: more "
                "prompts_per_step make such steps rarer"
            )
        if widest > TOP_K_BOUND:
            advice.append(
                f"prime-rl: a support has {widest:,} ids, and the trainer pads all of a micro batch to its widest one: "
                "a smaller seq_len makes micro batches smaller"
            )
        return advice


def _traces(batch: RolloutBatch) -> list[str]:
    """With `branch_indices` unique: runs of a merged dataset have prompts of the same id."""
    runs = [""] * len(batch) if batch.run is None else [f"{run}/" for run in batch.run]
    return [run + prompt_id for run, prompt_id in zip(runs, batch.prompt_id, strict=True)]


def _sampling_mask(batch: RolloutBatch, multiple: int) -> bytes:
    """An encoded `SamplingMask`, or nil when nothing was truncated; counts are of all tokens, 0 outside responses."""
    if not len(batch.support.ids):
        return msgpack.NIL
    counts = np.zeros(batch.input_ids.numel(), "<i4")
    counts[batch.response_places.numpy()] = batch.support.lengths.numpy()
    stored = batch.stored_support_logprobs
    return msgpack.array(
        [
            msgpack.binary(batch.support.ids.numpy().astype("<i4").tobytes()),
            msgpack.binary(_padded(counts, multiple).tobytes()),
            msgpack.NIL if stored is None else msgpack.binary(stored.numpy().astype("<f4").tobytes()),
        ]
    )


def _experts(batch: RolloutBatch, multiple: int) -> bytes:
    """An encoded `RoutedExperts`, or nil: of the last token of a sample, which never went through the model, zeros."""
    if batch.routed_experts is None:
        return msgpack.NIL
    experts = _padded(_flat(batch.routed_experts), multiple)
    narrow = experts.astype(np.uint8) if experts.max() < 256 else experts.astype("<i2")
    return msgpack.array(
        [
            msgpack.binary(narrow.tobytes()),
            msgpack.integers(np.array(narrow.shape)),
            msgpack.text(narrow.dtype.name),
        ]
    )


def _flat(values: Tensor) -> npt.NDArray[Any]:
    """The row of a packed batch."""
    return values[0].numpy()


def _padded(values: npt.NDArray[Any], multiple: int, fill: int = 0) -> npt.NDArray[Any]:
    """More rows at the end, up to a multiple."""
    rows = (0, -len(values) % multiple)
    return np.pad(values, [rows, *[(0, 0)] * (values.ndim - 1)], constant_values=fill)
