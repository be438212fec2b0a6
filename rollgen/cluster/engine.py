"""The engine of a replica: as in a run without Ray, made from a specification that travels to the nodes."""

from __future__ import annotations

import importlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from rollgen import __version__
from rollgen.config import RunConfig, field_key
from rollgen.engines.base import Capture, Engine, Extras
from rollgen.errors import RollgenError, UsageError
from rollgen.format.manifest import EngineRecord

if TYPE_CHECKING:
    from rollgen.preflight import Preflight

VLLM: Final = "rollgen.cluster.engine:vllm_engine"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine that every replica is to have."""

    config: RunConfig
    """With the revision that was checked, no path that is relative, and nothing of how prompts were read."""
    model: str
    """A Hugging Face id, or an absolute path that all nodes have."""
    fingerprint: str
    """Of the model, which must be the same on all nodes."""
    vocab_size: int
    capture_wanted: Literal["auto", "native", "logprobs", "none"]
    untruncated: Literal["some", "none"]
    replayable: bool
    weight_versions: bool
    make: str = VLLM
    """`module:function` that makes it of this specification; loads no weights."""
    version: str = __version__
    """Of rollgen."""

    @classmethod
    def of(cls, preflight: Preflight, make: str) -> Self:
        """The engine of a run."""
        config, model = preflight.config, preflight.model
        tokenizer = config.tokenizer and _absolute(config.tokenizer)
        return cls(
            config=config.model_copy(update=_prompt_defaults() | {"revision": model.revision, "tokenizer": tokenizer}),
            model=_absolute(model.path_or_id),
            fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            capture_wanted=preflight.capture_wanted,
            untruncated="some" if preflight.summary.untruncated else "none",
            replayable=preflight.replayable,
            weight_versions=preflight.stores_weight_versions,
            make=make,
        )


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine before it is started: see `engines.base.Engine`."""

    record: EngineRecord
    capture: Capture
    dtype: str
    extras: Extras
    notes: tuple[str, ...]
    window: int


def examine(spec: EngineSpec) -> EngineFacts | RollgenError:
    """What the engine is that would be made here, or why it cannot be. To be run where a replica would be."""
    try:
        engine = make_engine(spec)
    except RollgenError as error:
        return error
    return EngineFacts(engine.record, engine.capture, engine.dtype, engine.extras, engine.notes, engine.window)


def make_engine(spec: EngineSpec) -> Engine:
    """The engine, not started. Raises UsageError where this node is not set up like the driver's."""
    if spec.version != __version__:
        raise UsageError(
            f"rollgen {__version__} is installed on {socket.gethostname()}, and {spec.version} where the run was "
            "started; install the same on all nodes"
        )
    module, function = spec.make.split(":")
    engine: Engine = getattr(importlib.import_module(module), function)(spec)
    return engine


def vllm_engine(spec: EngineSpec) -> Engine:
    """vLLM, on the GPUs that Ray has given to this process. Raises UsageError when it cannot be what is wanted."""
    from rollgen.prompts.model import load_model_info

    model = load_model_info(spec.config, spec.model)
    if model.fingerprint != spec.fingerprint:
        raise UsageError(
            f"{spec.model}: is another model on {socket.gethostname()} than where the run was started; give a "
            "directory that all nodes share, or a Hugging Face id"
        )
    try:
        from rollgen.engines.vllm import VllmEngine
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed on {socket.gethostname()}: pip install -e '.[vllm]' in its clone of rollgen"
        ) from error
    return VllmEngine(
        _inside_process(spec.config),
        spec.model,
        vocab_size=spec.vocab_size,
        capture_wanted=spec.capture_wanted,
        untruncated=spec.untruncated,
        replayable=spec.replayable,
        weight_versions=spec.weight_versions,
        decode=model.decode,
    )


def _inside_process(config: RunConfig) -> RunConfig:
    """With workers that are processes of the engine: left alone, vLLM may make Ray actors of them, inside this one."""
    if config.tensor_parallel_size * config.pipeline_parallel_size == 1:
        return config
    return config.model_copy(update={"engine_arg": {"distributed_executor_backend": "mp"} | config.engine_arg})


def _prompt_defaults() -> dict[str, Any]:
    """Of what only the driver needs, who reads the prompts: a file of its node, for example."""
    fields = RunConfig.model_fields.items()
    return {name: field.get_default() for name, field in fields if field_key(name).panel == "Prompts"}


def _absolute(path_or_id: str) -> str:
    """What the working directory of another process does not change."""
    path = Path(path_or_id).expanduser()
    return str(path.resolve()) if path.exists() else path_or_id
