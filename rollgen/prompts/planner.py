"""Planning: prompt files in, `plan.parquet` out, every bad row found before a model loads.

Two passes over the files, so that input larger than memory streams through. The first checks each row and collects
ids (13 bytes a row); the second applies the chat template, tokenises and writes, a row group at a time. What is kept
between row groups is 17 bytes a prompt: ids and lengths.

A bad row stops the run: up to ten are reported in one UsageError, a line each. With `--on-bad-row skip` it becomes a
tombstone of the plan instead: it keeps its place and its id, and its samples count as failed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rollgen.errors import UsageError
from rollgen.inert import LINE, brief
from rollgen.prompts.ids import Duplicate, IdTable
from rollgen.prompts.messages import Chat
from rollgen.prompts.plan import PlanWriter
from rollgen.prompts.rows import BadRow, Row, RowRules, parse_row
from rollgen.prompts.sources import Line, PromptFiles
from rollgen.prompts.tokens import PromptEncoder
from rollgen.rollouts import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    from rollgen.config import RunConfig
    from rollgen.format.manifest import PromptSource
    from rollgen.prompts.model import ModelInfo
    from rollgen.rollouts import Int32Array

_REPORTED_ROWS = 10
_STOPPED = f"\n(stopped after {_REPORTED_ROWS} bad rows; --on-bad-row skip records bad rows and goes on)"
_GROUP_ROWS = 4096
_GROUP_BYTES = 8 << 20
"""Of input lines; a row group, and what is in memory at a time, is bounded by both."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan holds, for the first lines of a run, `--dry-run` and the manifest."""

    prompts: int
    """Rows of the plan, tombstones included."""
    samples: int
    """Samples planned, those of tombstones included."""
    tombstones: int
    tombstone_samples: int
    problems: tuple[str, ...]
    """`FILE:LINE: what, and the fix` of the first ten tombstones."""
    clamped: int
    """Prompts whose max_tokens the context reduced."""
    double_bos: int
    """Prompts that begin with two beginning-of-sequence tokens: a template was applied twice."""
    templated: int
    """Raw texts that begin with a special token: chats rendered before they came here. No second one was added."""
    truncated: int
    """Usable prompts sampled with top-k, top-p or min-p: their tokens get supports."""
    untruncated: int
    smallest_top_k: int
    """Over usable truncated prompts, 0 without any."""
    largest_top_k: int
    prompt_tokens: int
    """Over all usable prompts, each counted once. The next four are lengths in tokens, 0 without usable prompts."""
    shortest: int
    median: int
    p95: int
    longest: int
    sources: tuple[PromptSource, ...]
    first: Prompt | None
    """The first usable prompt."""
    first_text: str | None
    """What the model is shown for it: the rendered chat, the raw text or the decoded ids."""


def write_plan(
    lines: PromptFiles,
    config: RunConfig,
    model: ModelInfo,
    path: Path,
    *,
    now: datetime,
    progress: Callable[[int], None] | None = None,
) -> PlanSummary:
    """Plan all rows of `lines` into a Parquet file at exactly `path` (the caller names a temporary and moves it).

    `now` is when the run was planned first: a template that prints the date must give the same prompts on every resume.
    `progress` is called with the number of rows planned so far. Raises UsageError for bad rows (unless skipped), files
    or settings; `path` is then incomplete.
    """
    rules = RowRules.of(config, model.vocab_size)
    encoder = PromptEncoder(model, config, now)
    min_tokens = _min_tokens(config)
    fatal = config.on_bad_row == "fail"
    ids, duplicates = _identify(lines, rules, _Report(fatal=fatal))
    sources = lines.sources
    planner = _Planner(rules, encoder, model.context_length, min_tokens, ids, duplicates, _Report(fatal=fatal))
    with PlanWriter(path) as writer:
        for group in _groups(lines):
            writer.write(planner.plan(group))
            planner.report.check()
            if progress is not None:
                progress(planner.planned)
    if lines.sources != sources:
        raise UsageError(f"{lines}: changed while being read; run again when writing has ended")
    if config.system_prompt is not None and planner.chats == 0:
        raise UsageError("--system-prompt: there is no chat to put it before; use messages, or --chat to wrap prompts")
    return planner.summary(sources)


def _min_tokens(config: RunConfig) -> int:
    value = config.sampling_arg.get("min_tokens", 0)
    if type(value) is not int:
        raise UsageError(f"--sampling-arg min_tokens: must be a whole number, not {value!r}")
    return value


class _Report:
    """The first bad rows of a pass over the files, raised as one UsageError when they are fatal."""

    def __init__(self, *, fatal: bool) -> None:
        self.first: list[str] = []
        self._fatal = fatal

    def add(self, line: Line, problem: str) -> None:
        """Record a bad row. Raises UsageError when enough fatal ones have come together."""
        if len(self.first) < _REPORTED_ROWS:
            self.first.append(f"{line}: {problem}")
        if len(self.first) == _REPORTED_ROWS:
            self.check()

    def check(self) -> None:
        """Raise UsageError if there are bad rows and they are fatal."""
        if self._fatal and self.first:
            more = _STOPPED if len(self.first) == _REPORTED_ROWS else ""
            raise UsageError("\n".join(self.first) + more)


def _identify(lines: PromptFiles, rules: RowRules, report: _Report) -> tuple[IdTable, dict[int, Duplicate]]:
    """The first pass: ids of all rows, and the rows, by number, whose id an earlier row has."""
    ids = IdTable()
    for line in lines:
        row = parse_row(line.data, rules)
        ids.add(row)
        if isinstance(row, BadRow):
            report.add(line, "; ".join(row.problems))
    ids.freeze()
    duplicates: dict[int, Duplicate] = {}
    for index, line, duplicate in ids.duplicates((line, parse_row(line.data, rules)) for line in lines):
        duplicates[index] = duplicate
        report.add(line, duplicate.problem(full_path=True))
    report.check()
    return ids, duplicates


