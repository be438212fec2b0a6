"""One stored completion: `read_sample(directory, "ID:K")`, found by its key and read from one row group."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from rollgen.errors import DatasetError, UsageError
from rollgen.format.ragged import nested_ragged, ragged
from rollgen.format.reader import open_dataset, read_row_group
from rollgen.format.schema import PLAN_FILE
from rollgen.inspect.decoding import Cell, Decoder, load_decoder
from rollgen.inspect.find import find_sample
from rollgen.prompts.plan import Plan
from rollgen.rollouts import Completion, Sampling, WeightVersions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt
    import pyarrow as pa

    from rollgen.format.reader import StoredShard

_SCALARS: Final = (
    "prompt_id sample_index generation prompt_index finish_reason stop_reason seed replayable text prompt metadata"
).split()
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "max_tokens")


class WeightSpan(NamedTuple):
    """Tokens start to end - 1 were sampled by weights that the engine called `version`."""

    version: str
    start: int
    end: int


class SupportId(NamedTuple):
    """One id of a support."""

    id: int
    text: str
    logprob: float | None
    """log pi_old of this id; None when the dataset does not store it."""
    sampled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A completion, where it is stored, and what decodes it."""

    completion: Completion
    n: int | None
    """Samples planned of its prompt; None without a plan."""
    samples: tuple[int, ...]
    """The stored ones of its prompt."""
    generations: tuple[int, ...]
    """The stored ones of this sample; the last one is current."""
    file: str
    row_group: int
    row: int
    vocab_size: int
    decoder: Decoder

    @property
    def cells(self) -> list[Cell]:
        """The response as text."""
        prompt = self.completion.prompt_token_ids.tolist()
        return self.decoder.cells(self.completion.token_ids.tolist(), prompt)

    @property
    def prompt_text(self) -> str:
        """What the model was shown; as given, without a tokenizer."""
        if self.decoder.has_tokenizer or self.completion.prompt is None:
            return self.decoder.text(self.completion.prompt_token_ids.tolist())
        return self.completion.prompt

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """float64 [T], of each sampled token inside its support."""
        return np.exp(self.completion.logprobs.astype(np.float64))

    @property
    def support_sizes(self) -> list[int | None]:
        """Ids in the support of each token; None where it was not truncated."""
        return [int(size) or None for size in np.diff(self.completion.mask_offsets)]

    @property
    def weights(self) -> list[WeightSpan] | None:
        """Which weights sampled which tokens; None when the dataset does not store that."""
        told = self.completion.weight_versions
        if told is None:
            return None
        ends = (*told.starts[1:], len(self.completion.token_ids))
        return [WeightSpan(*span) for span in zip(told.versions, told.starts, ends, strict=True)]

    @property
    def mean_support(self) -> float | None:
        """Ids, over the truncated tokens; None when there are none."""
        sizes = [size for size in self.support_sizes if size is not None]
        return sum(sizes) / len(sizes) if sizes else None

    def position(self, at: int) -> int:
        """Token `at` (negative: from the end) as a number from 0. Raises UsageError when there is no such token."""
        tokens = len(self.completion.token_ids)
        if not -tokens <= at < tokens:
            raise UsageError(
                f"--at {at}: the response has {tokens} tokens: 0 to {tokens - 1}, or {-tokens} to -1 from the end"
            )
        return at % tokens

    def support(self, position: int) -> list[SupportId] | None:
        """The support of a token, most likely ids first (ascending ids where no logprobs are stored, but for the
        sampled one, which leads); None for a token that was not truncated."""
        completion = self.completion
        start, stop = completion.mask_offsets[position : position + 2].tolist()
        if start == stop:
            return None
        sampled, logprob = int(completion.token_ids[position]), float(completion.logprobs[position])
        ids = completion.mask_ids[start:stop].tolist()
        stored = completion.support_logprobs
        logprobs: list[float | None] = [logprob if token_id == sampled else None for token_id in ids]
        if stored is not None:
            logprobs = [float(value) for value in stored[start:stop]]
        rows = [SupportId(i, self.decoder.name(i), p, i == sampled) for i, p in zip(ids, logprobs, strict=True)]
        return sorted(rows, key=lambda row: (-np.inf if row.logprob is None else row.logprob, -row.id), reverse=True)

    def to_json(self, at: int | None = None) -> dict[str, Any]:
        """JSON-able: the row, its tokens and, with `at`, the support of that token."""
        completion, cells = self.completion, self.cells
        shown = {
            **{name: getattr(completion, name) for name in _SCALARS},
            "run": completion.run,
            "n": self.n,
            "samples": self.samples,
            "generations": self.generations,
            "sampling": {name: getattr(completion.sampling, name) for name in _SAMPLING},
            "prompt_length": len(completion.prompt_token_ids),
            "response_length": len(completion.token_ids),
            "mean_logprob": float(completion.logprobs.mean(dtype=np.float64)),
            "min_probability": float(self.probabilities.min()),
            "mean_support": self.mean_support,
            "weight_versions": None if self.weights is None else [span._asdict() for span in self.weights],
            "prompt_token_ids": completion.prompt_token_ids.tolist(),
            "prompt_text": self.prompt_text,
            "tokens": self._tokens(),
            "cells": [asdict(cell) for cell in cells],
            "file": self.file,
            "row_group": self.row_group,
            "row": self.row,
        }
        return shown if at is None else shown | {"at": self._at(self.position(at))}

    def _tokens(self) -> list[dict[str, Any]]:
        completion = self.completion
        columns = zip(completion.token_ids.tolist(), completion.logprobs.tolist(), self.support_sizes, strict=True)
        return [
            {"id": token_id, "text": self.decoder.name(token_id), "logprob": logprob, "support_size": size}
            for token_id, logprob, size in columns
        ]

    def _at(self, position: int) -> dict[str, Any]:
        support = self.support(position)
        return {
            "token": position,
            "id": int(self.completion.token_ids[position]),
            "truncated": support is not None,
            "support": None if support is None else [row._asdict() for row in support],
        }


