"""What real vLLM sampled, read back with every reader and recomputed with the model itself.

One dataset for all: the tiny model in float32, prompts of every kind, some untruncated, support logprobs stored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from models.readers import READERS, with_the_loader
from transformers import AutoModelForCausalLM

import rollgen as rg
from rollgen.rollouts import sample_seed
from rollgen.verify.recompute import recompute

pytestmark = pytest.mark.vllm

TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.7, 40, 0.9, 0.01
VOCAB_SIZE = 512
ROWS = [
    {"id": "chat", "messages": [{"role": "user", "content": "What is the sum of seven and five?"}], "answer": 12},
    {"id": "text", "prompt": "The sea is \u2028 wide \U0001f30a"},
    {"id": "ids", "prompt_token_ids": [0, 17, 300, 4]},
    {"id": "full", "prompt": "The wind", "top_k": 0, "top_p": 1, "min_p": 0},
    {"id": "narrow", "prompt": "The dog", "top_k": 1, "top_p": 1, "min_p": 0},
    {"id": "stops", "prompt": "The fox", "stop": ["e"], "max_tokens": 64, "n": 4},
    {"id": "forced", "prompt": "The end", "stop_token_ids": list(range(100, 400))},
    {"prompt": "no id"},
    {"prompt": "no id"},
]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, write_prompts: Any, rollgen: Any) -> Path:
    """9 prompts, 2 samples each but for one with 4: 20 rows of at most 24 tokens (64 for that one)."""
    directory = tmp_path_factory.mktemp("sampling")
    prompts = write_prompts(directory / "prompts.jsonl", ROWS)
    options = {
        "model": tiny_model,
        "out": directory / "out",
        "dtype": "float32",
        "n": 2,
        "temperature": TEMPERATURE,
        "top-k": TOP_K,
        "top-p": TOP_P,
        "min-p": MIN_P,
        "max-tokens": 24,
        "seed": 3,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    rollgen("generate", prompts, *flags, "--support-logprobs")
    return directory / "out"


@pytest.fixture(scope="module")
def rows(dataset: Path) -> list[Row]:
    """All rows as plain Python, sorted by key."""
    table = [row for file in sorted(dataset.glob("data/*.parquet")) for row in pq.read_table(file).to_pylist()]
    return sorted(table, key=lambda row: (row["prompt_index"], row["sample_index"]))


def test_every_planned_sample_is_there_once(rows: list[Row]) -> None:
    """20 rows: 8 prompts x 2 + 1 prompt x 4; prompts without an id got one each, though they are equal."""
    keys = [(row["prompt_id"], row["sample_index"]) for row in rows]
    assert len(keys) == len(set(keys)) == 20
    ids = [row["prompt_id"] for row in rows]
    assert ids[0] == "chat"
    assert ids[-1] != ids[-3]
    assert ids[-1].rsplit("-", 1)[0] == ids[-3].rsplit("-", 1)[0]


def test_every_invariant_holds_on_every_token(rows: list[Row]) -> None:
    """The promises of the format, checked here in plain Python and not by the code that wrote them."""
    tokens = 0
    for row in rows:
        length = row["response_length"]
        assert length == len(row["token_ids"]) == len(row["logprobs"]) == len(row["sampling_mask"]) >= 1
        assert row["prompt_length"] == len(row["prompt_token_ids"])
        assert row["seed"] == sample_seed(3, row["prompt_id"], row["sample_index"])
        assert row["finish_reason"] in ("stop", "length")
        assert row["replayable"]
        for token, logprob, mask, support in zip(
            row["token_ids"], row["logprobs"], row["sampling_mask"], row["support_logprobs"], strict=True
        ):
            tokens += 1
            assert math.isfinite(logprob)
            assert logprob <= 0
            if row["prompt_id"] == "full":
                assert mask is None
                assert support is None
                continue
            assert mask == sorted(set(mask))
            assert 0 <= mask[0] <= mask[-1] < VOCAB_SIZE
            assert token in mask
            assert support[mask.index(token)] == logprob
            assert math.isclose(sum(map(math.exp, support)), 1, abs_tol=1e-5)
            if len(mask) == 1:
                assert logprob == 0
    assert tokens > 200


def test_rows_carry_what_was_asked(rows: list[Row]) -> None:
    """Effective sampling, metadata and stops of each kind of prompt."""
    by_id: dict[str, list[Row]] = {}
    for row in rows:
        by_id.setdefault(row["prompt_id"], []).append(row)
    assert json.loads(by_id["chat"][0]["metadata"]) == {"answer": 12}
    assert by_id["text"][0]["prompt"] == "The sea is \u2028 wide \U0001f30a"
    assert by_id["ids"][0]["prompt_token_ids"] == [0, 17, 300, 4]
    assert by_id["ids"][0]["prompt"] is None
    assert by_id["full"][0]["top_k"] == 0
    assert by_id["chat"][0]["temperature"] == np.float32(TEMPERATURE)
    assert all(len(mask) == 1 for row in by_id["narrow"] for mask in row["sampling_mask"])
    for row in by_id["stops"]:
        assert row["finish_reason"] == "length" or row["stop_reason"] == '"e"'
        assert ("e" in row["text"]) == (row["finish_reason"] == "stop"), "text is the ids decoded, stop string and all"
    assert {row["stop_reason"] for row in by_id["forced"]} <= {str(token) for token in range(100, 400)} | {None}
    assert any(row["stop_reason"] for row in by_id["forced"])


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_finds_what_the_loader_finds(dataset: Path, reader: str) -> None:
    """Hugging Face datasets, Polars, DuckDB, pandas and pyarrow on keys, ids, logprobs and masks, nulls among them."""
    READERS[reader](dataset).assert_equals(with_the_loader(dataset))


def test_the_loader_finds_what_pyarrow_finds(dataset: Path, rows: list[Row]) -> None:
    """Token by token, in Python."""
    ds = rg.RolloutDataset(dataset)
    assert len(ds) == len(rows)
    loaded = sorted((ds[index] for index in range(len(ds))), key=lambda r: (r.prompt_id, r.sample_index))
    for rollout, row in zip(loaded, sorted(rows, key=lambda r: (r["prompt_id"], r["sample_index"])), strict=True):
        assert rollout.token_ids.tolist() == row["token_ids"]
        assert rollout.logprobs.tolist() == row["logprobs"]
        masks = [rollout.support[t : t + 1].ids.tolist() for t in range(len(rollout.support))]
        assert masks == [mask or [] for mask in row["sampling_mask"]]


def test_supports_and_logprobs_are_the_models_own(rows: list[Row], tiny_model: Path) -> None:
    """A forward pass of the model gives every stored logprob to 1e-4, and truncating its logits gives the supports.

    vLLM's order: temperature, min_p, top_k, top_p. A support may differ only by ids within 1e-4 of the cut.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for row in rows:
        sequence = torch.tensor([row["prompt_token_ids"] + row["token_ids"]])
        with torch.no_grad():
            logits = model(sequence).logits[0, row["prompt_length"] - 1 : -1].double() / TEMPERATURE
        for step, token, logprob, mask in zip(
            logits, row["token_ids"], row["logprobs"], row["sampling_mask"], strict=True
        ):
            kept = range(VOCAB_SIZE) if mask is None else mask
            expected = step[token] - step[list(kept)].logsumexp(0)
            assert logprob == pytest.approx(expected.item(), abs=1e-4)
            if row["prompt_id"] not in ("full", "narrow"):
                certain, possible = _truncate(step, -1e-4), _truncate(step, 1e-4)
                assert certain <= set(mask) <= possible


