"""What a run will take, before it starts: tokens, disk and time, as a bound from its plan.

The bound lets every owed sample run to its max_tokens. What a token takes on disk is assumed for a new run, on the side
of too much, and measured for one that is continued, which also has an expectation: the rest is like what is stored.

    bytes of a sample = max_tokens * bytes of a token + 4 * prompt tokens + its prompt and metadata as text + ROW_BYTES
    bytes of a token  = TOKEN_BYTES + support ids * (ID_BYTES, and SUPPORT_LOGPROB_BYTES if those are stored)

Supports by top_k alone have top_k ids. Where top_p or min_p cut them first, the mean that is assumed is
TYPICAL_SUPPORT ids, or top_k if that is less.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.compute as pc
from rich import filesize

from rollgen.errors import DatasetError
from rollgen.format.commit import WHOLE, Part, writer_name
from rollgen.format.journal import committed_shards, list_shards, read_journal
from rollgen.format.reader import open_shard, read_columns
from rollgen.format.schema import QUARANTINE_DIR, RETIRED_DIR
from rollgen.inspect.terminal import counted, duration, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt
    import pyarrow as pa

    from rollgen.format.retries import RetryList
    from rollgen.inspect.status import RunStatus
    from rollgen.prompts.plan import Plan

TOKEN_BYTES: Final = 12.0
"""Of token_ids, logprobs and text, 4 bytes each, as if zstd gained nothing."""
ID_BYTES: Final = 2.2
"""Of one id of a sampling_mask. Measured: 1.5 over a vocabulary of 49k, 2.1 over 152k (tests/benchmarks/RESULTS.md)."""
SUPPORT_LOGPROB_BYTES: Final = 4.0
"""Of one float32 of support_logprobs, which hardly compress."""
TYPICAL_SUPPORT: Final = 16
"""Ids. Measured: a mean of 7 to 15 at top_k 50 and top_p 0.95. A high temperature may have more."""
ROW_BYTES: Final = 64
"""Of a row's other columns, which repeat."""
RATES: Final = (100, 1_000, 10_000)
"""Tokens a second at which the time is told where none is measured: a CPU, a small GPU, a large one."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is owed, if it is like what is stored."""

    mean_length: float
    """Tokens of a stored sample."""
    bytes_per_token: float
    """Of all stored columns."""
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the owed samples take."""

    samples: int
    max_generated_tokens: int
    """If every sample runs to its max_tokens."""
    assumed_support: float
    """Ids a token, over those tokens: assumed, not measured. 0 where nothing is truncated."""
    assumed_bytes_per_token: float
    """Of generated tokens, without what a prompt takes; at least what is measured."""
    max_bytes: int
    free_bytes: int | None
    """On the file system of the output directory; None for object storage, which does not tell."""
    expected: Expectation | None
    """None for a run that has stored nothing."""
    tokens_per_second: float | None
    """Measured in the last attempt, of this part where it is one; None when that is not known."""
    part: str | None = None
    """`i/N`: all of this is of that part; None for the whole run."""

    @property
    def fits(self) -> bool:
        """Whether the bound fits the free space, as far as that is known."""
        return self.free_bytes is None or self.max_bytes <= self.free_bytes

    def to_json(self) -> dict[str, Any]:
        """JSON-able, names as here."""
        return asdict(self) | {"fits": self.fits}


def estimate_run(
    plan: Plan,
    retries: Sequence[RetryList] = (),
    *,
    support_logprobs: bool,
    stored: RunStatus | None,
    free_bytes: int | None,
    part: Part = WHOLE,
    done: int | None = None,
) -> Estimate:
    """Of everything that `plan` and `retries` have and `stored` (the status of the run that is continued) has not.

    With `part`, of what they have in it: `done` samples of it are stored (`stored_of`).

    Which samples are stored is not looked up: for the owed ones, the bounds take the largest of all.
    """
    costs = _costs(plan, retries, part, support_logprobs=support_logprobs)
    if done is None:
        done = 0 if stored is None else stored.stored
    samples = max(0, int(costs.n.sum()) - done)
    expected = None if stored is None or not stored.stored else _expectation(stored, samples)
    token_bytes = np.maximum(costs.token_bytes, 0.0 if expected is None else expected.bytes_per_token)
    planned_tokens = float(costs.max_tokens @ costs.n) or 1.0  # a part may have nothing at all
    return Estimate(
        samples=samples,
        max_generated_tokens=int(largest_sum(costs.max_tokens, costs.n, samples)),
        assumed_support=float((costs.max_tokens * costs.support) @ costs.n) / planned_tokens,
        assumed_bytes_per_token=float((costs.max_tokens * token_bytes) @ costs.n) / planned_tokens,
        max_bytes=int(largest_sum(costs.max_tokens * token_bytes + costs.row_bytes, costs.n, samples)),
        free_bytes=free_bytes,
        expected=expected,
        tokens_per_second=None if stored is None else _speed(stored, part),
        part=None if part == WHOLE else str(part),
    )


def _speed(stored: RunStatus, part: Part) -> float | None:
    """Measured is that of all parts together: of a part it is the speed where no other has begun."""
    is_own = part == WHOLE or (stored.division is not None and stored.division.started == (part.number,))
    return stored.tokens_per_second if is_own else None


def stored_of(directory: Path, part: Part, status: RunStatus, *, has_shards: bool = True) -> int:
    """Rows of the samples of a part. Where the shards have no content, those that the part's own writer has made."""
    if part == WHOLE:
        return status.stored
    if not has_shards:
        return sum(writer.samples for writer in status.writers if writer.name == writer_name(part))
    rows, (journal, paths) = 0, committed_shards(directory)
    for path in paths:
        if path.name in journal.retired:
            continue
        with suppress(DatasetError), open_shard(path) as reader:  # a damaged one is set aside, and owed again
            prompts = read_columns(reader, ["prompt_index"])["prompt_index"].to_numpy()
            rows += int(np.count_nonzero(prompts % part.of == part.number))
    return rows


