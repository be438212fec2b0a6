"""Write the golden datasets of format v1 and what a reader must find in them.

    python schema/conformance/make_golden.py [DIRECTORY]     (default: `golden/` beside this file)

`masks/` and `support_logprobs/` are the same five samples in format 1.0, without and with the optional column;
`generations/` is of format 1.1 and has a retry; `extras/` is of format 1.2 and says which weights and experts made
these five: weights that change at one token or at each, a layer without experts, more experts than a byte numbers, a
prompt of which each token has its own; `rewards/` is of format 1.3, the first five samples and what scorers gave them.
`<name>.expected.json` holds their rows as plain JSON, taken from the literals below and not read back; float32 values
are exact. The rows cover what readers get wrong: a singleton, a set of ties larger than top_k, an id beyond the
tokenizer, untruncated samples (null supports), NUL and emoji in texts, a stop token id and a stop string of digits, a
null in every nullable column, a row that cannot be replayed, two shards, a row that another supersedes. The plan also
holds a tombstone and a sample that is owed, the retry one that is owed too.

Committed files are made once for each MINOR and stay: a later reader must read them.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import Failure
from rollgen.format.journal import file_sha256
from rollgen.format.jsonlines import append_line
from rollgen.format.manifest import (
    Attempt,
    EngineRecord,
    Manifest,
    ModelRecord,
    PromptSource,
    Retry,
    RoutedExperts,
    create_manifest,
    replace_manifest,
)
from rollgen.format.retries import RetryList
from rollgen.format.reward_writer import RewardWriter
from rollgen.format.rewards import PartRecord, ScorerRecord, part_schema
from rollgen.format.schema import FAILURES_DIR, PLAN_FILE, PLAN_SCHEMA, REWARDS_DIR, has_generation, retry_file
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion, Prompt, Sampling, WeightVersions, sample_seed

VOCAB_SIZE = 64
TOKENIZER_VOCAB_SIZE = 60
EOS = 2
TIME = "2026-01-02T03:04:05+00:00"
WRITER = "w0"

Token = tuple[int, dict[int, float]]
"""The sampled id, and the probability of each id of its support (of none, where sampling does not truncate)."""

TRUNCATED = Sampling(temperature=0.8, top_p=0.95, top_k=4, min_p=0.0, max_tokens=5, stop=("2",), stop_token_ids=(9,))
UNTRUNCATED = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=3, stop=("2",))
CONTEXT = 16
RETRY_MAX_TOKENS = 13
"""More than the context leaves after the prompt of "by-ids", which is 16 - 4."""
MESSAGES = json.dumps([{"role": "user", "content": "Héllo 👋🏽"}], ensure_ascii=False)
METADATA = '{"answer": 12345678901234567890123, "note": "\\u0000"}'


def prompts() -> list[Prompt]:
    """The plan: three usable prompts, then a tombstone."""
    ids = [np.array(ids, np.int32) for ids in ([1, 5, 6], [1, 7], [1, 8, 8, 8], [])]
    return [
        Prompt("emoji-😀", 0, ids[0], TRUNCATED, n=2, seed=0, prompt="NUL \x00 and 😀", metadata=METADATA),
        Prompt("7", 1, ids[1], UNTRUNCATED, n=3, seed=11, prompt=MESSAGES),
        Prompt("by-ids", 2, ids[2], TRUNCATED, n=1, seed=0),
        Prompt("bad", 3, ids[3], TRUNCATED, n=1, seed=0, error="prompts.jsonl:4: no prompt; give messages or prompt"),
    ]


def completions() -> list[Completion]:
    """The stored samples; sample 2 of prompt "7" is owed."""
    emoji, seven, by_ids, _ = prompts()
    pair = {10: 0.75, 33: 0.25}
    ties = dict.fromkeys((3, 10, 11, 20, 21, 63), 1 / 6)  # six ids though top_k is 4, one beyond the tokenizer
    return [
        _completion(emoji, 0, [(40, {40: 1.0}), (10, pair), (21, ties), (EOS, {EOS: 1.0})], text="a😀\x00"),
        _completion(emoji, 1, [(9, {0: 0.125, 9: 0.5, 12: 0.375})], stop_reason="9", text=""),
        _completion(seven, 0, [(50, {}), (12, {})], logprobs=[-1.5, -0.25], stop_reason='"2"', text="!2"),
        _completion(seven, 1, [(0, {})] * 3, logprobs=[-4.0] * 3, finish="repetition", text="\n\n\n", replayable=False),
        _completion(by_ids, 0, [(63, ties), (30, {30: 1.0}), *[(31, {30: 0.5, 31: 0.5})] * 3], finish="length"),
    ]


def completions_with_extras() -> list[Completion]:
    """The same samples, with weights that change, and the experts of all tokens but the last."""
    versions = [
        WeightVersions(("step 1", "step 2 😀", "step 1"), (0, 1, 3)),
        WeightVersions(("step 2 😀",), (0,)),
        WeightVersions(("step 2 😀", "\x00"), (0, 1)),
        WeightVersions(("7", "7", "8"), (0, 1, 2)),
        WeightVersions(("8",), (0,)),
    ]
    return [
        replace(completion, weight_versions=told, routed_experts=_experts(completion))
        for completion, told in zip(completions(), versions, strict=True)
    ]


def _experts(completion: Completion) -> np.ndarray:
    """int16 [P + T - 1, 3, 2]: none in layer 0, in layer 1 of the token's place, in layer 2 of the token itself."""
    tokens = np.concatenate([completion.prompt_token_ids, completion.token_ids])[:-1]
    place = np.arange(len(tokens))
    layers = [np.stack([place * 0, place * 0]), np.stack([place, 299 - place]), np.stack([tokens, tokens + 200])]
    return np.stack(layers).transpose(2, 0, 1).astype(np.int16)


