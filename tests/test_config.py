"""RunConfig: where a value comes from, what is refused and how it is named, and what a digest depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollgen.config import (
    RunConfig,
    canonical_json,
    digest,
    field_key,
    flag,
    load_config,
    parse_pairs,
)
from rollgen.errors import UsageError

KINDS = {
    "identity": {
        *("model", "revision", "tokenizer", "dtype", "max_model_len"),
        *("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "stop", "stop_token_ids"),
        *("sampling_arg", "allow_unreplayable", "capture", "support_logprobs"),
        *("prompt_column", "id_column", "chat", "system_prompt", "chat_template", "chat_template_kwargs"),
        "engine_arg",
    },
    "growth": {"n", "limit"},
    "operational": {
        "trust_remote_code",
        *("on_bad_row", "tensor_parallel_size", "max_num_seqs", "gpu_memory_utilization", "enforce_eager"),
        *("pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
        *("replicas", "server", "api_key_env", "shard", "ray", "gpus_per_replica"),
        *("max_restarts", "stall_timeout", "max_failures", "commit_interval", "progress"),
    },
}


def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting would otherwise be ignored without a word, and so would a flag that is no setting."""
    monkeypatch.setenv("ROLLGEN_TEMPRATURE", "0.1")
    monkeypatch.setenv("ROLLGEN_OUT", "x")
    with pytest.raises(UsageError, match="environment: ROLLGEN_OUT, ROLLGEN_TEMPRATURE: no such setting"):
        load_config({})


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the developer's own."""
    for name in RunConfig.model_fields:
        monkeypatch.delenv(f"ROLLGEN_{name.upper()}", raising=False)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    """`toml("top_k = 3")`: the path of a config file with that text."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "run.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_defaults() -> None:
    """What `rollgen generate prompts.jsonl` samples with."""
    config = load_config({})
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (1.0, 50, 0.95, 0.0)
    assert (config.max_tokens, config.n, config.seed, config.model) == (1024, 1, 0, None)
    assert (config.capture, config.commit_interval, config.on_bad_row) == ("auto", 60.0, "fail")


def test_precedence(toml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default < file < environment < command line: each source sets one key more than the next one overrides."""
    path = toml("top_k = 1\nseed = 1\nn = 1\n")
    monkeypatch.setenv("ROLLGEN_SEED", "2")
    monkeypatch.setenv("ROLLGEN_N", "2")
    config = load_config({"n": "3"}, path)
    assert (config.max_tokens, config.top_k, config.seed, config.n) == (1024, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("0.5", "temperature", 0.5),
        ("7", "top_k", 7),
        ("true", "chat", True),
        ("0", "chat", False),
        ("a=b", "model", "a=b"),
        ('["a", "b"]', "stop", ("a", "b")),
        ("[1, 2]", "stop_token_ids", (1, 2)),
        ('{"a": [1]}', "sampling_arg", {"a": [1]}),
        ('{"x": null}', "chat_template_kwargs", {"x": None}),
    ],
)
def test_environment_is_text_or_json(monkeypatch: pytest.MonkeyPatch, text: str, field: str, value: object) -> None:
    """Lists and mappings are JSON, the rest is what one would type on the command line."""
    monkeypatch.setenv(f"ROLLGEN_{field.upper()}", text)
    assert getattr(load_config({}), field) == value


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("temperature = 0.5", "temperature", 0.5),
        ('stop = ["a", "b"]', "stop", ("a", "b")),
        ("stop_token_ids = [1, 2]", "stop_token_ids", (1, 2)),
        ("[sampling_arg]\nmin_tokens = 4", "sampling_arg", {"min_tokens": 4}),
        ("engine_arg = {a = {b = 1}}", "engine_arg", {"a": {"b": 1}}),
        ("chat_template_kwargs = {enable_thinking = false}", "chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_toml_types(toml: Any, text: str, field: str, value: object) -> None:
    """Arrays and tables."""
    assert getattr(load_config({}, toml(text)), field) == value


def test_command_line_lists_and_pairs() -> None:
    """As typer gives them: a list of texts for each repeatable option."""
    config = load_config(
        {
            "stop": ["END", "2"],
            "stop_token_ids": ["2", "3"],
            "sampling_arg": ["min_tokens=4", 'bad_words=["a=b"]', "text=plain", "empty="],
            "chat_template_kwargs": '{"a": 1}',
        }
    )
    assert config.stop == ("END", "2")
    assert config.stop_token_ids == (2, 3)
    assert config.sampling_arg == {"min_tokens": 4, "bad_words": ["a=b"], "text": "plain", "empty": ""}
    assert config.chat_template_kwargs == {"a": 1}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (["a"], "'a' is not KEY=VALUE"),
        (["=1"], "'=1' is not KEY=VALUE"),
        ([""], "'' is not KEY=VALUE"),
        (["a=1", "a=2"], "a is given twice"),
        ("a=1", "expected KEY=VALUE pairs"),
        (None, "expected KEY=VALUE pairs"),
    ],
)
def test_pairs_that_are_none(pairs: object, expected: str) -> None:
    """A forgotten `=`, a forgotten key, a key given twice."""
    with pytest.raises(ValueError, match=f"^{expected}$"):
        parse_pairs(pairs)