def describe(estimate: Estimate) -> Iterator[str]:
    """The estimate in lines of text."""
    tokens = counted(estimate.max_generated_tokens, "generated token")
    whose = "" if estimate.part is None else f" by part {estimate.part.replace('/', ' of ')}"
    yield f"owed{whose}: {counted(estimate.samples, 'sample')}, at most {tokens}"
    support = f"supports of {number(round(estimate.assumed_support, 1))} ids on average"
    free = "" if estimate.free_bytes is None else f"; {filesize.decimal(estimate.free_bytes)} free"
    yield (
        f"disk: at most {filesize.decimal(estimate.max_bytes)}, assuming "
        f"{estimate.assumed_bytes_per_token:.1f} bytes a token ({support}){free}"
    )
    if not estimate.fits:
        yield "warning: that bound exceeds the space that is free; choose another --out, or lower --max-tokens or --n"
    rate, expected = estimate.tokens_per_second, estimate.expected
    if expected is not None:
        yield (
            f"expected, if the rest is like what is stored ({expected.mean_length:,.1f} tokens a sample, "
            f"{expected.bytes_per_token:.1f} bytes a token): {expected.tokens:,} tokens, "
            f"{filesize.decimal(expected.bytes)}"
        )
    if rate is None:
        times = (f"{duration(estimate.max_generated_tokens / each)} at {each:,} tokens/s" for each in RATES)
        why = "no speed is known before a first run" if expected is None else "how fast it was is not known here"
        yield f"time: {why}; at most {', '.join(times)}"
        return
    likely = "" if expected is None else f", {duration(expected.tokens / rate)} expected"
    yield (
        f"time: at most {duration(estimate.max_generated_tokens / rate)}{likely}, "
        f"at the {rate:,.0f} tokens/s of the last attempt"
    )


def largest_sum(values: npt.NDArray[Any], counts: npt.NDArray[np.int64], take: int) -> float:
    """Sum of the `take` largest among `counts[i]` copies of each `values[i]`."""
    order = np.argsort(-values)
    before = np.cumsum(counts[order]) - counts[order]
    return float(values[order] @ np.clip(take - before, 0, counts[order]))


