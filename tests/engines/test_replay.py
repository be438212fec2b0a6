"""The allow-list: what replays passes, what does not is refused with its reason, what is unknown counts as not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rollgen.config import RunConfig
from rollgen.engines import replay
from rollgen.engines.replay import check_replayable, check_untruncated, identity_engine_args
from rollgen.errors import UsageError


def config(
    sampling: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, *, allow: bool = False
) -> RunConfig:
    return RunConfig(sampling_arg=sampling or {}, engine_arg=engine or {}, allow_unreplayable=allow)


SPECULATION = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("sampling", "engine"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"min_tokens": 5, "ignore_eos": True}, {}, id="hard exclusions of EOS"),
        pytest.param({"bad_words": ["x"], "allowed_token_ids": [1, 2]}, {}, id="hard exclusions of ids"),
        pytest.param({"structured_outputs": {"regex": "a+"}}, {}, id="a grammar"),
        pytest.param({"presence_penalty": 0, "repetition_penalty": 1.0}, {}, id="neutral penalties"),
        pytest.param({"logit_bias": None, "extra_args": None}, {}, id="neutral, as null"),
        pytest.param({}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, id="numeric engine arguments"),
        pytest.param({}, {"enable_prefix_caching": False, "seed": 3}, id="operational engine arguments"),
        pytest.param({}, {"logits_processors": None, "enable_trace_replay": False}, id="refused ones switched off"),
        pytest.param({}, {"speculative_config": SPECULATION}, id="speculation, standard rejection"),
        pytest.param({}, {"enable_return_routed_experts": True}, id="routed experts"),
        pytest.param({}, {"speculative_config": SPECULATION | {"rejection_sample_method": "block"}}, id="block"),
    ],
)
def test_replayable(sampling: dict[str, Any], engine: dict[str, Any]) -> None:
    """Every row of such a run replays, whether or not others would be allowed."""
    assert check_replayable(config(sampling, engine)) is True
    assert check_replayable(config(sampling, engine, allow=True)) is True


UNREPLAYABLE: list[Any] = [
    pytest.param(
        {"presence_penalty": 0.1}, {}, "--sampling-arg presence_penalty=0.1 cannot be replayed", id="presence"
    ),
    pytest.param({"frequency_penalty": -1}, {}, "frequency_penalty=-1 cannot be replayed", id="frequency"),
    pytest.param({"repetition_penalty": 1.1}, {}, "repetition_penalty=1.1 cannot be replayed", id="repetition"),
    pytest.param({"repetition_penalty": 0.0}, {}, "repetition_penalty=0.0 cannot be replayed", id="0 is not neutral"),
    pytest.param({"logit_bias": {"7": 1.0}}, {}, "logit_bias={'7': 1.0} cannot be replayed", id="bias"),
    pytest.param({"extra_args": {"x": 1}}, {}, "extra_args={'x': 1} cannot be replayed", id="extra arguments"),
    pytest.param({"invented": 1}, {}, "invented=1 is none that is known here: it may", id="unknown sampling parameter"),
    pytest.param(
        {"Min_tokens": 1},
        {},
        "Min_tokens=1 is none that is known here (did you mean min_tokens?)",
        id="names are exact",
    ),
    pytest.param({}, {"invented": 1}, "--engine-arg invented is not known to leave sampling replayable", id="unknown"),
    pytest.param({}, {"worker_extension_cls": "a.B"}, "worker_extension_cls is not known to leave", id="foreign code"),
]


@pytest.mark.parametrize(("sampling", "engine", "expected"), UNREPLAYABLE)
def test_unreplayable_is_refused_or_marked(sampling: dict[str, Any], engine: dict[str, Any], expected: str) -> None:
    """Refused with name, reason and the flag that accepts it; with that flag, rows are marked."""
    with pytest.raises(UsageError) as raised:
        check_replayable(config(sampling, engine))
    assert expected in str(raised.value)
    assert "--allow-unreplayable" in str(raised.value)
    assert check_replayable(config(sampling, engine, allow=True)) is False


def test_all_problems_are_reported() -> None:
    """One message names each of them, so that one run fixes all."""
    with pytest.raises(UsageError) as raised:
        check_replayable(config({"presence_penalty": 1, "min_tokens": 1, "logit_bias": {"1": 2}}, {"invented": 1}))
    for name in ("presence_penalty", "logit_bias", "invented"):
        assert name in str(raised.value)
    assert "min_tokens" not in str(raised.value)


REFUSED: list[Any] = [
    pytest.param({"temperature": 0.5}, {}, "temperature: rollgen sets this itself", id="owned sampling parameter"),
    pytest.param({"logprobs": None}, {}, "logprobs: rollgen sets this itself", id="owned, also as null"),
    pytest.param({"n": 2}, {}, "n: rollgen sets this itself", id="n"),
    pytest.param({"watermarking": {"key": 1}}, {}, "watermarking: refused, a watermark", id="watermark"),
    pytest.param({"trace_decode_token_ids": [1]}, {}, "trace_decode_token_ids: refused, it replaces", id="trace"),
    pytest.param({}, {"model": "x"}, "--engine-arg model: rollgen sets this itself", id="owned engine argument"),
    pytest.param({}, {"logprobs_mode": "raw_logprobs"}, "logprobs_mode: rollgen sets this itself", id="mode"),
    pytest.param({}, {"return_sampling_mask": False}, "return_sampling_mask: rollgen sets this itself", id="masks"),
    pytest.param({}, {"logits_processors": ["a.B"]}, "logits_processors: refused, custom logits", id="processors"),
    pytest.param({}, {"enable_batch_sharded_sampling": True}, "refused, vLLM drops sampling masks", id="sharded"),
    pytest.param({}, {"watermark_config": {"a": 1}}, "watermark_config: refused", id="engine watermark"),
    pytest.param({}, {"enable_trace_replay": True}, "enable_trace_replay: refused", id="engine trace"),
    pytest.param({}, {"hf_token": "secret"}, "set HF_TOKEN in the environment", id="a secret"),
    pytest.param({}, {"speculative_config": "ngram"}, "speculative_config: expected a JSON object", id="not an object"),
    *(
        pytest.param({}, {"speculative_config": SPECULATION | change}, expected, id=next(iter(change)))
        for change, expected in (
            ({"rejection_sample_method": "probabilistic"}, "rejection_sample_method 'probabilistic' can commit"),
            ({"rejection_sample_method": None}, "rejection_sample_method None can commit"),
            ({"enable_adaptive_verification": True}, "enable_adaptive_verification is refused"),
            ({"synthetic_acceptance_rates": [0.5]}, "synthetic_acceptance_rates is refused"),
            ({"synthetic_acceptance_length": 2.5}, "synthetic_acceptance_length is refused"),
        )
    ),
]


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize(("sampling", "engine", "expected"), REFUSED)
def test_refused_whatever_is_allowed(
    sampling: dict[str, Any], engine: dict[str, Any], expected: str, allow: bool
) -> None:
    """What would make masks wrong, or leak, is refused even with --allow-unreplayable; no secret is repeated."""
    with pytest.raises(UsageError) as raised:
        check_replayable(config(sampling, engine, allow=allow))
    assert expected in str(raised.value)
    assert "secret'" not in str(raised.value)


def test_installed_logits_processors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that adds one by entry point acts on every run: it is named."""
    package = tmp_path / "nudger-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nudger\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[vllm.logits_processors]\nnudge = nudger:Nudge\n")
    monkeypatch.syspath_prepend(tmp_path)
    for allow in (False, True):
        with pytest.raises(UsageError, match=r"add logits processors to vLLM \(nudge\), which cannot be replayed"):
            check_replayable(config(allow=allow))


