"""Every token of a row group against the invariants, in numpy: `schema/SPEC.md`, sections 2 and 11.

`format/invariants.py` checks one completion before it is stored and stops at its first problem. Here are tables of
unknown origin, tens of thousands of tokens at a time: each check runs over all of them and says where it fails first
and how often. Rows whose lists do not align are reported and left out of the checks that need them aligned, and what is
no number, or no log-probability, is not compared with anything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.format.invariants import SUM_TOLERANCE
from rollgen.format.jsonlines import refuse_constant
from rollgen.format.ragged import NestedRagged, Ragged, nested_ragged, ragged
from rollgen.rollouts import FINISH_REASONS, TRUNCATING, truncates

if TYPE_CHECKING:
    from rollgen.verify.findings import Kind

    Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that some rows break."""

    kind: Kind
    row: int
    """The first of them, in the table."""
    token: int | None
    """Its first token that does; None where it is the row as a whole."""
    problem: str
    count: int
    """Rows, or tokens, that break it."""

    @classmethod
    def of_rows(cls, kind: Kind, bad: Bools, problem: str) -> Violation:
        """By some rows as a whole: `bad` is bool [N], true at least once."""
        return cls(kind, int(bad.argmax()), None, problem, int(np.count_nonzero(bad)))


def check_rows(table: pa.Table, vocab_size: int) -> Iterator[Violation]:
    """All violations in a table of format v1."""
    yield from _check_scalars(table)
    for problem, bad in _wrong_counts(table):
        if bad.any():
            yield Violation.of_rows("lengths", bad, problem)
    aligned = np.ones(len(table), np.bool_)
    for problem, bad in _misaligned(table):
        if bad.any():
            yield Violation.of_rows("lengths", bad, problem)
            aligned &= ~bad
    kept = np.flatnonzero(aligned)
    if len(kept) < len(table):
        table = table.take(kept)
    for violation in _check_tokens(_Tokens.of(table), vocab_size):
        yield replace(violation, row=int(kept[violation.row]))


_LONGEST_PARSED: Final = 4 << 20
"""Characters of JSON that are parsed: a list of empty objects takes 25 bytes for each."""


def _check_scalars(table: pa.Table) -> Iterator[Violation]:
    """Ranges of the columns that hold one value a row."""
    for name, requirement, holds in _RANGES:
        bad = ~holds(table[name].to_numpy())
        if bad.any():
            value = table[name][int(bad.argmax())].as_py()
            yield Violation.of_rows("sampling", bad, f"{name} is {value}, not {requirement}")
    for name, requirement, is_valid in _TEXTS:
        values = table[name].combine_chunks().dictionary_encode()
        texts = (text.as_py() for text in values.dictionary)  # one at a time: each may be large
        valid = np.fromiter((is_valid(text) for text in texts), np.bool_, len(values.dictionary))
        if not valid.all():
            bad = pc.fill_null(pa.array(~valid).take(values.indices), False).to_numpy(zero_copy_only=False)
            text = values.dictionary[int(valid.argmin())].as_py()
            yield Violation.of_rows("sampling", bad, f"{name} is {text[:80]!r}, not {requirement}")


def _is_stop_reason(text: str) -> bool:
    try:
        reason = _JSON.decode(text[:_LONGEST_PARSED])
    except (ValueError, RecursionError):
        return False
    return isinstance(reason, str)  # as which the decoder returns integers too


_JSON: Final = json.JSONDecoder(parse_constant=refuse_constant, parse_int=str)
"""Without NaN; of integers any length, which int() would refuse."""


def is_json_object(text: str) -> bool:
    """Whether a text is one JSON object. Of more than some megabytes only the braces are looked at."""
    inner = text.strip()
    if not (inner.startswith("{") and inner.endswith("}")):
        return False
    if len(inner) > _LONGEST_PARSED:
        return True
    try:
        _JSON.decode(inner)
    except (ValueError, RecursionError):
        return False
    return True


_RANGES: Final[tuple[tuple[str, str, Callable[[npt.NDArray[Any]], Bools]], ...]] = (
    ("sample_index", "at least 0", lambda values: values >= 0),
    ("generation", "at least 0", lambda values: values >= 0),
    ("prompt_index", "at least 0", lambda values: values >= 0),
    ("temperature", "a finite number above 0", lambda values: (values > 0) & (values < np.inf)),
    ("top_p", "in (0, 1]", lambda values: (values > 0) & (values <= 1)),
    ("min_p", "in [0, 1]", lambda values: (values >= 0) & (values <= 1)),
    ("top_k", "at least 0", lambda values: values >= 0),
    ("max_tokens", "at least 1", lambda values: values >= 1),
    ("seed", "at least 0", lambda values: values >= 0),
)
_TEXTS: Final[tuple[tuple[str, str, Callable[[str], bool]], ...]] = (
    ("finish_reason", f"one of {', '.join(FINISH_REASONS)}", lambda value: value in FINISH_REASONS),
    ("stop_reason", "a string or an integer in JSON", _is_stop_reason),
    ("metadata", "a JSON object", is_json_object),
)


