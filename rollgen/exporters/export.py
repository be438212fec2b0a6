"""`rollgen.export`: what the command `rollgen export` does, from Python.

open       the dataset, its rewards, the advantages of all samples
write      the trainer's files into a temporary directory, a block at a time
tell       export.json beside them: of what they were made, for whom, and what they could not take
name       the directory appears as a whole
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pydantic

from rollgen import __version__
from rollgen.arguments import check_texts
from rollgen.errors import UsageError
from rollgen.exporters.directory import new_directory, new_path
from rollgen.exporters.exporter import Exporter
from rollgen.exporters.records import Records
from rollgen.ops.advantages import AdvantageKind

RECORD_FILE: Final = "export.json"
_RECORD_FORMAT: Final = "rollgen-export"
TRAINERS: Final[Mapping[str, tuple[str, str]]] = {
    "jsonl": ("rollgen.exporters.jsonl", "JSONLines"),
    "miles": ("rollgen.exporters.miles", "Miles"),
    "prime-rl": ("rollgen.exporters.prime_rl", "PrimeRL"),
    "skyrl": ("rollgen.exporters.skyrl", "SkyRL"),
    "slime": ("rollgen.exporters.slime", "Slime"),
    "trl": ("rollgen.exporters.trl", "TRL"),
    "verl": ("rollgen.exporters.verl", "Verl"),
}
"""Module and class of each Exporter."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. All of it, and more, is in `export.json`."""

    trainer: str
    follows: str
    """The version of the trainer whose code was read."""
    samples: int
    prompts: int
    tokens: int
    """Prompt and response tokens."""
    files: int
    bytes: int
    lost: dict[str, int]
    """By column of the dataset that has no place in the files: how many samples have a value there."""
    owed: int | None
    """Samples that are wanted and not stored: of the plan, or of the runs of a merged dataset, when they were merged
    and since. None where nothing tells."""
    advice: list[str]
    """What the trainer must be told, or its user should know, a line each."""


def export(
    directory: str | os.PathLike[str],
    to: str,
    out: str | os.PathLike[str],
    *,
    reward: str | None = None,
    advantages: AdvantageKind | None = None,
    allow_unreplayable: bool = False,
    allow_incomplete: bool = False,
    **options: Any,
) -> Exported:
    """Write a dataset as the files that a trainer loads, into the new directory `out`.

    `to` is one of TRAINERS. `reward` names a stored reward (`rollgen score`), from which advantages are computed over
    the whole groups of the dataset: `advantages` is a kind of `ops.group_advantages`, or None for "mean"; a trainer
    that makes its own takes none. Prompts of which some samples are yet to be made are refused then, and a merged
    dataset of runs in which some were, unless `allow_incomplete`. The `options` of each trainer, and what it cannot
    take, are described in docs/export.md. Raises UsageError for a trainer, an option or samples that this export cannot
    be made of, and DatasetError for a damaged dataset; then there is no `out`.
    """
    check_texts(to=to)
    check_texts(or_none=True, reward=reward, advantages=advantages)
    exporter = make_exporter(to, options)
    if exporter.needs_reward and reward is None:
        raise UsageError(f"{to} trains on rewards: name a stored one with --reward; `rollgen score` makes them")
    kind = _advantages(to, exporter, reward, advantages)
    path = new_path(out)
    records = Records(
        directory,
        reward=reward,
        advantages=kind,
        allow_unreplayable=allow_unreplayable,
        allow_incomplete=allow_incomplete,
        routed_experts=exporter.takes_experts,
    )
    with new_directory(path) as temporary:
        advice = [*exporter.write(records, temporary), *records.owed.notes, *_warnings(records)]
        exported = _exported(to, exporter, records, temporary, advice)
        scorer = records.scorer
        told = None if scorer is None else {"name": reward, "scorer": asdict(scorer), "advantages": kind}
        _write_record(temporary, exported, exporter, records, told)
    return exported


def make_exporter(to: str, options: Mapping[str, Any]) -> Exporter:
    """The exporter of a trainer. Raises UsageError for one that is not known, and for options that are wrong."""
    if to not in TRAINERS:
        raise UsageError(f"--to {to}: not known; choose one of {', '.join(TRAINERS)}")
    module, name = TRAINERS[to]
    kind: type[Exporter] = getattr(import_module(module), name)
    try:
        return kind(**options)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        option = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields) or "none"
            raise UsageError(f"--option {option}: not an option of {to}; it has {known}") from None
        raise UsageError(f"--option {option}: {problem['msg']}") from None


def _advantages(to: str, exporter: Exporter, reward: str | None, asked: AdvantageKind | None) -> AdvantageKind | None:
    """How to compute them; None where nobody does. Raises UsageError where what was asked for would change nothing."""
    if asked is not None and reward is None:
        raise UsageError(f"--advantages {asked}: are made of a reward; name a stored one with --reward")
    if asked is not None and not exporter.takes_advantages:
        raise UsageError(
            f"--advantages {asked}: {to} takes no advantages, it makes its own of the rewards; leave this out, and set "
            "them up in its configuration"
        )
    return (asked or "mean") if exporter.takes_advantages else None


def _warnings(records: Records) -> list[str]:
    """What may make advantages other than they are meant to be."""
    sizes = records.group_sizes
    if records.owed.samples is not None or records.scorer is None or sizes.min() == sizes.max():
        return []
    return [
        f"prompts have from {sizes.min()} to {sizes.max()} samples, and nothing says whether more were to be made: "
        "advantages are over those that are there"
    ]


def _exported(to: str, exporter: Exporter, records: Records, directory: Path, advice: list[str]) -> Exported:
    sizes = [path.stat().st_size for path in _files(directory)]
    placed = exporter.places
    return Exported(
        trainer=to,
        follows=exporter.follows,
        samples=len(records),
        prompts=len(records.group_sizes),
        tokens=int(records.lengths.sum(dtype="int64")),
        files=len(sizes),
        bytes=sum(sizes),
        owed=records.owed.samples,
        lost={name: count for name, count in sorted(records.filled.items()) if count and name not in placed},
        advice=advice,
    )


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _write_record(
    directory: Path, exported: Exported, exporter: Exporter, records: Records, reward: dict[str, Any] | None
) -> None:
    manifest = records.manifest
    record = {
        "format": _RECORD_FORMAT,
        "version": 1,
        "rollgen_version": __version__,
        "dataset": {
            "config_digest": manifest.config_digest,
            "format_version": manifest.format_version,
            "fingerprint": records.fingerprint(),
            "vocab_size": manifest.vocab_size,
            "tokenizer_sha256": manifest.tokenizer_sha256,
            "model": manifest.model.model_dump(),
            "routed_experts": manifest.routed_experts and manifest.routed_experts.model_dump(),
        },
        "reward": reward,
        "options": exporter.model_dump(mode="json"),
        **asdict(exported),
        "places": dict(exporter.places),
        "written": {str(path.relative_to(directory)): path.stat().st_size for path in _files(directory)},
    }
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    (directory / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
