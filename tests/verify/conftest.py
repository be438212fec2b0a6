"""Datasets to verify, to damage and repair, and to recompute.

Of those that are wrong in one way the journal vouches for the shards, so that only what is meant to be is found.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models.damage import RETRY, SHARDS
from models.datasets import read_rows
from models.runs import Runs
from models.sampled import KEPT, VOCAB_SIZE, Row, log_softmax

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import JournalLine, file_sha256, footer_sha256, list_shards
from rollgen.format.manifest import PLANLESS, Manifest, Retry, create_manifest, read_manifest, replace_manifest
from rollgen.format.reader import count_mask_ids
from rollgen.format.retries import RetryList
from rollgen.format.schema import retry_file, shard_schema
from rollgen.format.writer import ShardWriter, build_row_groups, footer_metadata, write_parquet
from rollgen.prompts.fingerprint import directory_fingerprint
from rollgen.rollouts import Completion, Sampling
from rollgen.verify.dataset import verify_dataset

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TIME = "2026-01-02T03:04:05+00:00"
RETRIED_TOKENS = 96

Rows = list[dict[str, Any]]
Rewrite = Callable[..., None]


def as_they_are(rows: Rows) -> Rows:
    return rows


@pytest.fixture
def directory(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Path]) -> Path:
    """A sound dataset of two shards of six samples, three prompts each, of eight tokens; `w0` wrote them."""
    original = tmp_path_factory.getbasetemp() / "sound-dataset"
    if not original.exists():
        make_dataset(original)
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def nobody() -> Callable[[], AbstractContextManager[None]]:
    """`with nobody():` root has no rights beyond those of others; who is not root has none to lose."""

    @contextmanager
    def become() -> Iterator[None]:
        user = os.geteuid()
        if user == 0:
            os.seteuid(65_534)
        try:
            yield
        finally:
            os.seteuid(user)

    return become


@pytest.fixture
def rewrite() -> Rewrite:
    """`rewrite(shard, edit, rows_a_group=100, footer={})`: a committed shard holds other rows, which its line says."""
    return rewrite_shard


@pytest.fixture
def set_line() -> Callable[..., None]:
    """`set_line(shard, **changes)`: its journal line says something else; without changes, what the file is."""
    return set_journal_line


@pytest.fixture
def add_retry(make_completion: Callable[..., Completion]) -> Callable[[Path], Path]:
    """`add_retry(directory)`: samples (0, 0) and (1, 1) of a dataset are made again. Returns the list's file."""

    def add(directory: Path) -> Path:
        listed = RetryList(
            1,
            prompt_index=np.array([0, 1]),
            sample_index=np.array([0, 1], np.int32),
            max_tokens=np.full(2, RETRIED_TOKENS, np.int32),
        )
        path = directory / retry_file(1)
        listed.write(path)
        retry = Retry(
            generation=1,
            started_at=TIME,
            where={"finish_reason": "length"},
            max_tokens=RETRIED_TOKENS,
            samples=2,
            sha256=file_sha256(path),
        )
        manifest = read_manifest(directory).with_retry(retry)
        replace_manifest(directory, manifest)
        with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
            for key in ((0, 0), (1, 1)):
                completion = make_completion(*key, generation=1)
                sampling = replace(completion.sampling, max_tokens=RETRIED_TOKENS)
                writer.add(replace(completion, sampling=sampling))
        return path

    return add