def _wrong_counts(table: pa.Table) -> Iterator[tuple[str, Bools]]:
    """What the number of tokens must be, and the rows where it is not."""
    prompt = pc.list_value_length(table["prompt_token_ids"]).to_numpy()
    tokens = pc.list_value_length(table["token_ids"]).to_numpy()
    yield "prompt_length is not the number of prompt tokens", table["prompt_length"].to_numpy() != prompt
    yield "response_length is not the number of tokens", table["response_length"].to_numpy() != tokens
    yield "no token was generated", tokens == 0
    yield "more tokens than max_tokens", tokens > table["max_tokens"].to_numpy()


def _misaligned(table: pa.Table) -> Iterator[tuple[str, Bools]]:
    """What must be equally long in a row, and the rows where it is not."""
    tokens = pc.list_value_length(table["token_ids"]).to_numpy()
    for name in ("logprobs", "sampling_mask"):
        yield f"{name} has another length than token_ids", pc.list_value_length(table[name]).to_numpy() != tokens
    if "support_logprobs" in table.column_names:
        yield "support_logprobs has another length than sampling_mask", _differ_inside(table)


def _differ_inside(table: pa.Table) -> Bools:
    """Rows whose supports and support logprobs are not parallel: other nulls, other lengths."""
    columns = [table["sampling_mask"], table["support_logprobs"]]
    lengths, others = (pc.list_value_length(column).to_numpy() for column in columns)
    differ: Bools = lengths != others
    rows = np.flatnonzero(~differ)
    if differ.any():
        columns = [column.take(rows) for column in columns]
    sizes, other_sizes = (
        np.concatenate([np.zeros(0, np.int64), *(_sizes_with_nulls(chunk.flatten()) for chunk in column.chunks)])
        for column in columns
    )
    differ[np.repeat(rows, lengths[rows])[sizes != other_sizes]] = True
    return differ


def _sizes_with_nulls(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    """Lengths, -1 for a null."""
    sizes: npt.NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), -1).to_numpy(zero_copy_only=False)
    return sizes


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The lists of aligned rows: T tokens of N rows, K ids."""

    prompts: Ragged
    tokens: Ragged
    logprobs: npt.NDArray[np.float32]
    """[T]"""
    mask: NestedRagged
    null: Bools
    """[T]"""
    truncates: Bools
    """[T]: whether the parameters of the token's row truncate."""
    support_logprobs: npt.NDArray[np.float32] | None
    """[K]"""

    @classmethod
    def of(cls, table: pa.Table) -> _Tokens:
        tokens, mask = ragged(table["token_ids"]), nested_ragged(table["sampling_mask"])
        null = [chunk.flatten().is_null().to_numpy(zero_copy_only=False) for chunk in table["sampling_mask"].chunks]
        truncated = truncates(*(table[name].to_numpy() for name in TRUNCATING))
        stored = "support_logprobs" in table.column_names
        return cls(
            prompts=ragged(table["prompt_token_ids"]),
            tokens=tokens,
            logprobs=ragged(table["logprobs"]).values,
            mask=mask,
            null=np.concatenate([np.zeros(0, np.bool_), *null]),
            truncates=np.repeat(truncated, np.diff(tokens.offsets)),
            support_logprobs=nested_ragged(table["support_logprobs"]).values if stored else None,
        )

    def violation(self, kind: Kind, bad: Bools, problem: str, *values: npt.NDArray[Any]) -> Violation:
        """Of tokens [T]; `problem` is filled in with the first one's `values`."""
        first = int(bad.argmax())
        row = int(np.searchsorted(self.tokens.offsets, first, side="right")) - 1
        text = problem.format(*(value[first] for value in values))
        return Violation(kind, row, first - int(self.tokens.offsets[row]), text, int(np.count_nonzero(bad)))


def _check_tokens(rows: _Tokens, vocab_size: int) -> Iterator[Violation]:
    yield from _check_ids(rows, vocab_size)
    yield from _check_logprobs(rows)
    yield from _check_supports(rows, vocab_size)


