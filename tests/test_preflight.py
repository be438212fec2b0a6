"""What is known before a model loads: what a run's identity holds, which commands continue it, which engine may."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.fake_engine import FakeEngine
from models.runs import Runs
from models.tiny import make_tiny_model

from rollgen.config import EMBEDDED_MODEL, RunConfig, digest, field_key
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.manifest import read_manifest
from rollgen.preflight import Preflight, check_engine, identity_of, plan_run, resolve_model
from rollgen.prompts.plan import Plan


@pytest.fixture
def planned(runs: Runs, tmp_path: Path) -> Callable[..., Preflight]:
    """`planned(top_k=5)`: the preflight of the five prompts with these settings."""

    def plan(continued: Path | None = None, **settings: Any) -> Preflight:
        config = RunConfig.model_validate({"model": str(runs.model), "max_tokens": 8} | settings)
        return plan_run([runs.prompts], config, tmp_path / "plan.parquet", continued=continued)

    return plan


def identity(preflight: Preflight, **resolved: str) -> dict[str, Any]:
    """The identity of the run that may start."""
    return identity_of(preflight.config, preflight.model, **resolved)


def test_model_is_named_or_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag wins; without one, the model that `make model` made; else an error that names both ways."""
    monkeypatch.chdir(tmp_path)
    assert resolve_model(RunConfig(model="org/name")) == "org/name"
    with pytest.raises(UsageError, match=r"name one with --model \(or ROLLGEN_MODEL\), or .* `make model`"):
        resolve_model(RunConfig())
    EMBEDDED_MODEL.mkdir(parents=True)
    assert resolve_model(RunConfig()) == str(EMBEDDED_MODEL)


def test_plan_run_touches_only_the_plan(planned: Callable[..., Preflight], tmp_path: Path, runs: Runs) -> None:
    """A dry run is this and nothing more."""
    preflight = planned(n=3)
    assert preflight.plan_path == tmp_path / "plan.parquet"
    assert Plan(preflight.plan_path).samples == preflight.summary.samples == 15
    assert (preflight.replayable, preflight.stored, preflight.known_samples) == (True, None, 0)
    assert not runs.out.exists()


def test_settings_are_checked_before_the_model_is_read(runs: Runs, tmp_path: Path) -> None:
    """Cheap checks first: what cannot be replayed is refused although the model does not exist either."""
    config = RunConfig(model="/nowhere", sampling_arg={"presence_penalty": 1})
    with pytest.raises(UsageError, match="presence_penalty=1 cannot be replayed"):
        plan_run([runs.prompts], config, tmp_path / "plan.parquet")
    assert not (tmp_path / "plan.parquet").exists()


def test_prompts_are_looked_for_before_the_model(tmp_path: Path) -> None:
    """A model may have to be fetched, or a server be asked."""
    config = RunConfig(model="/nowhere")
    with pytest.raises(UsageError, match=r"absent\.jsonl: cannot read it"):
        plan_run([str(tmp_path / "absent.jsonl")], config, tmp_path / "plan.parquet")


def test_accepted_but_not_replayable(planned: Callable[..., Preflight]) -> None:
    """On request; the engine marks the rows."""
    assert planned(sampling_arg={"presence_penalty": 1}, allow_unreplayable=True).replayable is False


def test_exclusions_are_refused_where_nothing_truncates(planned: Callable[..., Preflight], runs: Runs) -> None:
    """One such prompt is enough; with truncation the same parameter is fine."""
    planned(sampling_arg={"min_tokens": 2})
    with runs.prompts.open("a") as file:
        file.write('{"prompt": "x", "top_k": 0, "top_p": 1}\n')
    with pytest.raises(UsageError, match="min_tokens: takes ids out of the vocabulary"):
        planned(sampling_arg={"min_tokens": 2})


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "auto"),
        ({"capture": "native"}, "native"),
        ({"capture": "logprobs"}, "logprobs"),
        ({"top_k": 0, "top_p": 1}, "none"),
        ({"top_k": 0, "top_p": 1, "capture": "logprobs"}, "none"),
    ],
)
def test_capture_wanted(planned: Callable[..., Preflight], settings: dict[str, Any], wanted: str) -> None:
    """Where nothing truncates there is nothing to capture, whatever is asked."""
    assert planned(**settings).capture_wanted == wanted