def _groups(
    lines: Iterable[Line], *, max_rows: int = _GROUP_ROWS, max_bytes: int = _GROUP_BYTES
) -> Iterator[list[Line]]:
    """Lines in runs of `max_rows`, or fewer when they are long: a run ends with the line that reaches `max_bytes`."""
    group: list[Line] = []
    size = 0
    for line in lines:
        group.append(line)
        size += len(line.data)
        if len(group) == max_rows or size >= max_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


@dataclass(slots=True)
class _Planner:
    """The second pass: lines to prompts, counting as it goes."""

    rules: RowRules
    encoder: PromptEncoder
    context_length: int
    min_tokens: int
    ids: IdTable
    duplicates: dict[int, Duplicate]
    report: _Report
    planned: int = 0
    samples: int = 0
    tombstones: int = 0
    tombstone_samples: int = 0
    chats: int = 0
    clamped: int = 0
    double_bos: int = 0
    templated: int = 0
    truncated: int = 0
    smallest_top_k: int = 0
    largest_top_k: int = 0
    lengths: array[int] = field(default_factory=lambda: array("i"))
    first: Prompt | None = None
    first_text: str | None = None

    def plan(self, lines: Sequence[Line]) -> list[Prompt]:
        """The prompts of the next lines, tombstones included."""
        rows = [self._parse(index, line) for index, line in enumerate(lines, self.planned)]
        encoded = iter(self.encoder.encode([row for row in rows if isinstance(row, Row)]))
        return [
            self._prompt(line, row, next(encoded) if isinstance(row, Row) else "; ".join(row.problems))
            for line, row in zip(lines, rows, strict=True)
        ]

    def summary(self, sources: Sequence[PromptSource]) -> PlanSummary:
        """What was planned."""
        lengths = np.array(self.lengths, np.int32)
        shortest, median, p95, longest = (
            np.percentile(lengths, [0, 50, 95, 100], method="nearest").tolist() if lengths.size else [0] * 4
        )
        return PlanSummary(
            prompts=self.planned,
            samples=self.samples,
            tombstones=self.tombstones,
            tombstone_samples=self.tombstone_samples,
            problems=tuple(self.report.first),
            clamped=self.clamped,
            double_bos=self.double_bos,
            templated=self.templated,
            truncated=self.truncated,
            untruncated=lengths.size - self.truncated,
            smallest_top_k=self.smallest_top_k,
            largest_top_k=self.largest_top_k,
            prompt_tokens=int(lengths.sum(dtype=np.int64)),
            shortest=shortest,
            median=median,
            p95=p95,
            longest=longest,
            sources=tuple(sources),
            first=self.first,
            first_text=self.first_text,
        )

    def _parse(self, index: int, line: Line) -> Row | BadRow:
        """The row, bad if its id is taken."""
        row = parse_row(line.data, self.rules)
        if (duplicate := self.duplicates.get(index)) is None:
            return row
        problems = row.problems if isinstance(row, BadRow) else ()
        return BadRow(
            duplicate.prompt_id, row.content_hash, row.parameters, (*problems, duplicate.problem(full_path=False))
        )

    def _prompt(self, line: Line, row: Row | BadRow, encoded: Int32Array | str) -> Prompt:
        """The next row of the plan: a usable prompt, or a tombstone when `encoded` says what is wrong."""
        index = self.planned
        prompt_id = self.ids.name(index, row)
        n, seed, sampling = row.parameters.n, row.parameters.seed, row.parameters.sampling
        self.planned += 1
        self.samples += n
        if isinstance(row, BadRow) or isinstance(encoded, str):
            return self._tombstone(line, prompt_id, index, row, str(encoded))
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self.context_length - encoded.size))
        if sampling.max_tokens < self.min_tokens:
            problem = f"max_tokens is {sampling.max_tokens}, less than --sampling-arg min_tokens={self.min_tokens}"
            return self._tombstone(line, prompt_id, index, row, problem)
        prompt = Prompt(prompt_id, index, encoded, sampling, n, seed, row.prompt, row.metadata)
        self._count(row, prompt)
        return prompt

    def _tombstone(self, line: Line, prompt_id: str, index: int, row: Row | BadRow, problem: str) -> Prompt:
        parameters = row.parameters
        self.report.add(line, problem)
        self.tombstones += 1
        self.tombstone_samples += parameters.n
        return Prompt(
            prompt_id,
            index,
            np.empty(0, np.int32),
            parameters.sampling,
            parameters.n,
            parameters.seed,
            error=brief(f"{line.short}: {problem}", LINE),
        )

    def _count(self, row: Row, prompt: Prompt) -> None:
        self.lengths.append(prompt.token_ids.size)
        self.chats += isinstance(row.content, Chat)
        self.clamped += prompt.sampling.max_tokens < row.parameters.sampling.max_tokens
        self.double_bos += self.encoder.is_double_bos(prompt.token_ids)
        self.templated += isinstance(row.content, str) and self.encoder.is_templated(row.content)
        if prompt.sampling.truncates:
            top_k = prompt.sampling.top_k
            self.smallest_top_k = min(self.smallest_top_k or top_k, top_k)
            self.largest_top_k = max(self.largest_top_k, top_k)
            self.truncated += 1
        if self.first is None:
            self.first, self.first_text = prompt, self.encoder.text(row)