def cut_completion() -> Completion:
    """Sample 2 of prompt "7", cut at max_tokens: with it nothing of the plan is owed, and two can be retried."""
    return _completion(prompts()[1], 2, [(5, {})] * 3, logprobs=[-2.0] * 3, finish="length", text="%%%")


def retry_list() -> RetryList:
    """Generation 1: both samples that were cut."""
    return RetryList(1, np.array([1, 2]), np.array([2, 0], np.int32), np.array([RETRY_MAX_TOKENS, 12], np.int32))


def retried_completion() -> Completion:
    """The only sample of "by-ids" again: the same tokens, and two more until its end."""
    prompt = prompts()[2]
    longer = replace(prompt, sampling=replace(prompt.sampling, max_tokens=12))
    ties = dict.fromkeys((3, 10, 11, 20, 21, 63), 1 / 6)
    tokens = [(63, ties), (30, {30: 1.0}), *[(31, {30: 0.5, 31: 0.5})] * 3, (30, {30: 0.5, 31: 0.5}), (EOS, {EOS: 1.0})]
    return replace(_completion(longer, 0, tokens, text="again"), generation=1)


def reward_parts() -> list[tuple[PartRecord, list[Rewarded]]]:
    """What files of rewards hold.

    "correct" was scored, then scored again, which is complete: its first file has not been removed yet, and another
    rescoring has begun. Sample 1 could not be scored at first; sample 3 was made again since. Nothing of "other" could
    be scored.
    """
    old, new, other = (ScorerRecord(f"scorers:{name}", digest(name)) for name in ("old", "new", "other"))
    died = "RuntimeError: no"
    return [
        (_record("correct", 0, 1, old), [Rewarded(row, 9.0) for row in range(5)]),
        (_record("correct", 1, 2, new), [Rewarded(0, 1.0), Rewarded(1, None, error=died)]),
        (
            _record("correct", 2, 2, new, "length", "style"),
            [Rewarded(2, 0.5, {"style": 0.1}), Rewarded(3, 0.25, crc=7)],
        ),
        (_record("correct", 3, 2, new, "length", closes=True), [Rewarded(1, 0.0, {"length": -2.0}), Rewarded(4, -1.5)]),
        (_record("correct", 4, 3, old), [Rewarded(0, 7.0)]),
        (_record("other", 0, 1, other), [Rewarded(0, None, error=died)]),
    ]