def test_recomputed_kl_is_exact(dataset: Path, tiny_model: Path) -> None:
    """Support logprobs are stored, but not for two untruncated samples. Equal policies are 0 nats apart."""
    found = recompute(dataset, str(tiny_model))
    assert (found.samples, found.same_checkpoint, found.problem()) == (20, True, None)
    assert found.kl_estimator == "mixed"
    assert abs(found.kl) < 1e-6
    assert found.with_masks.max_abs < 1e-4
    assert found.without_masks.mean_ratio < 0.95


def _truncate(logits: torch.Tensor, slack: float) -> set[int]:
    """Ids that survive min_p, top_k and top_p, each cut moved by `slack`: negative keeps only the certain ones."""
    scores, ids = logits.sort(descending=True)
    keep = scores >= scores[0] + math.log(MIN_P) - slack
    keep &= scores >= scores[TOP_K - 1] - slack
    scores = scores.masked_fill(~(scores >= scores[0] + math.log(MIN_P)), -math.inf)
    scores = scores.masked_fill(~(scores >= scores[TOP_K - 1]), -math.inf)
    probabilities = scores.softmax(0)
    keep &= probabilities.cumsum(0) - probabilities < TOP_P + slack
    return set(ids[keep].tolist())


def test_inspect_agrees_with_the_rows(dataset: Path, rows: list[Row], rollgen: Any) -> None:
    """Counts and shares of `rollgen inspect --json` against plain Python."""
    figures = json.loads(rollgen("inspect", dataset, "--json").stdout)
    sizes = [len(mask) for row in rows for mask in row["sampling_mask"] if mask is not None]
    assert figures["plan"]["samples"] == figures["samples"]["samples"] == 20
    assert figures["plan"]["owed"] == 0
    assert figures["samples"]["generated_tokens"] == sum(row["response_length"] for row in rows)
    assert figures["support"]["ids"] == sum(sizes)
    assert figures["support"]["singletons"] == sizes.count(1)
    assert figures["support"]["size"]["max"] == max(sizes)
