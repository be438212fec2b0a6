"""One small dataset that has everything an exporter can stumble over, and what it holds, row by row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.datasets import Key, read_rows
from models.rewards import write_rewards

from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, Retry, create_manifest
from rollgen.format.writer import build_row_groups, footer_metadata, manifest_schema, write_parquet
from rollgen.rollouts import Completion

SAMPLES = 4
PROMPTS = 6
RETRIED = (1, 2)
"""Prompt and sample of which generation 1 lies in another shard than the rest of its group."""


@pytest.fixture
def write_odd(
    tmp_path: Path,
    make_completion: Callable[..., Completion],
    make_manifest: Callable[..., Manifest],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Path]:
    """`write_odd(**features)`: six prompts of 1 to 5 tokens, four samples each, of 1 to 12 tokens, with rewards.

    Supports have 1 to 12 ids, where top_k is 8; one is [3, 511], of a vocabulary of 512. Row groups hold some 20
    tokens, so that most groups lie in several; one sample was made again. Features:

    temperatures       (0.75,): one after the other is that of a prompt
    top_p_only         rows that are truncated without a top_k
    untruncated        (): numbers of prompts whose samples have no supports
    support_logprobs, extras    the optional columns
    """
    monkeypatch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 20)

    def write(
        *,
        temperatures: tuple[float, ...] = (0.75,),
        top_p_only: bool = False,
        untruncated: tuple[int, ...] = (),
        support_logprobs: bool = False,
        extras: bool = False,
    ) -> Path:
        def make(prompt: int, sample: int, generation: int = 0) -> Completion:
            completion = make_completion(
                prompt,
                sample,
                tokens=1 + (5 * prompt + 3 * sample + generation) % 12,
                full=prompt in untruncated,
                support_logprobs=support_logprobs,
                extras=extras,
                generation=generation,
                finish_reason=("stop", "length", "repetition")[(prompt + sample) % 3],
            )
            sampling = replace(completion.sampling, temperature=temperatures[prompt % len(temperatures)])
            if top_p_only:
                sampling = replace(sampling, top_k=0)
            made = replace(completion, sampling=sampling)
            return at_the_edge(made) if (prompt, sample) == (0, 0) and 0 not in untruncated else made

        retry = Retry(generation=1, started_at="", where={}, max_tokens=99, samples=1)
        manifest = make_manifest(support_logprobs=support_logprobs, extras=extras).with_retry(retry)
        first = [make(prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)]
        directory = tmp_path / "dataset"
        write_shards(directory, manifest, [first, [make(*RETRIED, generation=1)]])
        write_rewards(directory, "correct", lambda row: reward_of(key_of(row)))
        return directory

    return write


def at_the_edge(completion: Completion) -> Completion:
    """The same with one token, the largest id of the vocabulary, drawn from [3, 511]."""
    stored = completion.support_logprobs is not None
    return replace(
        completion,
        token_ids=np.array([511], np.int32),
        logprobs=np.log(np.array([0.75], np.float32)),
        mask_ids=np.array([3, 511], np.int32),
        mask_offsets=np.array([0, 2]),
        support_logprobs=np.log(np.array([0.25, 0.75], np.float32)) if stored else None,
    )


def write_shards(directory: Path, manifest: Manifest, shards: list[list[Completion]]) -> None:
    """A shard of each list of rows."""
    directory.mkdir()
    assert create_manifest(directory, manifest)
    schema = manifest_schema(manifest).with_metadata(footer_metadata(manifest))
    with WriterSlot(directory, "w0") as slot:
        for rows in shards:
            temporary = slot.temporary()
            write_parquet(temporary, build_row_groups(rows, schema), schema)
            counts = {
                "tokens": sum(len(row.token_ids) for row in rows),
                "mask_ids": sum(len(row.mask_ids) for row in rows),
            }
            slot.append(slot.publish(temporary, rows=len(rows), **counts))
            temporary.unlink()


def key_of(row: dict[str, Any]) -> Key:
    return row["prompt_id"], row["sample_index"], row["generation"]


def reward_of(key: Key) -> float:
    """0 to 3 by sample; all samples of p4 have the same, so that they teach nothing."""
    prompt_id, sample, generation = key
    return 1.0 if prompt_id == "p4" else float(sample + generation) / 3


@pytest.fixture
def current() -> Callable[[Path], dict[tuple[str, int], dict[str, Any]]]:
    """`current(directory)`: the latest row of each sample by (prompt_id, sample_index), as pyarrow reads it."""

    def read(directory: Path) -> dict[tuple[str, int], dict[str, Any]]:
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for (prompt_id, sample, _), row in sorted(read_rows(directory).items()):
            reward = reward_of(key_of(row))
            rows[prompt_id, sample] = row | {"reward": reward}  # in the order of generations: the last one stays
        groups = {name: [row["reward"] for (of, _), row in rows.items() if of == name] for name, _ in rows}
        for (prompt_id, _), row in rows.items():
            row["advantage"] = row["reward"] - sum(groups[prompt_id]) / len(groups[prompt_id])
        return rows

    return read


@pytest.fixture
def code_of() -> Callable[[str], str]:
    """`code_of("verl")`: the Python of that section of docs/export.md, which users are to run."""

    def find(section: str) -> str:
        page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
        text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
        (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        return str(code)

    return find