EXPECTED_REWARDS = {
    "correct": {
        "reward": [1.0, 0.0, 0.5, None, -1.5],
        "length": [None, -2.0, None, None, None],
        "style": [None, None, 0.1, None, None],
    },
    "other": {"reward": [None] * 5},
}
"""Of the rows of `completions`, by name and column."""


class Rewarded(NamedTuple):
    """A row of a file of rewards."""

    row: int
    """Number of the completion."""
    reward: float | None
    further: dict[str, float] | None = None
    error: str | None = None
    crc: int | None = None
    """None: that of its tokens."""


def _record(
    name: str, sequence: int, scoring: int, scorer: ScorerRecord, *columns: str, closes: bool = False
) -> PartRecord:
    return PartRecord(name, sequence, scoring, closes=closes, rows=0, columns=list(columns), scorer=scorer)


def write_rewards(directory: Path, manifest: Manifest) -> None:
    """All files of rewards, by the writer of rewards, which numbers them."""
    for record, rewarded in reward_parts():
        with RewardWriter(directory, record.name, manifest.config_digest) as writer:
            table = pa.Table.from_pylist([_reward_row(each) for each in rewarded], schema=part_schema(record.columns))
            writer.write(table, record.columns, record.scorer, scoring=record.scoring, closes=record.closes)
    for lock in (directory / REWARDS_DIR).glob("*.lock"):
        lock.unlink()


def _reward_row(rewarded: Rewarded) -> dict[str, Any]:
    completion = completions()[rewarded.row]
    ids = completion.token_ids.tolist()
    crc = zlib.crc32(struct.pack(f"<{len(ids)}i", *ids)) if rewarded.crc is None else rewarded.crc
    return {
        "prompt_id": completion.prompt_id,
        "prompt_index": completion.prompt_index,
        "sample_index": completion.sample_index,
        "generation": 0,
        "tokens_crc32": crc,
        "reward": rewarded.reward,
        "error": rewarded.error,
        **(rewarded.further or {}),
    }


class Golden(NamedTuple):
    """One dataset."""

    format_version: str
    support_logprobs: bool
    extras: bool
    """Weight versions and routed experts."""
    completions: list[Completion]
    retried: list[Completion]
    failures: list[Failure]
    owed: list[list[Any]]
    """prompt_id and sample_index; since 1.1 also generation."""
    rewards: bool = False
    """Whether it has those of `reward_parts`."""

    @property
    def rows(self) -> list[Completion]:
        """In the order of the shards."""
        return [*self.completions, *self.retried]

    @property
    def columns(self) -> dict[str, bool]:
        """Whether rows have these."""
        return {
            "support_logprobs": self.support_logprobs,
            "extras": self.extras,
            "generation": has_generation(self.format_version),
        }


def datasets() -> dict[str, Golden]:
    """By name."""
    failures = [
        Failure("bad", 3, 0, "input", "prompts.jsonl:4: no prompt; give messages or prompt", TIME),
        Failure("emoji-😀", 0, 1, "capture", "token 0: incomplete support", TIME),  # stored since
    ]
    died = Failure("7", 1, 2, "engine", "the engine died", TIME)
    first = {"completions": completions(), "retried": [], "failures": [*failures, died], "owed": [["7", 2]]}
    return {
        "masks": Golden("1.0", support_logprobs=False, extras=False, **first),
        "support_logprobs": Golden("1.0", support_logprobs=True, extras=False, **first),
        "generations": Golden(
            "1.1",
            support_logprobs=False,
            extras=False,
            completions=sorted([*completions(), cut_completion()], key=lambda c: (c.prompt_index, c.sample_index)),
            retried=[retried_completion()],
            failures=[*failures, replace(died, generation=1)],
            owed=[["7", 2, 1]],
        ),
        "extras": Golden(
            "1.2",
            support_logprobs=False,
            extras=True,
            **first | {"completions": completions_with_extras(), "owed": [["7", 2, 0]]},
        ),
        "rewards": Golden("1.3", support_logprobs=False, extras=False, **first | {"owed": [["7", 2, 0]]}, rewards=True),
    }