@dataclass(frozen=True, slots=True)
class Removal:
    """What `--clean` takes away."""

    shards: int
    """Those in quarantine/ and retired/ too."""
    samples: int | None
    """Rows that the journal says are in place; None when it cannot be read."""
    bytes: int
    """Of the shards."""

    def __str__(self) -> str:
        samples = "nobody knows how many samples" if self.samples is None else counted(self.samples, "sample")
        return f"{counted(self.shards, 'shard')}, {samples}, {filesize.decimal(self.bytes)}"


def removal(directory: Path) -> Removal | None:
    """What `--clean` would take away in `directory`; None where there are no shards."""
    in_place = list_shards(directory)
    aside = [path for name in (QUARANTINE_DIR, RETIRED_DIR) for path in (directory / name).glob("part-*.parquet")]
    shards = [*in_place, *aside]
    if not shards:
        return None
    try:
        committed = read_journal(directory).committed
    except DatasetError:
        samples = None
    else:
        samples = sum(committed[path.name].rows for path in in_place if path.name in committed)
    return Removal(len(shards), samples, sum(path.stat().st_size for path in shards))


def free_space(directory: Path) -> int:
    """Bytes free where `directory` is, or will be made."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _expectation(stored: RunStatus, owed: int) -> Expectation:
    length, per_token = stored.tokens / stored.stored, stored.bytes / stored.tokens
    return Expectation(length, per_token, tokens=round(owed * length), bytes=round(owed * length * per_token))


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """Of the prompts of a plan and then of the samples of its retries, each array [prompts + samples]."""

    n: npt.NDArray[np.int64]
    """Samples; none of a skipped row."""
    max_tokens: npt.NDArray[np.int64]
    support: npt.NDArray[np.float64]
    """Ids a token that are assumed."""
    token_bytes: npt.NDArray[np.float64]
    row_bytes: npt.NDArray[np.int64]
    """Of a sample, without its generated tokens."""


def _costs(plan: Plan, retries: Sequence[RetryList], part: Part, *, support_logprobs: bool) -> _Costs:
    planned = (
        np.concatenate([measure(batch) for batch in plan.batches()])
        for measure in (_max_tokens, _assumed_support, _row_bytes)
    )
    max_tokens, support, row_bytes = planned
    again = np.concatenate([np.arange(0), *(retry.prompt_index for retry in retries)])  # their prompts
    support, row_bytes = (np.concatenate([values, values[again]]) for values in (support, row_bytes))
    is_ours = np.concatenate([np.arange(plan.prompts), again]) % part.of == part.number
    counts = np.concatenate([np.where(plan.tombstone, 0, plan.n), np.ones_like(again)])
    id_bytes = ID_BYTES + (SUPPORT_LOGPROB_BYTES if support_logprobs else 0.0)
    return _Costs(
        n=np.where(is_ours, counts, 0).astype(np.int64),
        max_tokens=np.concatenate([max_tokens, *(retry.max_tokens for retry in retries)]),
        support=support,
        token_bytes=TOKEN_BYTES + support * id_bytes,
        row_bytes=row_bytes,
    )


def _max_tokens(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    return _int64(batch.column("max_tokens"))


def _assumed_support(batch: pa.RecordBatch) -> npt.NDArray[np.float64]:
    top_k = batch.column("top_k").to_numpy().astype(np.float64)
    is_cut = (batch.column("top_p").to_numpy() < 1) | (batch.column("min_p").to_numpy() > 0)
    return np.where(is_cut, np.minimum(top_k, TYPICAL_SUPPORT), top_k)


def _row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    tokens = _int64(pc.list_value_length(batch.column("prompt_token_ids")))
    texts = (_int64(pc.fill_null(pc.binary_length(batch.column(name)), 0)) for name in ("prompt", "metadata"))
    return 4 * tokens + sum(texts) + ROW_BYTES


def _int64(column: Any) -> npt.NDArray[np.int64]:
    return column.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]