def test_identity_is_by_content(planned: Callable[..., Preflight], tmp_path: Path, runs: Runs) -> None:
    """A copied model is the same model; an operational or growth key, or an operational engine argument, is no part."""
    before = identity(planned(), capture="logprobs", dtype="bfloat16")
    copy = make_tiny_model(tmp_path / "elsewhere" / "copy")
    changes = {"model": str(copy), "n": 7, "max_num_seqs": 3, "engine_arg": {"block_size": 32}}
    assert identity(planned(**changes), capture="logprobs", dtype="bfloat16") == before
    assert str(runs.model) not in json.dumps(before)
    assert (before["capture"], before["dtype"], before["max_model_len"]) == ("logprobs", "bfloat16", 256)
    assert re.fullmatch("[0-9a-f]{64}", before["model_fingerprint"])
    assert re.fullmatch("[0-9a-f]{64}", before["chat_template_sha256"])


CHANGES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "max_tokens": {"max_tokens": 9},
    "seed": {"seed": 1},
    "stop": {"stop": ("a",)},
    "stop_token_ids": {"stop_token_ids": (1,)},
    "sampling_arg": {"sampling_arg": {"min_tokens": 1}},
    "allow_unreplayable": {"allow_unreplayable": True},
    "support_logprobs": {"support_logprobs": True},
    "chat": {"chat": True},
    "chat_template_kwargs": {"chat": True, "chat_template_kwargs": {"think": True}},
    "system_prompt": {"chat": True, "system_prompt": "Be brief."},
    "id_column": {"id_column": "id"},
    "prompt_column": {"prompt_column": "prompt"},
    "max_model_len": {"max_model_len": 128},
    "engine_arg": {"engine_arg": {"quantization": "fp8"}},
}


@pytest.mark.parametrize(("key", "change"), CHANGES.items(), ids=CHANGES)
def test_every_identity_key_counts(planned: Callable[..., Preflight], key: str, change: dict[str, Any]) -> None:
    """A change of one is a change of that key of the identity, and of the digest."""
    before = identity(planned(), capture="logprobs", dtype="bfloat16")
    after = identity(planned(**change), capture="logprobs", dtype="bfloat16")
    assert before[key] != after[key]
    assert digest(before) != digest(after)


def test_no_identity_key_was_forgotten() -> None:
    """Those that the table above leaves out are recorded by content."""
    named = {name for name in RunConfig.model_fields if field_key(name).kind == "identity"}
    by_content = {"model", "revision", "tokenizer", "chat_template", "dtype", "capture"}
    assert named - CHANGES.keys() == by_content


