"""What a dataset says of how it was made, as labels and plain text: `provenance(manifest)`.

Terminal, card and report show the same facts, each in its own words around them. Texts are data: escape them for the
medium before they are shown.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rollgen.format.manifest import EngineRecord, Manifest, Run

_UNTOLD: Final = "unspecified"
"""What a manifest says of a device that the engine, a server, did not tell."""


def provenance(manifest: Manifest) -> dict[str, str]:
    """Of one run; what a merged dataset says as a whole has no engine, order of truncation and prompts."""
    model = manifest.model
    told = {
        "model": model.name + (f" @ {model.revision}" if model.revision else ""),
        "dtype": model.dtype,
        "context": f"{model.context_length:,} tokens",
        "vocabulary": f"{manifest.vocab_size:,} (model), {manifest.tokenizer_vocab_size:,} (tokenizer)",
    }
    for attempt in manifest.attempts[-1:]:
        told |= {
            "engine": _engine(attempt.engine),
            "order of truncation": attempt.engine.processors,
            "prompts": ", ".join(source.name for source in attempt.prompts),
        }
    optional = [name.replace("_", " ") for name, is_stored in manifest.optional_columns.items() if is_stored]
    return told | {
        "supports read by": manifest.capture,
        "optional columns": ", ".join(optional) or "none",
        "config digest": manifest.config_digest,
        "format": manifest.format_version,
    }


def _engine(engine: EngineRecord) -> str:
    device = ", device not told" if engine.device == _UNTOLD else f" on {engine.device}"
    return f"{engine.name} {engine.version}{device}"


def setting(value: object) -> str:
    """A value of the configuration as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def owed_when_merged(*runs: Run) -> int:
    """Samples that these runs of a merged dataset wanted and did not have, as far as they had plans. None of them is to
    be made any more: a merged dataset is not continued."""
    return sum(run.owed or 0 for run in runs)