@pytest.mark.parametrize(
    ("asked", "effective"),
    [({"temperature": 0.001}, 0.01), ({"temperature": 0.01}, 0.01), ({"temperature": 0.02}, 0.02)],
)
def test_small_temperatures_are_raised(asked: dict[str, Any], effective: float) -> None:
    """vLLM raises them to 0.01; the stored value is the one in effect."""
    assert load_config(asked).temperature == effective


def test_top_k_off_has_two_spellings() -> None:
    """vLLM's -1 and 0 are the same run."""
    off = {"top_p": "1", "min_p": "0"}
    assert load_config(off | {"top_k": "-1"}) == load_config(off | {"top_k": "0"})


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_p": 1, "min_p": 0.1}, {"top_p": 0.9, "min_p": 0.1}])
def test_top_p_and_min_p_need_a_top_k(change: dict[str, Any]) -> None:
    """Else no capture could bound the support; the message tells a way for each intention."""
    with pytest.raises(UsageError, match="set one that never binds, like top_k=1000; for the full vocabulary set"):
        load_config({"top_k": 0} | change)


WRONG = [
    ("temperature", "0", "Input should be greater than 0, got '0'"),
    ("temperature", "2.1", "Input should be less than or equal to 2, got '2.1'"),
    ("temperature", "nan", "Input should be a finite number, got 'nan'"),
    ("temperature", "warm", "Input should be a valid number, unable to parse string as a number, got 'warm'"),
    ("top_p", "0", "Input should be greater than or equal to 0.000001, got '0'"),
    ("top_p", "1.1", "Input should be less than or equal to 1, got '1.1'"),
    ("min_p", "-0.1", "Input should be greater than or equal to 0, got '-0.1'"),
    ("top_k", "-2", "Input should be greater than or equal to -1, got '-2'"),
    ("top_k", "1.5", "Input should be a valid integer"),
    ("n", "0", "Input should be greater than or equal to 1, got '0'"),
    ("limit", "0", "Input should be greater than or equal to 1, got '0'"),
    ("max_tokens", "0", "Input should be greater than or equal to 1, got '0'"),
    ("seed", "-1", "Input should be greater than or equal to 0, got '-1'"),
    ("seed", str(2**63), f"Input should be less than {2**63}, got '{2**63}'"),
    ("commit_interval", "inf", "Input should be a finite number, got 'inf'"),
    ("commit_interval", "0", "Input should be greater than 0, got '0'"),
    ("capture", "guess", "Input should be 'auto', 'native' or 'logprobs', got 'guess'"),
    ("on_bad_row", "ignore", "Input should be 'fail' or 'skip', got 'ignore'"),
    ("chat", "maybe", "Input should be a valid boolean, unable to interpret input, got 'maybe'"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_wrong_values_name_their_source(
    toml: Any, monkeypatch: pytest.MonkeyPatch, field: str, value: str, message: str
) -> None:
    """The same message from all three, led by the flag, the variable's source or the file, and the key."""
    with pytest.raises(UsageError) as raised:
        load_config({field: value})
    assert str(raised.value).startswith(f"{flag(field)}: {message}")
    path = toml(f"{field} = {json.dumps(value)}")
    with pytest.raises(UsageError) as raised:
        load_config({}, path)
    assert str(raised.value).startswith(f"{path}: {field}: {message}")
    monkeypatch.setenv(f"ROLLGEN_{field.upper()}", value)
    with pytest.raises(UsageError) as raised:
        load_config({})
    assert str(raised.value).startswith(f"environment: {field}: {message}")
    assert "\n" not in str(raised.value)


def test_the_last_source_is_to_blame(toml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value that is overridden does no harm; the one that counts is named with its own source."""
    path = toml("n = 0")
    monkeypatch.setenv("ROLLGEN_N", "-7")
    assert load_config({"n": "2"}, path).n == 2
    with pytest.raises(UsageError, match=r"^environment: n: .* got '-7'$"):
        load_config({}, path)


def test_all_problems_are_reported_at_once() -> None:
    """Joined on one line."""
    with pytest.raises(UsageError) as raised:
        load_config({"temperature": "0", "n": "0"})
    assert str(raised.value).count("; ") == 1
    assert "--temperature: " in str(raised.value)
    assert "--n: " in str(raised.value)


def test_unknown_key_names_file_and_key(toml: Any) -> None:
    """A typing error is not passed over: the keys that exist are listed."""
    path = toml("temperture = 0.5")
    with pytest.raises(UsageError) as raised:
        load_config({}, path)
    assert str(raised.value).startswith(f"{path}: unknown key 'temperture'; keys are model, revision, ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("top_k = ", "not valid TOML: Invalid value (at end of document)"),
        ("top_k = 1\ntop_k = 2", "not valid TOML: Cannot overwrite a value"),
        (b"\xff", "not valid TOML: 'utf-8' codec can't decode"),
    ],
)
def test_broken_toml_names_the_file(toml: Any, content: str | bytes, expected: str) -> None:
    """And what is wrong with it."""
    path = toml(content)
    with pytest.raises(UsageError) as raised:
        load_config({}, path)
    assert str(raised.value).startswith(f"{path}: {expected}")


def test_missing_config_file(tmp_path: Path) -> None:
    """The path and the system's reason."""
    path = tmp_path / "none.toml"
    with pytest.raises(UsageError, match=f"^{path}: cannot read the config file: No such file or directory$"):
        load_config({}, path)


def test_environment_that_is_not_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for lists and mappings; the variable is named, what it holds is not told."""
    monkeypatch.setenv("ROLLGEN_STOP", "END")
    with pytest.raises(UsageError, match=r'^environment: ROLLGEN_STOP is not JSON; write a list like \["a", "b"\]$'):
        load_config({})
    monkeypatch.setenv("ROLLGEN_STOP", '["END"]')
    monkeypatch.setenv("ROLLGEN_ENGINE_ARG", "a=1")
    with pytest.raises(
        UsageError, match=r'^environment: ROLLGEN_ENGINE_ARG is not JSON; write an object like {"a": 1}'
    ):
        load_config({})


def test_kwargs_that_are_not_json() -> None:
    """The flag is named."""
    with pytest.raises(UsageError, match=r"^--chat-template-kwargs: .*, got 'x=1'$"):
        load_config({"chat_template_kwargs": "x=1"})


def test_every_field_has_its_kind() -> None:
    """What resume compares, what may grow, and what is only recorded: a new field must be sorted into one of them."""
    kinds = {name: field_key(name).kind for name in RunConfig.model_fields}
    assert kinds == {name: kind for kind, names in KINDS.items() for name in names}


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("top_k", "--top-k"),
        ("max_tokens", "--max-tokens"),
        ("n", "--n"),
        ("tensor_parallel_size", "--tensor-parallel-size"),
    ],
)
def test_main_flag(name: str, spelling: str) -> None:
    """Errors name the spelling that vLLM uses."""
    assert flag(name) == spelling


def test_a_config_cannot_be_changed() -> None:
    """It is recorded as it was when the run began."""
    config = load_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.n = 2  # type: ignore[misc]


def test_digest_is_stable() -> None:
    """Written down, because datasets on disk hold digests: sorted keys, no spaces, UTF-8, not ASCII escapes.

    `printf '{"a":[1,2.5,null,true],"é":"😀"}' | sha256sum`
    """
    value = {"é": "😀", "a": [1, 2.5, None, True]}
    assert canonical_json(value) == '{"a":[1,2.5,null,true],"é":"😀"}'
    assert digest(value) == "4bfd6faf273a6acdb4bdfe2a22f8f9b94c615a6d226ceb5ffedc79f43bd934dd"
    assert digest(dict(reversed(value.items()))) == digest(value)


def test_digest_tells_types_apart() -> None:
    """1 is not 1.0, true or "1"."""
    assert len({digest(value) for value in (1, 1.0, True, "1", [1], {"1": 1})}) == 6


@pytest.mark.parametrize("field", ["sampling_arg", "engine_arg", "chat_template_kwargs"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nan", "Input should be a finite number, got nan"),
        ("[1, {a = -inf}]", "Input should be a finite number, got -inf"),
        ("2026-01-02", "input was not a valid JSON value, got datetime.date(2026, 1, 2)"),
    ],
)
def test_values_that_json_has_not_are_refused(toml: Any, field: str, value: str, message: str) -> None:
    """The manifest is JSON, and the run must be refused before a model loads, not when it is written."""
    path = toml(f"[{field}]\nx = {value}")
    with pytest.raises(UsageError) as raised:
        load_config({}, path)
    assert str(raised.value) == f"{path}: {field}: {message}"


def test_infinity_on_the_command_line() -> None:
    """Python's JSON reader takes it, ours does not."""
    with pytest.raises(UsageError, match=r"^--sampling-arg: Input should be a finite number, got inf$"):
        load_config({"sampling_arg": ["x=Infinity"]})