def test_chat_template_counts_by_its_text(planned: Callable[..., Preflight], tmp_path: Path) -> None:
    """The file may move; its text may not change."""
    hashes = []
    for name, text in (("a", "{{ messages }}"), ("b", "{{ messages }}"), ("c", "{{ messages }}!")):
        (tmp_path / name).write_text(text)
        preflight = planned(chat_template=str(tmp_path / name))
        hashes.append(identity(preflight, capture="logprobs", dtype="float32")["chat_template_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_same_command_continues(runs: Runs, planned: Callable[..., Preflight]) -> None:
    """The manifest comes along, and how many samples its plan has; `auto` keeps the capture it had."""
    runs()
    runs.write_prompts(7)
    preflight = planned(runs.out, n=2, top_k=8)
    assert preflight.stored == read_manifest(runs.out)
    assert preflight.known_samples == 10
    assert preflight.capture_wanted == "logprobs"


@pytest.mark.parametrize("capture", ["auto", "logprobs"])
def test_the_control_run_continues_with_the_same_command(
    runs: Runs, planned: Callable[..., Preflight], capture: str
) -> None:
    """Nothing truncates, so the manifest says `none` whatever was asked; asking the same again is no change."""
    settings = {"top_k": 0, "top_p": 1, "capture": capture, "n": 2}
    runs(FakeEngine(capture="none"), **settings)
    assert planned(runs.out, **settings).capture_wanted == "none"


def test_supports_are_not_added_to_a_run_without(runs: Runs, tmp_path: Path) -> None:
    """A later row that truncates would need a capture that this run has not."""
    settings = {"top_k": 0, "top_p": 1, "n": 2}
    runs(FakeEngine(capture="none"), **settings)
    with runs.prompts.open("a") as file:
        file.write('{"id": "p5", "prompt": "Prompt 5", "top_k": 5}\n')
    with pytest.raises(ResumeRefused, match=r'capture \("none" -> "auto"\)'):
        runs(resume=True, **settings)


def test_dtype_may_be_named_later(runs: Runs, planned: Callable[..., Preflight]) -> None:
    """A run began as `auto`, which was bfloat16: that name continues it, another does not."""
    runs()
    planned(runs.out, n=2, top_k=8, dtype="bfloat16")
    with pytest.raises(ResumeRefused, match=r'dtype \("bfloat16" -> "float16"\)'):
        planned(runs.out, n=2, top_k=8, dtype="half")


def test_engine_must_have_the_dtype_of_the_run(runs: Runs, planned: Callable[..., Preflight]) -> None:
    """`auto` may turn out otherwise on another device; a new run takes any."""
    check_engine(planned(), FakeEngine(dtype="float16"))
    runs()
    preflight = planned(runs.out, n=2, top_k=8)
    check_engine(preflight, FakeEngine(dtype="bfloat16"))
    with pytest.raises(ResumeRefused, match="sampled in bfloat16, here dtype is float16; pass --dtype bfloat16"):
        check_engine(preflight, FakeEngine(dtype="float16"))


def test_engine_must_have_the_capture_of_the_run(runs: Runs, planned: Callable[..., Preflight]) -> None:
    """Parts that begin together with `auto` may have engines that can do different things; the first decides."""
    runs()
    preflight = planned(runs.out, n=2, top_k=8)
    check_engine(preflight, FakeEngine(capture="logprobs"))
    with pytest.raises(ResumeRefused, match="captured as 'logprobs', and the engine here gives 'native'; pass --cap"):
        check_engine(preflight, FakeEngine(capture="native"))


def test_damaged_plan_is_an_error(runs: Runs, planned: Callable[..., Preflight]) -> None:
    """With other prompts or settings than the last start's it cannot be made again."""
    runs()
    (runs.out / "plan.parquet").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"plan\.parquet: "):
        planned(runs.out, n=3, top_k=8)


def test_manifest_says_what_was_run(runs: Runs) -> None:
    """Sizes of the tiny model (its tokenizer knows fewer ids than it has), its name without a path, the prompt file."""
    runs(seed=7, progress="none")
    manifest = read_manifest(runs.out)
    assert (manifest.vocab_size, manifest.model.context_length, manifest.model.dtype) == (512, 256, "bfloat16")
    assert manifest.tokenizer_vocab_size < manifest.vocab_size
    assert (manifest.model.name, manifest.model.revision) == ("tiny", None)
    assert (manifest.capture, manifest.support_logprobs) == ("logprobs", False)
    assert manifest.config_digest == digest(manifest.identity)
    assert (manifest.identity["seed"], manifest.identity["top_k"]) == (7, 8)
    [attempt] = manifest.attempts
    assert attempt.operational["progress"] == "none"
    assert "seed" not in attempt.operational
    assert attempt.operational["trust_remote_code"] is False
    assert attempt.engine.name == "fake"
    [source] = attempt.prompts
    assert (source.name, source.bytes) == ("prompts.jsonl", runs.prompts.stat().st_size)
    assert str(runs.out.parent) not in (runs.out / "rollgen.json").read_text()
