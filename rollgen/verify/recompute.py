"""log pi of the sampled tokens once more, by another implementation: does the dataset replay?

A Hugging Face model runs over stored sequences, in the dtype that sampled, and gives log pi_theta of every sampled
token as a trainer would see it: normalised over the stored supports, and beside it over the full vocabulary, as without
masks. With the checkpoint that sampled pi_theta is pi_old, so each importance ratio pi_theta / pi_old has to be 1, but
for rounding, with masks. Another checkpoint is named as such: then the ratios measure how far the policy has moved.
Below float32 the same weights also run in float32: the distance between the two passes is the noise of that dtype
(`recomputation.py` has the figures and the verdict).

No log-probability tells whether a support is right, so each is held against the model's own logits (`truncation.py`),
unless arguments of the run took further ids out. Whether the tokens were sampled at the temperature that is stored
shows in the sign of their *score*, d log pi_theta / d log(1/T) = log pi_theta(a) + H(pi_theta): under pi_theta its mean
is 0, and its variance that of log pi_theta. Both are judged by the float32 pass where there is one: it has the least
noise.

    KL(pi_old || pi_theta) = sum over the support of pi_old (log pi_old - log pi_theta)   with stored support_logprobs
                           ~ ratio - 1 - delta, at the sampled token   else: "k3" of Schulman, "Approximating KL
                                                                       Divergence" (2020)

Memory is bounded in the number of samples and in their length: weights (with the float32 ones 6 bytes a parameter for
bfloat16), LOGITS_BYTES of logits, and the keys and values of one sequence. All sums are float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollgen.engines.replay import excluding_args
from rollgen.errors import DatasetError, EngineError, UsageError
from rollgen.format.manifest import Manifest
from rollgen.format.reader import StoredShard, read_columns
from rollgen.loader import Rollout, RolloutBatch, RolloutDataset, collate
from rollgen.ops import support_logprobs
from rollgen.ops.dense import block_elements, spans
from rollgen.prompts.fingerprint import directory_fingerprint
from rollgen.prompts.model import quiet_transformers, resolve_commit, usage_errors
from rollgen.verify.merged import sampled_by
from rollgen.verify.recomputation import Recomputation, describe
from rollgen.verify.tallies import DriftTally, GapTally, ScoreTally
from rollgen.verify.truncation import Sampler, Truncation

if TYPE_CHECKING:
    from rollgen.loader.index import Index
    from rollgen.rollouts import Int64Array

__all__ = ["Recomputation", "describe", "recompute"]

LOGITS_BYTES: Final = 1 << 29
"""Of the logits of one forward pass, counted as float32."""
MAX_TOKENS: Final = 4096
"""In one forward pass, padding included: activations count too where the vocabulary is small."""
_WINDOW: Final = 64
"""Samples that are sorted by length, against padding."""
_FLAG: Final = "--recompute"
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def recompute(directory: Path, model: str, *, limit: int | None = 64, device: str | None = None) -> Recomputation:
    """Compare stored log-probabilities with those of `model`, a local directory or a Hugging Face id.

    Of `limit` samples, spread evenly over the current rows that can be replayed; None for all. Of a merged dataset only
    those of the runs that this model sampled. `device` as torch names it; default: CUDA where there is one, else the
    CPU. Raises UsageError for a device that is not there, a model that cannot be had, read or held in memory, or has
    fewer ids than the dataset, and for a dataset without such rows; DatasetError for a damaged one.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit: must be 1 sample or more, or None for all, not {limit}")
    if model.startswith("~"):
        model = str(Path(model).expanduser())
    dataset = RolloutDataset(directory, allow_unreplayable=True)
    manifest, runs = sampled_by(dataset.manifest, model, flag=_FLAG)
    numbers, comparable = _replayable(dataset.index, runs)
    if not len(numbers):
        raise UsageError(f"{directory}: no sample to recompute: it has {comparable}, and none can be replayed")
    count = len(numbers) if limit is None else min(limit, len(numbers))
    chosen = numbers[np.arange(count) * len(numbers) // count]
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(where)
    with quiet_transformers(), torch.no_grad(), _in_memory(where):
        policy = _load(model, manifest, where)
        comparison = _Comparison(policy.model, manifest)
        for batch, truncation in _batches(_checked(directory, dataset, chosen), comparison.at_once):
            comparison.add(batch.to(where), truncation)
    found = comparison.result(
        policy, samples=count, replayable=len(numbers), unreplayable=comparable - len(numbers), device=where
    )
    return replace(found, runs=runs, of_other_runs=len(dataset) - comparable)


def _check_device(device: str) -> None:
    """Raise UsageError for one that torch does not know, or cannot use here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # what torch raises depends on its build
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--device: {device!r} cannot be used here ({reason}); give another, like cpu") from None


def _replayable(index: Index, runs: Sequence[str]) -> tuple[Int64Array, int]:
    """int64, rising: the numbers of the samples that can be replayed; and of how many. Of these runs, if there are."""
    flags = [np.zeros((0, 2), np.bool_), *(_flags(stored, runs) for stored in index.shards)]
    comparable, replayable = np.concatenate(flags)[index.rows].T
    return np.flatnonzero(replayable), int(comparable.sum())


def _flags(stored: StoredShard, runs: Sequence[str]) -> npt.NDArray[np.bool_]:
    """bool [N, 2]: whether each row is of these runs, if there are, and can be replayed besides."""
    with stored.open() as shard:
        table = read_columns(shard, ["replayable", "run"] if runs else ["replayable"])
    comparable = pc.is_in(table["run"], pa.array(runs)).to_numpy() if runs else np.ones(len(table), np.bool_)
    return np.stack([comparable, comparable & table["replayable"].to_numpy()], axis=1)


def _checked(directory: Path, dataset: RolloutDataset, numbers: Int64Array) -> Iterator[Rollout]:
    """These samples. Raises DatasetError for an id that the model would look up outside its vocabulary."""
    for number in numbers.tolist():
        rollout = dataset[number]
        ids = torch.cat([rollout.prompt_ids, rollout.token_ids])
        if ids.min() < 0 or ids.max() >= dataset.vocab_size:
            raise DatasetError(
                f"{directory}: {rollout.prompt_id!r}, sample {rollout.sample_index}: a token id is outside the model's "
                f"vocabulary of {dataset.vocab_size}; run `rollgen verify` to see where, then `rollgen repair`"
            )
        yield rollout


def _batches(rollouts: Iterator[Rollout], at_once: int) -> Iterator[tuple[RolloutBatch, Truncation]]:
    """Samples of like length, up to `at_once` tokens with padding; a sample that is longer than that alone.

    With how each rollout was truncated.
    """
    while window := sorted(islice(rollouts, _WINDOW), key=_length):
        held: list[Rollout] = []
        for rollout in window:
            if held and (len(held) + 1) * _length(rollout) > at_once:
                yield collate(held), Truncation.of(held)
                held = []
            held.append(rollout)
        yield collate(held), Truncation.of(held)


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.token_ids)


class _Policy(NamedTuple):
    """A model in evaluation mode, and what the report says about it."""

    model: PreTrainedModel
    name: str
    same_checkpoint: bool
    dtype: str


def _load(model: str, manifest: Manifest, device: str) -> _Policy:
    """`model` in the dtype of the dataset; by the name in the manifest, at the commit in the manifest."""
    dtype = _DTYPES.get(manifest.model.dtype)
    if dtype is None:
        raise UsageError(
            f"{_FLAG}: samples of dtype {manifest.model.dtype!r} cannot be recomputed, only of {', '.join(_DTYPES)}"
        )
    commit = resolve_commit(model, manifest.model.revision if model == manifest.model.name else None, flag=_FLAG)
    fingerprint = commit or directory_fingerprint(Path(model))
    with usage_errors(model, "the model's config", check=_FLAG):
        config = AutoConfig.from_pretrained(model, revision=commit, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(f"{model}: quantised weights are computed in another way here; give {_FLAG} the original ones")
    width = config.get_text_config().vocab_size
    if width < manifest.vocab_size:
        raise UsageError(
            f"{model}: a vocabulary of {width} ids, the dataset has {manifest.vocab_size}; give {_FLAG} the model that "
            f"sampled, {manifest.model.name!r}, or one trained from it"
        )
    return _Policy(
        _load_weights(model, commit, dtype).to(device),
        name=model if commit else Path(model).resolve().name,
        same_checkpoint=fingerprint == manifest.model.fingerprint,
        dtype=manifest.model.dtype,
    )


def _load_weights(model: str, commit: str | None, dtype: torch.dtype) -> PreTrainedModel:
    """Every weight as stored. transformers would fill in those it does not find with random numbers, and go on."""
    with usage_errors(model, "the model", check=_FLAG):
        loaded, report = AutoModelForCausalLM.from_pretrained(
            model,
            revision=commit,
            dtype=dtype,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        if absent := sorted(report["missing_keys"]) + sorted(name for name, *_ in report["mismatched_keys"]):
            raise ValueError(f"{len(absent)} weights are missing or of another shape, the first of them {absent[0]}")
    policy: PreTrainedModel = loaded.eval()
    return policy


@contextmanager
def _in_memory(device: str) -> Iterator[None]:
    """Turn running out of a device's memory into one line. Raises EngineError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise  # the CPU's allocator has no class of its own
        fix = "free some" if device == "cpu" else "free some, or give --device cpu"
        raise EngineError(f"{_FLAG}: the model does not fit into the memory of {device}: {fix}") from None


class _Comparison:
    """Runs a model over batches and sums up how far it is from what they hold."""

    def __init__(self, model: PreTrainedModel, manifest: Manifest) -> None:
        self._model = model
        dtype = _DTYPES[manifest.model.dtype]
        self._twin: PreTrainedModel | None = None if dtype == torch.float32 else copy.deepcopy(model).float()
        arguments = manifest.identity.get("sampling_arg")
        self._excluding = excluding_args(arguments) if isinstance(arguments, dict) else []
        self._sampler = None if self._excluding else Sampler.of(manifest, dtype)
        self._masked, self._full, self._noise = DriftTally(), DriftTally(), DriftTally()
        self._gaps, self._scores = GapTally(), ScoreTally()
        self._kl, self._exact_tokens = 0.0, 0
        self._lowest_temperature = math.inf
        self._eps, self._largest_logit = torch.finfo(dtype).eps, 0.0

    @property
    def at_once(self) -> int:
        """Tokens of one forward pass."""
        width: int = self._model.config.get_text_config().vocab_size
        return max(1, min(MAX_TOKENS, LOGITS_BYTES // (4 * width)))

    def add(self, batch: RolloutBatch, truncation: Truncation) -> None:
        """A batch on the model's device, and how its rollouts were truncated."""
        task = _Task.of(batch, truncation, self._sampler)
        exact = scores = _score(self._model, task, self.at_once)
        if self._twin is not None:
            exact = _score(self._twin, task, self.at_once)
            self._noise.add(scores.masked - exact.masked)
        old = batch.logprobs.flatten()[batch.response_places].double()
        delta = scores.masked - old
        self._masked.add(delta)
        self._full.add(scores.full - old)
        self._add_kl(batch, delta, scores.listed)
        self._gaps.add(exact.gaps, scores.gaps)
        self._scores.add(exact.surplus, exact.variance, exact.masked - old)
        self._lowest_temperature = min(self._lowest_temperature, float(batch.temperature.min()))
        self._largest_logit = max(self._largest_logit, float(scores.sampled.abs().max()))

    def _add_kl(self, batch: RolloutBatch, delta: Tensor, listed: Tensor) -> None:
        stored = batch.stored_support_logprobs
        estimated = torch.expm1(delta) - delta
        if stored is not None:
            old = stored.double()
            self._kl += float((old.exp() * (old - listed)).sum())
            is_full = batch.support.lengths == 0
            self._exact_tokens += int((~is_full).sum())
            estimated = estimated[is_full]
        self._kl += float(estimated.sum())

    def result(
        self, policy: _Policy, *, samples: int, replayable: int, unreplayable: int, device: str
    ) -> Recomputation:
        """After the last batch."""
        tokens, step = self._masked.tokens, self._eps * self._largest_logit
        return Recomputation(
            model=policy.name,
            same_checkpoint=policy.same_checkpoint,
            dtype=policy.dtype,
            device=device,
            samples=samples,
            replayable=replayable,
            unreplayable=unreplayable,
            tokens=tokens,
            step=step,
            lowest_temperature=self._lowest_temperature,
            with_masks=self._masked.drift(),
            without_masks=self._full.drift(),
            kl=self._kl / tokens,
            kl_estimator="exact" if self._exact_tokens == tokens else "mixed" if self._exact_tokens else "k3",
            noise_floor=None if self._twin is None else self._noise.drift(),
            temperature=self._scores.result(),
            supports=self._gaps.result(step, is_noisy=self._twin is not None),
            not_judged=f"--sampling-arg {self._excluding[0]} may have taken ids out too" if self._excluding else None,
        )


class _Task(NamedTuple):
    """N tokens to score, on the model's device."""

    batch: RolloutBatch
    places: Tensor
    """int64 [N], whose logits predict them."""
    targets: Tensor
    """int64 [N]"""
    temperature: Tensor
    """float32 [N]"""
    truncation: Truncation
    """Of N tokens."""
    sampler: Sampler | None

    @classmethod
    def of(cls, batch: RolloutBatch, truncation: Truncation, sampler: Sampler | None) -> _Task:
        return cls(
            batch,
            batch.response_places - 1,
            batch.response_ids(),
            batch.response_temperature(),
            truncation.at(batch.response_rollouts),
            sampler,
        )


class _Scores(NamedTuple):
    """What a model says of N tokens, at the temperature of each. Log-probabilities and scores are float64."""

    masked: Tensor
    """[N], log pi of the sampled tokens, over their supports."""
    full: Tensor
    """[N], the same over the vocabulary."""
    listed: Tensor
    """[nnz], log pi of every id of the supports, over these."""
    surplus: Tensor
    """[N], the score: log pi of the sampled token above its mean."""
    variance: Tensor
    """[N], of log pi."""
    gaps: Tensor
    """float32 [L], of the L supports that are not full; [0] if they are not judged."""
    sampled: Tensor
    """float32 [N], raw logits."""


def _score(model: PreTrainedModel, task: _Task, at_once: int) -> _Scores:
    """Of a task on the model's device."""
    parts = []
    for start, logits in _forward(model, task.batch, at_once):
        edges = torch.tensor([start, start + len(logits)], device=task.places.device)
        tokens = slice(*torch.searchsorted(task.places, edges).tolist())
        parts.append(_score_rows(logits, task, tokens, task.places[tokens] - start))
    return _Scores(*(torch.cat(same) for same in zip(*parts, strict=True)))


def _score_rows(logits: Tensor, task: _Task, tokens: slice, rows: Tensor) -> _Scores:
    """Of the tokens whose raw logits are `rows` of `logits` [M, V]."""
    support, targets, temperature = task.batch.support[tokens], task.targets[tokens], task.temperature[tokens]
    found = support_logprobs(logits, support, targets, temperature, rows=rows, entropy=True, kept_mass=True)
    assert found.log_kept_mass is not None
    assert found.entropy is not None
    masked, entropy = found.logprobs.double(), found.entropy.double()
    # Any two ids of a support: log pi_v - log pi_a = (z_v - z_a) / T.
    token, sampled = support.rows(), logits[rows, targets]
    ahead = logits[rows[token], support.ids.long()].double() - sampled.double()[token]
    listed = masked[token] + ahead / temperature[token]
    variance = torch.zeros_like(masked).index_add_(0, token, listed.exp() * (listed + entropy[token]).square())
    is_full = support.lengths == 0
    if support.has_full_rows:
        full = is_full.nonzero().squeeze(1)
        variance[full] = _variance(logits[:, : support.vocab_size], rows[full], temperature[full])
    gaps = logits.new_empty(0, dtype=torch.float32)
    if task.sampler is not None:
        listed_rows = (~is_full).nonzero().squeeze(1)
        part = support[listed_rows] if support.has_full_rows else support
        cuts = task.truncation.at(tokens).at(listed_rows)
        gaps = task.sampler.gaps(logits, part, cuts, temperature[listed_rows], rows[listed_rows])
    return _Scores(
        masked=masked,
        full=masked + found.log_kept_mass.double(),
        listed=listed,
        surplus=masked + entropy,
        variance=variance,
        gaps=gaps,
        sampled=sampled.float(),
    )


def _variance(logits: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
    """float64 [N], of log pi over the vocabulary."""
    found = torch.empty(len(rows), dtype=torch.float64, device=logits.device)
    for part in spans(len(rows), block_elements(logits.device) // logits.shape[1]):
        logprobs = (logits[rows[part]].float() / temperature[part].unsqueeze(1)).log_softmax(1)
        chances = logprobs.exp()
        logprobs.masked_fill_(chances == 0, 0)
        mean = (chances * logprobs).sum(1, keepdim=True)
        found[part] = (chances * (logprobs - mean).square()).sum(1).double()
    return found


def _forward(model: PreTrainedModel, batch: RolloutBatch, at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Raw logits [M, V] of consecutive places of `input_ids`, flattened, and the first of these places.

    A single sequence of more than `at_once` tokens goes through in parts, which see the ones before as keys and values.
    Padding is on the right, where causal attention never looks: no mask is needed for it.
    """
    sequences, length = batch.input_ids.shape
    if sequences * length <= at_once:
        yield 0, model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
        return
    assert sequences == 1
    past = None
    for start in range(0, length, at_once):
        part = batch.input_ids[:, start : start + at_once]
        output = model(input_ids=part, past_key_values=past, use_cache=True)
        past = output.past_key_values
        yield start, output.logits[0]