def _completion(
    prompt: Prompt,
    sample_index: int,
    tokens: list[Token],
    *,
    logprobs: list[float] | None = None,
    finish: str = "stop",
    stop_reason: str | None = None,
    text: str | None = None,
    replayable: bool = True,
) -> Completion:
    """One sample of `prompt`; `logprobs` only where the tokens carry no support."""
    supports = [support for _, support in tokens]
    return Completion(
        prompt_id=prompt.prompt_id,
        sample_index=sample_index,
        prompt_index=prompt.prompt_index,
        prompt_token_ids=prompt.token_ids,
        token_ids=np.array([token for token, _ in tokens], np.int32),
        logprobs=np.array(logprobs or [math.log(support[token]) for token, support in tokens], np.float32),
        mask_ids=np.array([id_ for support in supports for id_ in support], np.int32),
        mask_offsets=np.cumsum([0, *map(len, supports)], dtype=np.int64),
        support_logprobs=np.array([math.log(p) for support in supports for p in support.values()], np.float32),
        finish_reason=finish,
        sampling=prompt.sampling,
        seed=sample_seed(prompt.seed, prompt.prompt_id, sample_index),
        stop_reason=stop_reason,
        replayable=replayable,
        text=text,
        prompt=prompt.prompt,
        metadata=prompt.metadata,
    )


def expected_row(completion: Completion, *, support_logprobs: bool, extras: bool, generation: bool) -> dict[str, Any]:
    """A row as plain values: every column of the shard, in order."""
    sampling, offsets = completion.sampling, completion.mask_offsets.tolist()
    spans = [slice(*span) if span[0] < span[1] else None for span in itertools.pairwise(offsets)]

    def per_token(name: str) -> list[Any]:
        return [None if span is None else getattr(completion, name)[span].tolist() for span in spans]

    support = {"support_logprobs": per_token("support_logprobs")} if support_logprobs else {}
    float32 = {name: float(np.float32(getattr(sampling, name))) for name in ("temperature", "top_p", "min_p")}
    return {
        "prompt_id": completion.prompt_id,
        "sample_index": completion.sample_index,
        **({"generation": completion.generation} if generation else {}),
        "prompt_index": completion.prompt_index,
        "prompt_length": len(completion.prompt_token_ids),
        "response_length": len(completion.token_ids),
        "prompt_token_ids": completion.prompt_token_ids.tolist(),
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "sampling_mask": per_token("mask_ids"),
        **support,
        **(expected_extras(completion) if extras else {}),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        **float32,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": completion.seed,
        "replayable": completion.replayable,
        "text": completion.text,
        "prompt": completion.prompt,
        "metadata": completion.metadata,
    }


def expected_extras(completion: Completion) -> dict[str, Any]:
    """The optional columns of weights and experts."""
    versions, experts = completion.weight_versions, completion.routed_experts
    return {
        "weight_versions": list(versions.versions),
        "weight_version_starts": list(versions.starts),
        "routed_experts": experts.flatten().tolist(),
    }


def expected_plan_row(prompt: Prompt) -> dict[str, Any]:
    """A row of the plan as plain values."""
    sampling = prompt.sampling
    return {
        "prompt_id": prompt.prompt_id,
        "prompt_index": prompt.prompt_index,
        "n": prompt.n,
        "seed": prompt.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "prompt_token_ids": prompt.token_ids.tolist(),
        "prompt": prompt.prompt,
        "metadata": prompt.metadata,
        "error": prompt.error,
    }


