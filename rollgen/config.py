"""The run configuration: one pydantic model that is the config file, the environment and the command line at once.

Precedence: built-in default < TOML file (`--config`) < environment (`ROLLGEN_<FIELD>`) < command line.
Each field says once what it means (`description`), how it is spelled on the command line (`flags`, else
`--field-name`) and which kind of key it is for `--resume`:

    identity     decides the data; a change is refused (exit 4), naming the key
    growth       may only grow: a larger n, more prompts, a larger limit
    operational  how the work is done: recorded, free to change

Depends on pydantic alone, so that the command line can be built from it without loading the heavy libraries.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from rollgen.errors import UsageError

Kind = Literal["identity", "growth", "operational"]
Capture = Literal["auto", "native", "logprobs"]
ENV_PREFIX = "ROLLGEN_"
EMBEDDED_MODEL = Path(".cache/smollm2")
"""Where `make model` puts the demo model; used when no model is named."""
_UNTOLD = frozenset({"server", "api_key_env"})
"""Fields that may hold a login, or a key by mistake: no message repeats what was given."""
INT32_MAX = 2**31 - 1
MIN_TEMPERATURE = 0.01
"""vLLM raises a smaller positive temperature to this (`vllm/sampling_params.py`, `_MAX_TEMP`)."""


class Key(NamedTuple):
    """How one field takes part in resume and on the command line."""

    kind: Kind
    flags: tuple[str, ...] = ()
    """Spellings on the command line; empty means `--field-name`."""
    panel: str = "Run"


class RunConfig(BaseModel):
    """Everything `rollgen generate` can be told. Field by field: see the descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: Annotated[str | None, Key("identity", panel="Model")] = Field(
        None, description="Model: a local directory or a Hugging Face id. Default: the embedded demo model, if made."
    )
    revision: Annotated[str | None, Key("identity", panel="Model")] = Field(
        None, description="Branch, tag or commit of a Hugging Face model."
    )
    tokenizer: Annotated[str | None, Key("identity", panel="Model")] = Field(
        None, description="Tokenizer, if not the model's own."
    )
    trust_remote_code: Annotated[bool, Key("operational", panel="Model")] = Field(
        False, description="Run Python code that ships with the model."
    )
    dtype: Annotated[str, Key("identity", panel="Model")] = Field(
        "auto", description="Weight and activation dtype: auto, float32, bfloat16, float16."
    )
    max_model_len: Annotated[int | None, Key("identity", panel="Model")] = Field(
        None, ge=1, description="Context length in tokens. Default: the model's."
    )

    temperature: Annotated[float, Key("identity", panel="Sampling")] = Field(
        1.0, gt=0, le=2, description="In (0, 2]; divides the logits. Below 0.01 counts as 0.01."
    )
    top_k: Annotated[int, Key("identity", panel="Sampling")] = Field(
        50, ge=-1, le=INT32_MAX, description="Keep the k most likely ids; 0 or -1 is off."
    )
    top_p: Annotated[float, Key("identity", panel="Sampling")] = Field(
        0.95, ge=1e-6, le=1, description="Keep the smallest set with this probability mass; 1 is off."
    )
    min_p: Annotated[float, Key("identity", panel="Sampling")] = Field(
        0.0, ge=0, le=1, description="Drop ids below this share of the most likely one; 0 is off."
    )
    max_tokens: Annotated[int, Key("identity", ("--max-tokens", "--max-new-tokens"), "Sampling")] = Field(
        1024, ge=1, le=INT32_MAX, description="Generated tokens at most, clamped to the context."
    )
    n: Annotated[int, Key("growth", ("--n", "--num-samples"), "Sampling")] = Field(
        1, ge=1, le=INT32_MAX, description="Samples per prompt."
    )
    seed: Annotated[int, Key("identity", panel="Sampling")] = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of the run. Sample k of a prompt (0 to n - 1) has a seed of its own: a hash of this one, the "
        "prompt's id and k.",
    )
    stop: Annotated[tuple[str, ...], Key("identity", panel="Sampling")] = Field(
        (), description="Stop string (repeatable)."
    )
    stop_token_ids: Annotated[tuple[int, ...], Key("identity", panel="Sampling")] = Field(
        (), description="Stop token id (repeatable)."
    )
    sampling_arg: Annotated[dict[str, JsonValue], Key("identity", panel="Sampling")] = Field(
        {}, description="Further vLLM SamplingParams field, KEY=VALUE with a JSON value (repeatable)."
    )
    allow_unreplayable: Annotated[bool, Key("identity", panel="Sampling")] = Field(
        False, description="Accept settings that cannot be replayed (penalties, biases); rows get replayable=false."
    )

    capture: Annotated[Capture, Key("identity", panel="Capture")] = Field(
        "auto",
        description="How supports (the ids of sampling masks) are read: native masks, logprobs, or auto: native where "
        "the engine can.",
    )
    support_logprobs: Annotated[bool, Key("identity", panel="Capture")] = Field(
        False, description="Also store the log-probability of every id of the support (about 4 bytes an id)."
    )

    prompt_column: Annotated[str | None, Key("identity", panel="Prompts")] = Field(
        None, description="Field that holds the prompt. Default: messages, prompt or prompt_token_ids."
    )
    id_column: Annotated[str | None, Key("identity", panel="Prompts")] = Field(
        None, description="Field that holds the id. Default: id, prompt_id or custom_id."
    )
    chat: Annotated[bool, Key("identity", panel="Prompts")] = Field(
        False, description="Wrap a `prompt` text as a user turn of the chat template."
    )
    system_prompt: Annotated[str | None, Key("identity", panel="Prompts")] = Field(
        None, description="System turn put before chats that have none."
    )
    chat_template: Annotated[str | None, Key("identity", panel="Prompts")] = Field(
        None, description="File with a Jinja chat template to use instead of the tokenizer's."
    )
    chat_template_kwargs: Annotated[dict[str, JsonValue], Key("identity", panel="Prompts")] = Field(
        {}, description="JSON object of variables for the chat template, like '{\"enable_thinking\": false}'."
    )
    limit: Annotated[int | None, Key("growth", panel="Prompts")] = Field(
        None, ge=1, description="Use the first LIMIT prompts only."
    )
    on_bad_row: Annotated[Literal["fail", "skip"], Key("operational", panel="Prompts")] = Field(
        "fail", description="A bad input row stops the run (before a model loads), or is skipped and recorded."
    )

    tensor_parallel_size: Annotated[int, Key("operational", ("--tensor-parallel-size", "-tp"), "Engine")] = Field(
        1, ge=1, description="GPUs that share one copy of the model."
    )
    pipeline_parallel_size: Annotated[int, Key("operational", ("--pipeline-parallel-size", "-pp"), "Engine")] = Field(
        1, ge=1, description="Stages that the layers of one copy of the model are cut into, each on GPUs of its own."
    )
    data_parallel_size: Annotated[int, Key("operational", ("--data-parallel-size", "-dp"), "Engine")] = Field(
        1, ge=1, description="Copies of the model inside one engine: for mixtures of experts."
    )
    enable_expert_parallel: Annotated[bool, Key("operational", panel="Engine")] = Field(
        False, description="Spread experts over the GPUs instead of cutting each."
    )
    max_num_seqs: Annotated[int | None, Key("operational", panel="Engine")] = Field(
        None, ge=1, description="Requests in a batch at most. Default: 64 on a CPU, 256 for each server, else vLLM's."
    )
    gpu_memory_utilization: Annotated[float, Key("operational", panel="Engine")] = Field(
        0.9, gt=0, le=1, description="Share of the GPU memory that vLLM may use."
    )
    enforce_eager: Annotated[bool | None, Key("operational", panel="Engine")] = Field(
        None, description="Skip torch.compile and CUDA graphs. Default: on a CPU only."
    )
    engine_arg: Annotated[dict[str, JsonValue], Key("identity", panel="Engine")] = Field(
        {}, description="Further vLLM engine argument, KEY=VALUE with a JSON value (repeatable)."
    )

    replicas: Annotated[int, Key("operational", panel="Where")] = Field(
        1, ge=1, description="Independent engines, each on devices of its own, that share the work."
    )
    server: Annotated[tuple[str, ...], Key("operational", panel="Where")] = Field(
        (), description="URL of a running vLLM server to use instead of an engine here (repeatable)."
    )
    api_key_env: Annotated[str, Key("operational", panel="Where")] = Field(
        "VLLM_API_KEY", description="Environment variable that holds the API key of the servers, if they want one."
    )
    shard: Annotated[str | None, Key("operational", panel="Where")] = Field(
        None, description="i/N: make part i (from 0) of N beside other processes; slurm: as the job array says."
    )
    ray: Annotated[str | None, Key("operational", panel="Where")] = Field(
        None, description="Run the replicas on a Ray cluster: its address, auto, or local to start one here."
    )
    gpus_per_replica: Annotated[int | None, Key("operational", panel="Where")] = Field(
        None, ge=0, description="GPUs that Ray gives to a replica. Default: as the parallel sizes say; 0 without GPUs."
    )

    max_restarts: Annotated[int, Key("operational", panel="Engine")] = Field(
        5, ge=0, description="Restarts of an engine that dies or stalls at work; what it had in flight is made again."
    )
    stall_timeout: Annotated[float, Key("operational", panel="Engine")] = Field(
        600.0, gt=0, description="Seconds without a token after which an engine that has requests counts as stalled."
    )
    max_failures: Annotated[int | None, Key("operational")] = Field(
        None, ge=0, description="Stop when more samples fail than this. Default: 1 % of those owed, at least 20."
    )

    commit_interval: Annotated[float, Key("operational", panel="Output")] = Field(
        60.0, gt=0, description="Seconds between commits: what a crash costs at most."
    )
    progress: Annotated[Literal["auto", "bar", "log", "none"], Key("operational", panel="Output")] = Field(
        "auto", description="auto: a bar on a terminal, log lines elsewhere."
    )

    @field_validator("sampling_arg", "engine_arg", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        """`["k=v", ...]` from the command line becomes `{"k": v}`; v is JSON, else a plain string."""
        return value if isinstance(value, dict) else parse_pairs(value)

    @field_validator("stop", "stop_token_ids", "server", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str | int) else value

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _json_object(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("temperature")
    @classmethod
    def _effective_temperature(cls, value: float) -> float:
        return max(value, MIN_TEMPERATURE)

    @field_validator("top_k")
    @classmethod
    def _effective_top_k(cls, value: int) -> int:
        return max(value, 0)

    @model_validator(mode="after")
    def _bounded_support(self) -> RunConfig:
        check_bounded_support(self.top_k, self.top_p, self.min_p)
        return self


def check_bounded_support(top_k: int, top_p: float, min_p: float) -> None:
    """Refuse top-p or min-p without top-k: neither capture could bound the support it has to return."""
    if top_k == 0 and (top_p < 1 or min_p > 0):
        raise ValueError(
            "top_p and min_p need a top_k, which bounds the support: set one that never binds, like top_k=1000; "
            "for the full vocabulary set top_k=0, top_p=1, min_p=0"
        )


def parse_pairs(pairs: object) -> dict[str, Any]:
    """`["a=1", "b=text"]` -> `{"a": 1, "b": "text"}`. Raises ValueError on a pair without `=` or a repeated key."""
    if not isinstance(pairs, list | tuple):
        raise ValueError("expected KEY=VALUE pairs")
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = str(pair).partition("=")
        if not equals or not key:
            raise ValueError(f"{pair!r} is not KEY=VALUE")
        if key in parsed:
            raise ValueError(f"{key} is given twice")
        try:
            parsed[key] = json.loads(text)
        except ValueError:
            parsed[key] = text
    return parsed


def field_key(name: str) -> Key:
    """The `Key` of a RunConfig field."""
    return next(m for m in RunConfig.model_fields[name].metadata if isinstance(m, Key))


def flag(name: str) -> str:
    """The main command-line spelling of a RunConfig field."""
    return (field_key(name).flags or ("--" + name.replace("_", "-"),))[0]


def load_config(command_line: dict[str, Any], config_file: Path | None = None) -> RunConfig:
    """Merge file, environment and command line into a RunConfig. Raises UsageError naming the source and the key."""
    sources = [
        (str(config_file), _read_toml(config_file)) if config_file else ("", {}),
        ("environment", _read_environment()),
        ("", command_line),
    ]
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, values in sources:
        merged |= values
        origin |= dict.fromkeys(values, source)
    return make_config(merged, origin)


def as_config(config: RunConfig | None, settings: dict[str, Any]) -> RunConfig:
    """A configuration that is given whole or by its fields. Raises UsageError for both, and for wrong fields."""
    if config is None:
        return make_config(settings, dict.fromkeys(settings, "settings"))
    if settings:
        raise UsageError(f"{', '.join(settings)}: give a config or single settings, not both; see RunConfig.model_copy")
    if not isinstance(config, RunConfig):
        raise UsageError(f"config must be a RunConfig, not of type {type(config).__name__}")
    return config


def make_config(values: dict[str, Any], origin: dict[str, str]) -> RunConfig:
    """Check `values`. Raises UsageError naming each wrong key and where it is from: `origin`, else the command line."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(_explain(error, origin)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the config file: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def _read_environment() -> dict[str, Any]:
    """`ROLLGEN_TOP_K=20` sets top_k. List and mapping fields are JSON."""
    known = {ENV_PREFIX + name.upper() for name in RunConfig.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
    if unknown:
        raise UsageError(
            f"environment: {', '.join(unknown)}: no such setting; unset it, or see rollgen generate --help"
        )
    values: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        text = os.environ.get(ENV_PREFIX + name.upper())
        if text is None:
            continue
        is_container = isinstance(field.default, tuple | dict)
        try:
            values[name] = json.loads(text) if is_container else text
        except ValueError:
            expected = 'a list like ["a", "b"]' if isinstance(field.default, tuple) else 'an object like {"a": 1}'
            raise UsageError(f"environment: {ENV_PREFIX}{name.upper()} is not JSON; write {expected}") from None
    return values


def _explain(error: ValidationError, origin: dict[str, str]) -> str:
    """All problems of a ValidationError on one line, each with its flag or its file."""
    problems = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            problems.append(message)
            continue
        name = str(problem["loc"][0])
        source = origin.get(name, "")
        if name not in RunConfig.model_fields:
            problems.append(f"{source}: unknown key {name!r}; keys are {', '.join(RunConfig.model_fields)}")
            continue
        label = f"{source}: {name}" if source else flag(name)
        problems.append(f"{label}: {message}" if name in _UNTOLD else f"{label}: {message}, got {problem['input']!r}")
    return "; ".join(problems)


def canonical_json(value: object) -> str:
    """One text for one value: sorted keys, no spaces. Digests are taken over it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: object) -> str:
    """SHA-256 (hex) of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
