"""Shards: every byte against the journal, every page against its checksum, every row against the invariants.

A shard that is not the committed file is still read as far as that goes, so that the finding says which row groups
are affected. One row group is in memory at a time; of its rows only the keys are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.errors import DatasetError
from rollgen.format.journal import JournalLine, Totals, file_sha256, footer_sha256
from rollgen.format.keys import Keys
from rollgen.format.manifest import Manifest, Run
from rollgen.format.reader import ShardReader, count_mask_ids, open_shard, read_row_group
from rollgen.format.schema import FOOTER_CONFIG_DIGEST, FOOTER_TOKENIZER_VOCAB_SIZE, FOOTER_VOCAB_SIZE
from rollgen.prompts.planned import Mismatch
from rollgen.verify.extras import check_extras
from rollgen.verify.findings import Findings
from rollgen.verify.rows import Violation, check_rows

CheckTable = Callable[[pa.Table], Iterable[Violation]]


@dataclass(frozen=True, slots=True)
class ShardContent:
    """What a shard holds, as far as it can be read."""

    totals: Totals
    keys: Keys
    """Of all rows, in file order."""
    beyond_tokenizer: int
    """Sampled ids that the tokenizer does not know and the model does."""
    row_groups: tuple[tuple[int, int], ...]
    """Number and rows of each row group that could be read."""
    is_whole: bool = True
    """Whether that is all of them."""

    @classmethod
    def joined(cls, parts: Sequence[ShardContent]) -> ShardContent:
        """One after the other."""
        return cls(
            add_totals(part.totals for part in parts),
            Keys.joined([part.keys for part in parts]),
            sum(part.beyond_tokenizer for part in parts),
            tuple(chain.from_iterable(part.row_groups for part in parts)),
        )

    def place(self, row: int) -> str:
        """Where the row of `keys` with this number is."""
        ends = np.cumsum([rows for _, rows in self.row_groups])
        at = int(np.searchsorted(ends, row, side="right"))
        group, rows = self.row_groups[at]
        return f"row group {group}, row {row - int(ends[at]) + rows}"


def check_bytes(path: Path, line: JournalLine, findings: Findings) -> bool:
    """Whether the file is the one that was committed."""
    size = path.stat().st_size
    if size != line.bytes:
        findings.add("bytes", path, f"{size} bytes, the journal says {line.bytes}: truncated or overwritten")
        return False
    if file_sha256(path) != line.sha256:
        findings.add("sha256", path, "not the bytes that were committed: the SHA-256 is not the journal's")
        return False
    if footer_sha256(path) != line.footer_sha256:
        findings.add("footer", path, "footer_sha256 of its journal line is not that of the file: the line is damaged")
        return False
    return True


def check_content(path: Path, manifest: Manifest, check_planned: CheckTable, findings: Findings) -> ShardContent | None:
    """Read all of a shard. None when not even its footer can be read, or it is of another dataset."""
    try:
        shard = open_shard(path)
    except DatasetError as error:
        findings.add_error(path, error)
        return None
    with shard:
        if not _belongs(path, shard, manifest, findings):
            return None
        parts = [
            part
            for index in range(len(shard.row_group_rows))
            if (part := _check_row_group(path, shard, index, manifest, check_planned, findings)) is not None
        ]
        whole = len(parts) == len(shard.row_group_rows)
    content = replace(ShardContent.joined(parts), is_whole=whole)
    _check_order(path, content, findings)
    return content


def checking(mismatches: Callable[[pa.Table], Iterable[Mismatch]]) -> CheckTable:
    """A comparison with what was asked for, as a check."""
    return lambda table: starmap(Violation.of_rows, mismatches(table))


def add_totals(parts: Iterable[Totals]) -> Totals:
    """Their sums."""
    return Totals(*(sum(column) for column in zip((0, 0, 0), *parts, strict=True)))


def check_counts(path: Path, line: JournalLine, totals: Totals, findings: Findings) -> None:
    """The journal line against what the shard holds."""
    for name, found in totals._asdict().items():
        if found != getattr(line, name):
            findings.add("counts", path, f"{found} {name}, the journal says {getattr(line, name)}")


def _belongs(path: Path, shard: ShardReader, manifest: Manifest, findings: Findings) -> bool:
    """Whether this is a shard of the dataset; its footer keys against the manifest."""
    digest = _footer_text(shard, FOOTER_CONFIG_DIGEST)
    if digest != manifest.config_digest:
        findings.add("foreign", path, f"of another dataset: its config digest is {digest[:12] or 'absent'}")
        return False
    for key, wanted in (
        (FOOTER_VOCAB_SIZE, manifest.vocab_size),
        (FOOTER_TOKENIZER_VOCAB_SIZE, manifest.tokenizer_vocab_size),
    ):
        if (found := _footer_text(shard, key)) != str(wanted):
            findings.add("footer", path, f"{key.decode()} is {found!r}, the manifest says {wanted}")
    for name, stored in manifest.optional_columns.items():
        if (name in shard.stored) != stored:
            there, here = ("has", "not here") if stored else ("has not", "here it is")
            findings.add("footer", path, f"the manifest {there} the column {name}, {here}")
    return True


def _footer_text(shard: ShardReader, key: bytes) -> str:
    values: dict[bytes, bytes] = shard.file.metadata.metadata or {}
    return values.get(key, b"").decode(errors="replace")


def _check_row_group(
    path: Path, shard: ShardReader, index: int, manifest: Manifest, check_planned: CheckTable, findings: Findings
) -> ShardContent | None:
    place = f"row group {index}"
    try:
        table = read_row_group(shard, index, use_threads=False)
    except DatasetError as error:
        findings.add_error(path, error, place)
        return None
    for violation in _violations(table, manifest, check_planned):
        findings.add(
            violation.kind, path, violation.problem, f"{place}, {_describe(table, violation)}", violation.count
        )
    tokens = pa.chunked_array([chunk.flatten() for chunk in table["token_ids"].chunks], pa.int32()).to_numpy()
    return ShardContent(
        Totals(len(table), len(tokens), count_mask_ids(table)),
        Keys.of(table),
        int(np.count_nonzero((tokens >= manifest.tokenizer_vocab_size) & (tokens < manifest.vocab_size))),
        ((index, len(table)),),
    )


def _violations(table: pa.Table, manifest: Manifest, check_planned: CheckTable) -> Iterator[Violation]:
    yield from check_rows(table, manifest.vocab_size)
    yield from check_extras(table, manifest)
    yield from check_planned(table)
    yield from _contradictions(table, manifest)


def _contradictions(table: pa.Table, manifest: Manifest) -> Iterator[Violation]:
    """Rows that the manifest says there are none of."""
    retried = table["generation"].to_numpy() > len(manifest.retries)
    if retried.any():
        problem = f"of a retry that the manifest, which has {len(manifest.retries)}, does not know"
        yield Violation.of_rows("unplanned", retried, problem)
    unreplayable = ~table["replayable"].to_numpy() & _said(table, manifest, _forbids_unreplayable)
    if unreplayable.any():
        yield Violation.of_rows("mismatch", unreplayable, "replayable is false, the manifest's allow_unreplayable too")
    lengths = table["prompt_length"].to_numpy().astype(np.int64) + table["response_length"].to_numpy()
    context = _said(table, manifest, _context_length)
    longer = lengths > context
    if longer.any():
        row = int(longer.argmax())
        problem = f"{lengths[row]} tokens, more than the model's context of {context[row]}"
        yield Violation.of_rows("mismatch", longer, problem)


def _said(table: pa.Table, manifest: Manifest, what: Callable[[Manifest | Run], Any]) -> npt.NDArray[Any]:
    """[N], of each row what the manifest says, or in a merged dataset what it says of the row's run."""
    if not manifest.runs or "run" not in table.column_names:
        return np.full(len(table), what(manifest))
    places = pc.fill_null(pc.index_in(table["run"], pa.array(manifest.run_names)), 0)  # unknown ones are found anyway
    said: npt.NDArray[Any] = np.array([what(run) for run in manifest.runs])[places.to_numpy()]
    return said


def _forbids_unreplayable(said: Manifest | Run) -> bool:
    return said.identity.get("allow_unreplayable") is False


def _context_length(said: Manifest | Run) -> int:
    return said.model.context_length


def _describe(table: pa.Table, violation: Violation) -> str:
    """`row 17 (p5, 3), token 9`"""
    key = f"{table['prompt_id'][violation.row].as_py()[:80]}, {table['sample_index'][violation.row]}"
    token = "" if violation.token is None else f", token {violation.token}"
    return f"row {violation.row} ({key}){token}"


def _check_order(path: Path, content: ShardContent, findings: Findings) -> None:
    falling = content.keys.steps() < 0
    if falling.any():
        place = content.place(int(falling.argmax()) + 1)
        findings.add("order", path, "rows are not sorted by their keys", place, int(np.count_nonzero(falling)))