def _check_ids(rows: _Tokens, vocab_size: int) -> Iterator[Violation]:
    tokens = rows.tokens.values
    bad = (tokens < 0) | (tokens >= vocab_size)
    if bad.any():
        yield rows.violation("ids", bad, f"id {{}} is outside the model's vocabulary of {vocab_size}", tokens)
    prompts = rows.prompts.values
    outside = np.flatnonzero((prompts < 0) | (prompts >= vocab_size))
    if outside.size:
        row = int(np.searchsorted(rows.prompts.offsets, outside[0], side="right")) - 1
        problem = f"prompt id {prompts[outside[0]]} is outside the model's vocabulary of {vocab_size}"
        yield Violation("ids", row, None, problem, len(outside))


def _check_logprobs(rows: _Tokens) -> Iterator[Violation]:
    logprobs = rows.logprobs
    bad = ~((logprobs <= 0) & (logprobs > -np.inf))  # NaN fails both
    if bad.any():
        yield rows.violation("logprobs", bad, "logprob {} is not a finite number <= 0", logprobs)
    bad = (np.diff(rows.mask.offsets) == 1) & (logprobs != 0) & ~bad
    if bad.any():
        yield rows.violation("logprobs", bad, "logprob {} of a support of one id, which is not 0", logprobs)


def _check_supports(rows: _Tokens, vocab_size: int) -> Iterator[Violation]:
    ids, offsets = rows.mask.values, rows.mask.offsets
    sizes = np.diff(offsets)
    bad = rows.null & rows.truncates
    if bad.any():
        yield rows.violation("support", bad, "no support (null), though the row's parameters truncate")
    bad = ~rows.null & ~rows.truncates
    if bad.any():
        yield rows.violation("support", bad, "a support is listed, though the row's parameters do not truncate")
    bad = ~rows.null & (sizes == 0)
    if bad.any():
        yield rows.violation("support", bad, "empty support")
    listed = np.flatnonzero(sizes)  # reduceat below must not see empty ranges
    if not listed.size:
        return
    starts = offsets[:-1][listed]

    def tokens_with(bad_ids: Bools) -> Bools:
        """bool [T]: tokens that have one of these ids."""
        bad = np.zeros(len(sizes), np.bool_)
        bad[listed] = np.logical_or.reduceat(bad_ids, starts)
        return bad

    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = tokens_with((ids < 0) | (ids >= vocab_size))
        yield rows.violation("support", bad, f"the support has ids outside the model's vocabulary of {vocab_size}")
    rising = ids[1:] > ids[:-1]
    rising[starts[1:] - 1] = True  # a new support may start lower
    if not rising.all():
        yield rows.violation(
            "support", tokens_with(~np.append(rising, True)), "support ids are not strictly increasing"
        )
    inside = ids == np.repeat(rows.tokens.values, sizes)
    if np.count_nonzero(inside) != listed.size or not rising.all():  # else each has its one match, ids being distinct
        bad = ~tokens_with(inside) & (sizes > 0)
        if bad.any():
            yield rows.violation("support", bad, "the sampled id {} is not in its support", rows.tokens.values)
    if rows.support_logprobs is not None:
        yield from _check_support_logprobs(rows, listed, starts, inside, tokens_with)


def _check_support_logprobs(
    rows: _Tokens,
    listed: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    inside: Bools,
    tokens_with: Callable[[Bools], Bools],
) -> Iterator[Violation]:
    stored = rows.support_logprobs
    assert stored is not None
    finite = (stored <= 0) & (stored > -np.inf)
    sizes = np.diff(rows.mask.offsets)
    comparable = sizes > 0
    if not finite.all():
        bad = tokens_with(~finite)
        yield rows.violation("logprobs", bad, "a support logprob is not a finite number <= 0")
        comparable &= ~bad
    mass = np.ones(len(sizes))
    mass[listed] = np.add.reduceat(np.exp(np.where(finite, stored, 0)), starts, dtype=np.float64)
    bad = (np.abs(mass - 1) > SUM_TOLERANCE) & comparable
    if bad.any():
        yield rows.violation("logprobs", bad, "support probabilities sum to {:.6f}, not 1", mass)
    comparable &= (rows.logprobs <= 0) & (rows.logprobs > -np.inf)
    bad = tokens_with(inside & (stored != np.repeat(rows.logprobs, sizes))) & comparable
    if bad.any():
        yield rows.violation(
            "logprobs", bad, "the support logprob of the sampled id is not its logprob {}", rows.logprobs
        )