@pytest.mark.parametrize(
    "name", ["min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "thinking_token_budget"]
)
def test_exclusions_need_a_support(name: str) -> None:
    """Without truncation the full vocabulary is stored, which they cut: replayable only where supports are kept."""
    with pytest.raises(
        UsageError, match=f"--sampling-arg {name}: takes ids out of the vocabulary, .* top_k that never"
    ):
        check_untruncated(config({name: [1]}))


def test_other_parameters_need_no_support() -> None:
    """They end a completion or show it otherwise."""
    check_untruncated(config({"ignore_eos": True, "repetition_detection": {"max_pattern_size": 3}}))


def test_identity_holds_what_decides_the_data() -> None:
    """Quantization, speculation and stored experts do; memory and scheduling do not; the unknown does, to be safe."""
    arguments = {
        "quantization": "fp8",
        "speculative_config": SPECULATION,
        "enable_return_routed_experts": True,
        "invented": 1,
        "enable_prefix_caching": False,
        "block_size": 32,
    }
    assert identity_engine_args(arguments) == {
        "quantization": "fp8",
        "speculative_config": SPECULATION,
        "enable_return_routed_experts": True,
        "invented": 1,
    }


LISTS = {
    name: value
    for name, value in vars(replay).items()
    if name.endswith(("_SAMPLING", "_ENGINE")) and not name.startswith("__")
}


@pytest.mark.parametrize("suffix", ["_SAMPLING", "_ENGINE"])
def test_lists_do_not_overlap(suffix: str) -> None:
    """Each name has one verdict."""
    names = [name for key, value in LISTS.items() if key.endswith(suffix) for name in value]
    assert len(names) == len(set(names)) > 15


@pytest.mark.vllm
def test_all_names_exist_in_vllm() -> None:
    """A name that vLLM renamed or dropped would silently turn into an unknown one."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams

    known = {
        "_SAMPLING": set(SamplingParams.__struct_fields__),
        "_ENGINE": {field.name for field in dataclasses.fields(AsyncEngineArgs)},
    }
    unknown = {
        (key, name)
        for key, value in LISTS.items()
        for suffix, names in known.items()
        if key.endswith(suffix)
        for name in value
        if name not in names
    }
    assert not unknown
