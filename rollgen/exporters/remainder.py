"""What a trainer has no field for, as one dictionary a sample, for trainers that carry a dictionary along unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollgen.exporters.records import Block
from rollgen.loader.samples import RUN, SCALARS, VERSIONS

KEY: Final = "rollgen"
"""Under which name the dictionary stands among others: trainers read some names of theirs there."""
_NAMES: Final = (*(name for name in SCALARS if name not in ("temperature", "text", "prompt")), RUN)
"""All but what these trainers have fields for."""


def remainder_places(dictionary: str) -> Mapping[str, str]:
    """Where the columns go: `dictionary.rollgen.<column>`."""
    return {name: f"{dictionary}.{KEY}.{name}" for name in (*_NAMES, VERSIONS)}


def remainders(block: Block) -> list[dict[str, Any]]:
    """Of each sample, plain values; `run` and weight versions, with where each begins, if they are stored."""
    columns = {name: block.samples.scalars[name].tolist() for name in _NAMES if name in block.samples.scalars}
    told = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if VERSIONS in block.samples.scalars:
        for row, versions in zip(told, block.samples.scalars[VERSIONS].tolist(), strict=True):
            row |= {VERSIONS: list(versions.versions), "weight_version_starts": list(versions.starts)}
    return told