def golden_manifest(*, format_version: str, support_logprobs: bool, extras: bool = False) -> Manifest:
    """A manifest with made-up provenance."""
    identity = {"top_k": 4, "top_p": 0.95, "temperature": 0.8, "seed": 0, "support_logprobs": support_logprobs}
    engine = EngineRecord(name="golden", version="1", device="none", versions={}, processors="min_p, top_k, top_p")
    attempt = Attempt(
        started_at=TIME,
        rollgen_version="0",
        n=1,
        limit=None,
        prompts=[PromptSource(name="prompts.jsonl", bytes=0, sha256=digest("prompts"))],
        operational={},
        engine=engine,
    )
    return Manifest(
        format_version=format_version,
        created_at=TIME,
        config_digest=digest(identity),
        identity=identity,
        capture="logprobs",
        support_logprobs=support_logprobs,
        vocab_size=VOCAB_SIZE,
        tokenizer_vocab_size=TOKENIZER_VOCAB_SIZE,
        model=ModelRecord(
            name="golden", revision=None, fingerprint=digest("model"), dtype="float32", context_length=CONTEXT
        ),
        tokenizer_sha256=digest("tokenizer"),
        attempts=[attempt],
        weight_versions=extras,
        routed_experts=RoutedExperts(layers=3, top_k=2, experts=300) if extras else None,
    )


def write_dataset(directory: Path, golden: Golden) -> None:
    """One golden dataset: prompt 0 in the first shard, the other prompts in the second, retried samples in a third."""
    directory.mkdir(parents=True)
    manifest = golden_manifest(
        format_version=golden.format_version, support_logprobs=golden.support_logprobs, extras=golden.extras
    )
    plan = pa.Table.from_pylist([expected_plan_row(prompt) for prompt in prompts()], schema=PLAN_SCHEMA)
    pq.write_table(plan, directory / PLAN_FILE, compression="zstd", write_page_checksum=True)
    if has_generation(golden.format_version):
        manifest = manifest.model_copy(update={"plan_sha256": file_sha256(directory / PLAN_FILE)})
    create_manifest(directory, manifest)
    with WriterSlot(directory, WRITER) as slot:
        with ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
            for completion in golden.completions:
                if completion.prompt_index == 1 and completion.sample_index == 0:
                    writer.flush()
                writer.add(completion)
        if golden.retried:
            write_retry(slot, manifest, golden.retried)
    if golden.rewards:
        write_rewards(directory, manifest)
    for lock in (directory / "journal").glob("*.lock"):
        lock.unlink()
    (directory / FAILURES_DIR).mkdir()
    for failure in golden.failures:
        append_line(directory / FAILURES_DIR / f"{WRITER}.jsonl", failure, durable=False)


def write_retry(slot: WriterSlot, manifest: Manifest, retried: list[Completion]) -> None:
    """The list, then the manifest that names it, then the rows."""
    retries = retry_list()
    retries.write(slot.directory / retry_file(1))
    retry = Retry(
        generation=1,
        started_at=TIME,
        where={"finish_reason": "length"},
        max_tokens=RETRY_MAX_TOKENS,
        samples=len(retries),
        sha256=file_sha256(slot.directory / retry_file(1)),
    )
    manifest = manifest.with_retry(retry)
    replace_manifest(slot.directory, manifest)
    with ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for completion in retried:
            writer.add(completion)


def expected(golden: Golden) -> dict[str, Any]:
    """What a reader must find."""
    values = {
        "rows": [expected_row(completion, **golden.columns) for completion in golden.rows],
        "plan": [expected_plan_row(prompt) for prompt in prompts()],
        "owed": golden.owed,
    }
    if golden.rewards:
        values["rewards"] = EXPECTED_REWARDS
    if golden.retried:
        again = {(completion.prompt_id, completion.sample_index) for completion in golden.retried}
        retries = retry_list()
        columns = {name: getattr(retries, name).tolist() for name in ("prompt_index", "sample_index", "max_tokens")}
        values["retries"] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        values["superseded"] = [i for i, c in enumerate(golden.completions) if (c.prompt_id, c.sample_index) in again]
    return values


def write_golden(directory: Path) -> None:
    """All golden datasets and their expectations, replacing those in `directory`."""
    for name, golden in datasets().items():
        shutil.rmtree(directory / name, ignore_errors=True)
        write_dataset(directory / name, golden)
        text = json.dumps(expected(golden), indent=1, ensure_ascii=True)
        (directory / f"{name}.expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden")
