"""Write the golden dataset of several runs, `runs/` of format 1.3, and what a reader must find in it.

    python schema/conformance/make_golden_runs.py [DIRECTORY]     (default: `golden/` beside this file)

Two runs of different models are merged: "base" has the five samples of `masks/`, "step-100" two of the same prompts and
sample_index, of which one had been made again by a retry. What readers get wrong: ids and keys that repeat, a
`prompt_index` that is a hash of run and id and no position, `generation` 0 though a run had retries, a manifest without
a plan and without attempts of its own. As in `make_golden.py`, expectations are taken from literals, and committed
files stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from make_golden import (
    RETRY_MAX_TOKENS,
    TIME,
    WRITER,
    completions,
    expected_row,
    golden_manifest,
    retried_completion,
)

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, ModelRecord, Retry, Run, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion

NAME = "runs"
BASE, STEP = "base", "step-100"


def merged_completions() -> list[Completion]:
    """In the order of the shards, one for each run, and of the rows in each."""
    base = [_of_run(BASE, completion) for completion in completions()]
    step = [_of_run(STEP, completion) for completion in (completions()[0], retried_completion())]
    return [*sorted(base, key=_key), *sorted(step, key=_key)]


def _of_run(run: str, completion: Completion) -> Completion:
    """As it is in the merged dataset."""
    hashed = hashlib.sha256(f"{run}\n{completion.prompt_id}".encode()).digest()
    return replace(completion, run=run, prompt_index=int.from_bytes(hashed[:8], "big") >> 1, generation=0)


def _key(completion: Completion) -> tuple[int, int]:
    return completion.prompt_index, completion.sample_index


def merged_manifest() -> Manifest:
    """Of two runs, the second with another model, an older MINOR and a retry."""
    base = golden_manifest(format_version="1.3", support_logprobs=False)
    retry = Retry(
        generation=1,
        started_at=TIME,
        where={"finish_reason": "length"},
        max_tokens=RETRY_MAX_TOKENS,
        samples=1,
        sha256=digest("retry"),
    )
    model = ModelRecord(
        name="golden-100", revision=None, fingerprint=digest("100"), dtype="bfloat16", context_length=20
    )
    step = golden_manifest(format_version="1.1", support_logprobs=True).model_copy(
        update={"model": model, "retries": [retry], "capture": "native"}
    )
    runs = [_run(BASE, base, samples=5, superseded=0, owed=1), _run(STEP, step, samples=2, superseded=1, owed=0)]
    identity = {
        "planless": True,
        "runs": [{"name": run.name, "config_digest": run.config_digest} for run in runs],
    }
    return base.model_copy(
        update={
            "identity": identity,
            "config_digest": digest(identity),
            "model": ModelRecord(
                name="golden + golden-100",
                revision=None,
                fingerprint=digest([base.model.fingerprint, model.fingerprint]),
                dtype="mixed",
                context_length=20,
            ),
            "attempts": [],
            "runs": runs,
        }
    )


def _run(name: str, manifest: Manifest, **figures: int) -> Run:
    shared = {"format", "vocab_size", "tokenizer_vocab_size", "tokenizer_sha256", "page_checksums", "runs"}
    return Run.model_validate(manifest.model_dump(exclude=shared) | {"name": name} | figures)


def expected() -> dict[str, Any]:
    """What a reader must find."""
    rows = merged_completions()
    return {
        "rows": [
            {"run": row.run} | expected_row(row, support_logprobs=False, extras=False, generation=True) for row in rows
        ],
        "owed": [],
    }


def write_golden_runs(directory: Path) -> None:
    """The dataset and its expectations, replacing those in `directory`."""
    target, rows = directory / NAME, merged_completions()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    manifest = merged_manifest()
    with (
        WriterSlot(target, WRITER) as slot,
        ShardWriter(slot, manifest, commit_interval=math.inf) as writer,
    ):
        for name in (BASE, STEP):
            for row in rows:
                if row.run == name:
                    writer.add(row)
            writer.flush()
    create_manifest(target, manifest)
    for lock in (target / "journal").glob("*.lock"):
        lock.unlink()
    text = json.dumps(expected(), indent=1, ensure_ascii=True)
    (directory / f"{NAME}.expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_golden_runs(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden")