@pytest.fixture(scope="module")
def origin(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of `models.damage` in `out/`, its prompts beside it, and in `older/` what an earlier start knew."""
    runs = Runs(tmp_path_factory.mktemp("origin"), tiny_model)
    runs.write_prompts(5, bad=[4])
    runs(on_bad_row="skip", limit=2)
    (runs.out.parent / "older").mkdir()
    for name in ("rollgen.json", "plan.parquet"):
        shutil.copy(runs.out / name, runs.out.parent / "older")
    runs(on_bad_row="skip", resume=True)
    runs(on_bad_row="skip", resume=True, **RETRY)
    assert [str(path.relative_to(runs.out)) for path in list_shards(runs.out)] == list(SHARDS)
    assert verify_dataset(runs.out).is_clean
    return runs.out.parent


@pytest.fixture
def copy(origin: Path, tmp_path: Path, tiny_model: Path) -> Runs:
    """A copy of it, to be damaged and to be resumed."""
    return Runs(Path(shutil.copytree(origin, tmp_path / "copy")), tiny_model)


@pytest.fixture(scope="module")
def rows(origin: Path) -> dict[Any, dict[str, Any]]:
    """Its rows by their keys."""
    return read_rows(origin / "out")


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> PreTrainedModel:
    """The tiny model in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def sample(oracle: PreTrainedModel) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """`sample(prompt, tokens, temperature, kept)`: ids of the `kept` most likely, int64 [T], and logits / T [T, V]."""
    import torch

    @functools.cache
    @torch.no_grad()
    def draw(prompt: tuple[int, ...], tokens: int, temperature: float, kept: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([*prompt, tokens])
        cache, inputs, chosen, steps = None, torch.tensor([prompt]), [], []
        for _ in range(tokens):
            output = oracle(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache, scaled = output.past_key_values, output.logits[0, -1].numpy() / temperature
            mask = np.sort(np.argsort(scaled)[-kept:])
            chosen.append(int(rng.choice(mask, p=np.exp(log_softmax(scaled[mask])))))
            inputs = torch.tensor([chosen[-1:]])
            steps.append(scaled)
        return np.array(chosen), np.array(steps)

    return draw


@pytest.fixture
def make_row(
    sample: Callable[..., tuple[np.ndarray, np.ndarray]], make_completion: Callable[..., Completion]
) -> Callable[..., Row]:
    """`make_row(index, tokens, noise=0.0, full=False)`: log-probabilities are of a policy that is `noise` away.

    Every second row has a temperature of 0.5, the others of 1.
    """

    def make(index: int, tokens: int, *, noise: float = 0.0, full: bool = False) -> Row:
        base = make_completion(index, 0, tokens=tokens)
        temperature, kept = 0.5 if index % 2 else 1.0, VOCAB_SIZE if full else KEPT
        token_ids, scaled = sample(tuple(base.prompt_token_ids.tolist()), tokens, temperature, kept)
        moved = scaled + np.random.default_rng(index).normal(0, noise, scaled.shape)
        masks = [np.sort(np.argsort(step)[-kept:]) for step in scaled]
        new = [log_softmax(step[mask]) for step, mask in zip(scaled, masks, strict=True)]
        old = [log_softmax(step[mask]) for step, mask in zip(moved, masks, strict=True)]
        at = [int(np.flatnonzero(mask == token)[0]) for mask, token in zip(masks, token_ids, strict=True)]
        sizes = [0 if full else len(mask) for mask in masks]
        completion = replace(
            base,
            token_ids=token_ids.astype(np.int32),
            logprobs=np.array([step[place] for step, place in zip(old, at, strict=True)], np.float32),
            mask_ids=np.concatenate([mask[:size] for mask, size in zip(masks, sizes, strict=True)]).astype(np.int32),
            mask_offsets=np.cumsum([0, *sizes]),
            support_logprobs=np.concatenate([s[:size] for s, size in zip(old, sizes, strict=True)]).astype(np.float32),
            sampling=Sampling(temperature=temperature, top_k=0 if full else KEPT, max_tokens=64),
        )
        return Row(
            completion,
            masked=np.array([step[place] for step, place in zip(new, at, strict=True)]),
            full=np.array([log_softmax(step)[token] for step, token in zip(scaled, token_ids, strict=True)]),
            kl=np.array([(np.exp(o) * (o - n)).sum() for o, n in zip(old, new, strict=True)]),
            score=np.array([step[place] - np.exp(step) @ step for step, place in zip(new, at, strict=True)]),
            variance=np.array([np.exp(step) @ (step - np.exp(step) @ step) ** 2 for step in new]),
        )

    return make


@pytest.fixture
def write_rows(
    tmp_path: Path, tiny_model: Path, make_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """`write_rows(completions, dtype="float32", support_logprobs=False)`: two shards, row groups of about 16 tokens.

    `sampling_arg` goes into the manifest.
    """
    monkeypatch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 16)

    def write(
        completions: list[Completion],
        *,
        dtype: str = "float32",
        support_logprobs: bool = False,
        sampling_arg: dict[str, Any] | None = None,
    ) -> Path:
        directory = tmp_path / "dataset"
        directory.mkdir()
        manifest = make_manifest(support_logprobs=support_logprobs)
        identity = manifest.identity | {"sampling_arg": sampling_arg or {}, PLANLESS: True}
        manifest = manifest.model_copy(update={"identity": identity, "config_digest": digest(identity)})
        model = manifest.model.model_copy(update={"fingerprint": directory_fingerprint(tiny_model), "dtype": dtype})
        manifest = manifest.model_copy(update={"model": model})
        assert create_manifest(directory, manifest)
        schema = shard_schema(support_logprobs=support_logprobs).with_metadata(footer_metadata(manifest))
        half = len(completions) // 2
        with WriterSlot(directory, "w0") as slot:
            for rows in (completions[:half], completions[half:]):
                temporary = slot.temporary()
                write_parquet(temporary, build_row_groups(rows, schema), schema)
                tokens, ids = (sum(len(part) for part in parts) for parts in zip(*map(sizes_of, rows), strict=True))
                slot.append(slot.publish(temporary, rows=len(rows), tokens=tokens, mask_ids=ids))
                temporary.unlink()
        return directory

    return write


@pytest.fixture
def changed_model(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """`changed_model(key=value, ...)`: a copy of the tiny model with another config.json."""

    def change(**changes: Any) -> Path:
        model = Path(shutil.copytree(tiny_model, tmp_path / "changed"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))
        return model

    return change


def rewrite_shard(
    path: Path,
    edit: Callable[[Rows], Rows] = as_they_are,
    *,
    rows_a_group: int = 100,
    footer: Mapping[bytes, bytes | None] | None = None,
) -> None:
    with pq.ParquetFile(path) as file:
        table, schema = file.read(), file.schema_arrow
    metadata = {key: value for key, value in (schema.metadata | (footer or {})).items() if value is not None}
    schema = schema.with_metadata(metadata)
    rows = edit(table.to_pylist())
    starts = range(0, len(rows), rows_a_group)
    write_parquet(path, [pa.Table.from_pylist(rows[start : start + rows_a_group], schema) for start in starts], schema)
    set_journal_line(path)


def set_journal_line(path: Path, **changes: Any) -> None:
    journal = path.parent.parent / "journal" / "w0.jsonl"
    lines = [json.loads(text) for text in journal.read_text().splitlines()]
    if not changes:
        with pq.ParquetFile(path) as file:
            table = file.read()
        changes = asdict(
            JournalLine(
                file=path.name,
                bytes=path.stat().st_size,
                sha256=file_sha256(path),
                footer_sha256=footer_sha256(path),
                rows=len(table),
                tokens=sum(map(len, table["token_ids"].to_pylist())),
                mask_ids=count_mask_ids(table),
            )
        )
    journal.write_text(
        "".join(json.dumps(line | (changes if line["file"] == path.name else {})) + "\n" for line in lines)
    )


def sizes_of(row: Completion) -> tuple[np.ndarray, np.ndarray]:
    return row.token_ids, row.mask_ids
