"""Every field of RunConfig is an option, described once, and what is not given stays out of the way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import typer

from rollgen.cli.options import given, with_config_options
from rollgen.config import RunConfig, load_config


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """`parse("--top-k", "5")`: the config of a command line of these options."""
    for name in RunConfig.model_fields:
        monkeypatch.delenv(f"ROLLGEN_{name.upper()}", raising=False)
    configs: list[RunConfig] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_config_options
    def command(**options: Any) -> int:
        configs.append(load_config(given(options)))
        return 0

    def run(*arguments: str) -> RunConfig:
        app(list(arguments), standalone_mode=False)
        return configs.pop()

    return run


@with_config_options
def example(own: str = "x", **options: Any) -> int:
    """A command with an option of its own."""
    return len(options)


def test_every_field_is_an_option() -> None:
    """The command's own parameters first, then one keyword a field; all unset by default."""
    parameters = inspect.signature(example).parameters
    assert list(parameters) == ["own", *RunConfig.model_fields]
    assert all(parameters[name].default is None for name in RunConfig.model_fields)
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in RunConfig.model_fields)


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """The options of `example` as typer makes them, by name of the field."""
    app = typer.Typer(add_completion=False)
    app.command()(example)
    return {parameter.name: parameter for parameter in typer.main.get_command(app).params}


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("top_k", ["--top-k"], []),
        ("max_tokens", ["--max-tokens", "--max-new-tokens"], []),
        ("n", ["--n", "--num-samples"], []),
        ("tensor_parallel_size", ["--tensor-parallel-size", "-tp"], []),
        ("enforce_eager", ["--enforce-eager"], ["--no-enforce-eager"]),
        ("chat", ["--chat"], ["--no-chat"]),
    ],
)
def test_flags(options: dict[str, Any], name: str, on: list[str], off: list[str]) -> None:
    """vLLM's spelling, and pairs for switches."""
    assert (options[name].opts, options[name].secondary_opts) == (on, off)


def test_help_is_the_description_and_the_default(options: dict[str, Any]) -> None:
    """Defaults that say something are shown; off, none and empty are not."""
    for name, field in RunConfig.model_fields.items():
        assert options[name].help.startswith(field.description), name
    assert options["top_k"].help.endswith(" [50]")
    assert options["min_p"].help.endswith("0 is off. [0.0]")
    assert options["chat"].help == RunConfig.model_fields["chat"].description
    assert options["stop"].help.endswith("(repeatable).")
    assert options["model"].help == RunConfig.model_fields["model"].description


@pytest.mark.parametrize(
    ("name", "metavar"),
    [
        ("top_k", "INTEGER"),
        ("limit", "INTEGER"),
        ("temperature", "NUMBER"),
        ("model", "TEXT"),
        ("stop", "TEXT"),
        ("stop_token_ids", "INTEGER"),
        ("capture", "auto|native|logprobs"),
        ("on_bad_row", "fail|skip"),
        ("sampling_arg", "KEY=VALUE"),
        ("chat_template_kwargs", "JSON"),
        ("chat", None),
    ],
)
def test_metavar_says_what_to_type(options: dict[str, Any], name: str, metavar: str | None) -> None:
    """A type, the choices, or nothing for a switch."""
    assert options[name].metavar == metavar


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--top-k", "5"], "top_k", 5),
        (["--top-p", "1", "--top-k", "-1"], "top_k", 0),
        (["--num-samples", "3"], "n", 3),
        (["--max-new-tokens", "3"], "max_tokens", 3),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--chat"], "chat", True),
        (["--no-enforce-eager"], "enforce_eager", False),
        (["--enforce-eager"], "enforce_eager", True),
        ([], "enforce_eager", None),
        (["--stop", "a", "--stop", "b c"], "stop", ("a", "b c")),
        (["--stop", ""], "stop", ("",)),
        (["--stop-token-ids", "1", "--stop-token-ids", "2"], "stop_token_ids", (1, 2)),
        (["--sampling-arg", "a=1", "--sampling-arg", "b=[true]"], "sampling_arg", {"a": 1, "b": [True]}),
        (["--chat-template-kwargs", '{"a": false}'], "chat_template_kwargs", {"a": False}),
        (["--seed", str(2**63 - 1)], "seed", 2**63 - 1),
        (["--system-prompt", ""], "system_prompt", ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_arrive(parse: Callable[..., RunConfig], arguments: list[str], field: str, value: object) -> None:
    """As RunConfig wants them, whatever typer makes of the text."""
    assert getattr(parse(*arguments), field) == value


def test_switches_override_the_environment_both_ways(
    parse: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--no-chat` is given, which is not the same as not given."""
    monkeypatch.setenv("ROLLGEN_CHAT", "1")
    assert parse().chat is True
    assert parse("--no-chat").chat is False


def test_lists_override_the_environment(parse: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is not given leaves the environment's alone; one that is replaces it."""
    monkeypatch.setenv("ROLLGEN_STOP", '["a"]')
    assert parse().stop == ("a",)
    assert parse("--stop", "b").stop == ("b",)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({"a": None, "b": [], "c": "x"}, {"c": "x"}),
        ({"a": False, "b": "", "c": "0", "d": [""]}, {"a": False, "b": "", "c": "0", "d": [""]}),
    ],
)
def test_given(typed: dict[str, Any], expected: dict[str, Any]) -> None:
    """Only None and an empty list mean that nothing was typed."""
    assert given(typed) == expected
