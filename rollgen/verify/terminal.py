"""The outcome of a verification or a repair as lines of text. What comes from the data is inert: see `inert.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, get_args

from rollgen.inert import brief
from rollgen.verify.findings import Kind

if TYPE_CHECKING:
    from rollgen.verify.dataset import Verification
    from rollgen.verify.findings import Finding
    from rollgen.verify.repair import Action, Repair


_HINTS: Final = (
    ({"missing"}, "missing files can be put back: do so before anything else, for their names are not used again"),
    (
        {"foreign", "unplanned", "mismatch", "seed"},
        "if rollgen.json, plan.parquet or a retry list is an older copy, or another dataset's: put the right one back",
    ),
    (
        {*get_args(Kind)} - {"manifest", "plan", "retries", "replacement", "rewards", "recompute", "unreadable"},
        "`rollgen repair` sets damaged shards aside and mends the journal; samples of a plan that are missing "
        "then, --resume makes again",
    ),
)
"""What helps, for kinds of findings that do not say it themselves; in the order in which it is to be done."""


def describe(verification: Verification) -> Iterator[str]:
    """What was verified, what is wrong, and what to do about it."""
    from rich import filesize

    size = filesize.decimal(verification.bytes)
    if verification.rows or verification.is_clean:
        yield (
            f"{_count(verification.shards, 'shard')}, {_count(verification.rows, 'row')}, "
            f"{_count(verification.tokens, 'token')}, {_count(verification.mask_ids, 'mask id')}, {size}"
        )
    elif verification.shards:
        yield f"{_count(verification.shards, 'shard')}, {size}, whose rows could not be verified"
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
        owed = verification.samples.owed if verification.samples else 0
        rest = f"; {_count(owed, 'sample')} owed" if owed else ""
        yield f"clean: {'shards, journal and plan are as they were made' if verification.shards else 'no shards'}{rest}"
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in verification.by_kind.items())
    yield f"{_count(verification.total, 'finding')}: {kinds}"
    yield from (hint for kinds_of, hint in _HINTS if kinds_of & verification.by_kind.keys())


def _describe(finding: Finding) -> str:
    place = f"{finding.place}: " if finding.place else ""
    times = f" ({finding.count:,} times)" if finding.count > 1 else ""
    file = "" if finding.file == "." else f"{brief(finding.file)}: "
    return f"{file}{finding.kind}: {brief(place)}{brief(finding.problem)}{times}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_DONE: Final[dict[Action, str]] = {
    "completed": "completed first",
    "quarantined": "moved to quarantine/",
    "retired": "taken out of the journal",
    "journalled": "journal line made",
    "rewritten": "made again",
    "left": "left alone",
}
_PLANNED: Final[dict[Action, str]] = {
    "completed": "to be completed first",
    "quarantined": "would go to quarantine/",
    "retired": "would be taken out of the journal",
    "journalled": "would get a journal line",
    "rewritten": "would be made again",
    "left": "would be left alone",
}
_COPY: Final = "put the file back from a copy"
_ACCUSED: Final = (
    "shards and records contradict each other: put rollgen.json, plan.parquet and retry lists back from a copy; or, if "
    "it is a shard that is wrong, move it out of data/, and repair again"
)
_BY_HAND: Final = {
    "plan": "`rollgen generate ... --resume`, as in the last run, makes the same plan again; or put a copy back",
    "retries": "put the list back from a copy; rows of its retry cannot be judged without it",
    "manifest": "put rollgen.json back from a copy",
    **dict.fromkeys(("foreign", "unplanned", "mismatch", "seed", "footer"), _ACCUSED),
    "duplicate": "shards share some of their samples: move the one that you trust less out of data/, and repair again",
    "unreadable": "give the machine what it lacks, as memory or permission, and repair again",
    "rewards": "remove these files, and `rollgen score` makes the rewards again",
    "damaged": "make the file readable, or move it out of data/, and repair again",
}


def describe_repair(repair: Repair) -> Iterator[str]:
    """What was done, or would be, what is left, and what to do next."""
    from rollgen.verify.repair import shown

    verification, words = repair.verification, _PLANNED if repair.dry_run else _DONE
    changes = (*repair.changes, *repair.left)
    for change in shown(changes):
        yield f"{brief(change.file)}: {words[change.action]}: {brief(change.reason)}"
    more = Counter(change.action for change in changes)
    more.subtract(Counter(change.action for change in shown(changes)))
    for action, count in (+more).items():
        yield f"{words[action]}: {count:,} more"
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
        if repair.left:
            yield "what could not be read then could be read now: repair again"
        return
    for finding in verification.findings:
        yield f"left: {_describe(finding)}"
    for advice in dict.fromkeys(_BY_HAND.get(kind, _COPY) for kind in verification.by_kind):
        kinds = (kind for kind in verification.by_kind if _BY_HAND.get(kind, _COPY) == advice)
        yield f"{', '.join(kinds)}: {advice}"
