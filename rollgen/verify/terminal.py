"""The outcome of a verification or a repair as lines of text. What comes from the data is inert: see `inert.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rollgen.inert import brief

if TYPE_CHECKING:
    from rollgen.verify.dataset import Verification
    from rollgen.verify.findings import Finding
    from rollgen.verify.repair import Repair


_NOT_MENDED: Final = frozenset({"manifest", "plan", "retries", "replacement", "recompute"})
"""Kinds of findings that say themselves what helps: repair does not."""


def describe(verification: Verification) -> Iterator[str]:
    """What was verified, what is wrong, and what to do about it."""
    from rich import filesize

    size = filesize.decimal(verification.bytes)
    yield (
        f"{_count(verification.shards, 'shard')}, {_count(verification.rows, 'row')}, "
        f"{_count(verification.tokens, 'token')}, {_count(verification.mask_ids, 'mask id')}, {size}"
    )
    if samples := verification.samples:
        yield (
            f"{samples.planned:,} planned = {samples.stored:,} stored + {samples.owed:,} owed "
            f"+ {samples.skipped:,} skipped"
        )
    for note in verification.notes:
        yield f"note: {brief(note)}"
    for finding in verification.findings:
        yield _describe(finding)
    for kind, count in verification.by_kind.items():
        shown = sum(finding.kind == kind for finding in verification.findings)
        if count > shown:
            yield f"{kind}: {count - shown:,} more"
    if verification.is_clean:
        yield "clean: every byte, page and token is as it was made" if verification.shards else "clean: no shards yet"
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in verification.by_kind.items())
    yield f"{_count(verification.total, 'finding')}: {kinds}"
    if not verification.by_kind.keys() <= _NOT_MENDED:
        yield "`rollgen repair` sets damaged shards aside and mends the journal; then --resume makes what is missing"


def _describe(finding: Finding) -> str:
    place = f"{finding.place}: " if finding.place else ""
    times = f" ({finding.count:,} times)" if finding.count > 1 else ""
    return f"{brief(finding.file)}: {finding.kind}: {brief(place)}{brief(finding.problem)}{times}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_DONE = {
    "completed": "completed first",
    "quarantined": "moved to quarantine/",
    "retired": "taken out of the journal",
    "journalled": "journal line made",
    "rewritten": "made again",
}
_PLANNED = {
    "completed": "to be completed first",
    "quarantined": "would go to quarantine/",
    "retired": "would be taken out of the journal",
    "journalled": "would get a journal line",
    "rewritten": "would be made again",
}
_BY_HAND = {
    "plan": "`rollgen generate ... --resume`, as in the last run, makes the same plan again; or put a copy back",
    "retries": "put the list back from a copy; rows of its retry cannot be judged without it",
    "manifest": "put rollgen.json back from a copy",
    "footer": "shards and manifest contradict each other: put rollgen.json back from a copy",
    "duplicate": "shards share some of their samples: move the one that you trust less out of data/, and repair again",
    "damaged": "make the file readable, or move it out of data/, and repair again",
}


def describe_repair(repair: Repair) -> Iterator[str]:
    """What was done, or would be, what is left, and what to do next."""
    verification = repair.verification
    words = _PLANNED if verification is None else _DONE
    for change in repair.changes:
        yield f"{brief(change.file)}: {words[change.action]}: {brief(change.reason)}"
    if not repair.changes:
        yield "nothing to repair"
    if verification is None:
        return
    if verification.is_clean:
        yield f"clean: {_count(verification.shards, 'shard')}, {_count(verification.rows, 'row')}"
        if verification.samples and verification.samples.owed:
            owed = verification.samples.owed
            pronoun = "it" if owed == 1 else "them"
            yield f"owed: {_count(owed, 'sample')}; `rollgen generate ... --resume` makes {pronoun}"
        return
    for finding in verification.findings:
        yield f"left: {_describe(finding)}"
    for kind in verification.by_kind:
        yield f"{kind}: {_BY_HAND.get(kind, 'put the file back from a copy')}"