def read_sample(directory: Path, reference: str) -> Sample:
    """The sample that `reference` (`ID`, `ID:K` or `ID:K@G`; in a merged dataset with `RUN/` before it) names.

    Raises UsageError when it is not stored, DatasetError when something that has to be read is damaged.
    """
    dataset = open_dataset(directory)
    location, samples, generations = find_sample(dataset, reference)
    (completion,) = read_completions(location.shard, location.row_group, [location.row])
    return Sample(
        completion=completion,
        n=_planned(directory / PLAN_FILE, completion),
        samples=samples,
        generations=generations,
        file=location.shard.path.name,
        row_group=location.row_group,
        row=location.row,
        vocab_size=dataset.manifest.vocab_size,
        decoder=load_decoder(directory),
    )


def _planned(path: Path, completion: Completion) -> int | None:
    """Samples that the plan wants of the completion's prompt; None without a plan."""
    if not path.exists():
        return None
    plan, index = Plan(path), completion.prompt_index
    if not 0 <= index < plan.prompts or plan.prompt_ids(np.array([index]))[0].as_py() != completion.prompt_id:
        raise DatasetError(
            f"{path}: row {index} is not prompt {completion.prompt_id!r}, as a stored row says; "
            "`rollgen verify` says which of the two is wrong"
        )
    return int(plan.n[index])


def read_completions(shard: StoredShard, row_group: int, rows: Sequence[int]) -> list[Completion]:
    """Some rows of a row group, which is read once.

    Raises DatasetError for damage, and for a row of which nothing can be shown.
    """
    with shard.open() as reader:
        shown = [name for name in reader.schema.names if name != "routed_experts"]  # hundreds of numbers a token
        table = read_row_group(reader, row_group, shown)
    return [_completion(table.slice(row, 1), f"{shard.path}: row group {row_group}, row {row}") for row in rows]


def _completion(row: pa.Table, place: str) -> Completion:
    values: dict[str, Any] = {name: row[name][0].as_py() for name in (*_SCALARS, *_SAMPLING)}
    mask = nested_ragged(row["sampling_mask"])
    stored = "support_logprobs" in row.column_names
    completion = Completion(
        sampling=Sampling(**{name: values.pop(name) for name in _SAMPLING}),
        **values,
        prompt_token_ids=ragged(row["prompt_token_ids"]).values,
        token_ids=ragged(row["token_ids"]).values,
        logprobs=ragged(row["logprobs"]).values,
        mask_ids=mask.values,
        mask_offsets=mask.offsets,
        support_logprobs=nested_ragged(row["support_logprobs"]).values if stored else None,
        weight_versions=_versions(row) if "weight_versions" in row.column_names else None,
        run=row["run"][0].as_py() if "run" in row.column_names else None,
    )
    if problem := _problem(completion):
        raise DatasetError(f"{place}: {problem}; `rollgen verify` says what else is wrong")
    return completion


def _versions(row: pa.Table) -> WeightVersions:
    return WeightVersions(*(tuple(row[name][0].as_py()) for name in ("weight_versions", "weight_version_starts")))


def _problem(completion: Completion) -> str | None:
    """Why nothing can be shown of a row; None for one that can be, right or wrong."""
    tokens, stored, sampling = len(completion.token_ids), completion.support_logprobs, completion.sampling
    weights = completion.weight_versions
    if not tokens:
        return "has no tokens"
    if not tokens == len(completion.logprobs) == len(completion.mask_offsets) - 1:
        return "tokens, logprobs and masks differ in length"
    if stored is not None and len(stored) != len(completion.mask_ids):
        return "masks and their logprobs differ in length"
    logprobs = completion.logprobs if stored is None else np.append(completion.logprobs, stored)
    if not ((logprobs <= 0) & (logprobs > -np.inf)).all():  # NaN fails both
        return "a logprob is not a finite number <= 0"
    if weights is not None and not len(weights.versions) == len(weights.starts) > 0:
        return "weight versions and their starts do not fit each other"
    if not np.isfinite([sampling.temperature, sampling.top_p, sampling.min_p]).all():
        return "a sampling parameter is not a finite number"
    return None
