"""vLLM in this process: AsyncLLM, one request a sample, masks read natively or from processed logprobs.

What rollgen sets on every engine: `logprobs_mode="processed_logprobs"` (logprobs after temperature, normalised over the
support), `generation_config="vllm"` (a model's generation_config.json must not change sampling in silence; its EOS ids
still count), unlimited `max_logprobs`. On a CPU also: no chunked prefill, because Model Runner V1 kills the engine when
a prefill with a per-request seed is chunked; a batch wide enough for one whole context; an explicit KV cache size,
because the default claims nearly all memory; eager mode.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from rollgen.config import RunConfig
from rollgen.engines.asking import WINDOW_PER_SLOT, ask, logprobs_wanted
from rollgen.engines.base import Capture, Extras, RequestError, SampleRequest
from rollgen.engines.children import PARENT_VARIABLE, quiet_imports
from rollgen.engines.installed import PROCESSORS, package_versions
from rollgen.engines.outputs import completion_of, read_outputs
from rollgen.engines.processes import EngineProcesses
from rollgen.engines.replicas import device_groups
from rollgen.engines.requirements import NATIVE_ARGUMENT, native_problem
from rollgen.errors import EngineError, UsageError
from rollgen.format.manifest import EngineRecord, RoutedExperts
from rollgen.rollouts import FINISH_REASONS, Completion

# Read by vLLM when it is imported. Standard output is for data, so its log goes to stderr, and without its chatter.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ["VLLM_LOGGING_LEVEL"] = quiet_imports(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a forked child would not load `children.py`
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore::DeprecationWarning")  # in its processes

from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

    from rollgen.rollouts import Int32Array

GIB = 1 << 30
CPU_MAX_NUM_SEQS = 64
CPU_KV_CACHE_SHARE = 0.25
"""Of the memory that is free at start; bounded by CPU_KV_CACHE_MAX."""
CPU_KV_CACHE_MAX = 16 * GIB
SHUTDOWN_SECONDS = 10.0
"""For the engine process to release its device and shared memory before it is killed."""
EXPERTS_ARGUMENT = "enable_return_routed_experts"
VERSIONS_FIELD = "weight_versions"
"""Of an output, from vLLM 0.32 on."""
_DEAD = "vLLM's engine process died (see its own messages)"


@dataclass(frozen=True, slots=True)
class Replica:
    """What makes an engine one of several in this process."""

    variables: dict[str, str]
    """Environment of its processes: the devices that it has."""
    turn: asyncio.Lock
    """Shared by all: who starts a process has the environment for itself."""


class VllmEngine:
    """`engines.base.Engine` on vLLM's AsyncLLM. Constructing it checks everything but loads no weights.

    `capture_wanted` is the user's wish; `untruncated` says whether some or all prompts are sampled without truncation
    (native masks need top_k > 0 on every request). `decode` turns token ids into text. `replica` makes it one of
    several in this process. `weight_versions` are returned where a dataset that is continued stores them and vLLM has
    them: here they never change. Raises UsageError when vLLM refuses the configuration or cannot give the capture that
    was asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        model: str,
        *,
        vocab_size: int,
        capture_wanted: Literal["auto", "native", "logprobs", "none"],
        untruncated: Literal["some", "none"],
        replayable: bool,
        decode: Callable[[Int32Array], str],
        replica: Replica | None = None,
        weight_versions: bool = False,
    ) -> None:
        self._config = config
        self._replica = replica
        self._processes = EngineProcesses(is_replica=replica is not None)
        self._vocab_size = vocab_size
        self._replayable = replayable
        self._decode = decode
        self._llm: AsyncLLM | None = None
        self._sampling_args = _sampling_arguments(config, vocab_size)
        self.resampled = 0
        self.tokens = 0
        self.capture: Capture
        self.notes: tuple[str, ...]
        self.capture, self._vllm_config, self.notes = _resolve(config, model, capture_wanted, untruncated)
        if self._vllm_config.model_config.is_diffusion:
            raise UsageError(f"{model}: diffusion models have no per-token sampling distribution to keep")
        self.record = _engine_record()
        self.dtype = str(self._vllm_config.model_config.dtype).removeprefix("torch.")
        has_versions = VERSIONS_FIELD in {field.name for field in fields(CompletionOutput)}
        self.extras = Extras(weight_versions and has_versions, _routed_experts(config, self._vllm_config))
        slots = self._vllm_config.scheduler_config.max_num_seqs * config.data_parallel_size
        self.window = int(WINDOW_PER_SLOT * slots)

    async def start(self) -> None:
        """Load the weights in a thread, so that the loop sees signals. Cancelling it ends the engine's processes."""
        vllm_config = deepcopy(self._vllm_config)  # an engine changes its own, and may be started again
        make = partial(
            AsyncLLM.from_vllm_config,
            vllm_config,
            disable_log_stats=True,
            stat_loggers=[lambda config, index: _TokenCount(config, index, self)],
        )
        loading: asyncio.Future[AsyncLLM] | None = None
        turn, variables = (self._replica.turn, self._replica.variables) if self._replica else (nullcontext(), {})
        try:
            async with turn:
                with _environment({PARENT_VARIABLE: str(os.getpid()), **variables}):
                    others = set(multiprocessing.active_children())
                    loading = asyncio.ensure_future(asyncio.to_thread(make))
                    await self._processes.started(loading, others)
            self._llm = await asyncio.shield(loading)
        except asyncio.CancelledError:
            while loading is not None and not loading.done():  # the thread cannot be stopped, but without its processes
                await asyncio.to_thread(self._processes.end)  # it gives up
                await asyncio.wait({loading}, timeout=0.2)
            if loading is not None:
                loading.exception()  # expected, and of no interest
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not load the model (see its own messages): {_one_line(error)}") from error

    async def sample(self, request: SampleRequest) -> Completion:
        """See `engines.base.Engine.sample`."""
        sampling, store = request.prompt.sampling, self._config.support_logprobs
        first = logprobs_wanted(self.capture, sampling, self._vocab_size, support_logprobs=store)
        return await ask(self, first, self._vocab_size, partial(self._make, request))

    def close(self) -> None:
        """Shut the engine down, or end its processes when it has not finished loading."""
        if self._llm is not None:
            self._llm.shutdown(timeout=SHUTDOWN_SECONDS)
            self._llm = None
        self._processes.end()

    async def _make(self, request: SampleRequest, num_logprobs: int) -> Completion:
        return self._completion(request, await self._generate(request, num_logprobs))

    async def _generate(self, request: SampleRequest, num_logprobs: int) -> CompletionOutput:
        if self._llm is None:
            raise EngineError("vLLM is not running")
        prompt = tokens_input(request.prompt.token_ids.tolist())
        final: RequestOutput | None = None
        try:
            params = self._sampling_params(request, num_logprobs)
            async for output in self._llm.generate(prompt, params, f"{request.request_id}-{num_logprobs}"):
                final = output
        except EngineDeadError as error:
            raise EngineError(_DEAD) from error
        except Exception as error:
            if self._llm is None or self._llm.errored:
                raise EngineError(_DEAD) from error
            raise RequestError(_one_line(error)) from error
        if final is None or not final.finished:
            raise RequestError("vLLM returned no finished output")
        return final.outputs[0]

    def _sampling_params(self, request: SampleRequest, num_logprobs: int) -> SamplingParams:
        return SamplingParams(
            **request.sampling_params,
            logprobs=num_logprobs,
            flat_logprobs=True,
            detokenize=bool(request.prompt.sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            **self._sampling_args,
        )

    def _completion(self, request: SampleRequest, output: CompletionOutput) -> Completion:
        if output.finish_reason not in FINISH_REASONS:
            raise RequestError(f"vLLM ended the request with finish reason {output.finish_reason!r}")
        sampling = request.prompt.sampling
        (sampled,) = read_outputs(
            output,
            truncates=sampling.truncates,
            vocab_size=self._vocab_size,
            capture=self.capture,
            sampling=sampling,
        )
        return completion_of(
            request,
            sampled,
            replayable=self._replayable,
            support_logprobs=self._config.support_logprobs,
            text=self._decode(sampled.token_ids),
            extras=self.extras,
        )


class _TokenCount(StatLoggerBase):  # type: ignore[misc]
    """Counts generated tokens as vLLM's front end sees them come, whether or not their request is finished."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int, engine: VllmEngine) -> None:
        self._engine = engine

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._engine.tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make_replicas(config: RunConfig) -> list[Replica | None]:
    """What tells the engines of `--replicas` apart; nothing if it is one. Raises UsageError for too few devices."""
    if config.replicas == 1:
        return [None]
    if config.data_parallel_size > 1:
        raise UsageError("--replicas and --data-parallel-size exclude each other: both are copies of the model")
    turn = asyncio.Lock()
    if current_platform.is_cpu():  # which all share
        return [Replica({}, turn) for _ in range(config.replicas)]
    variable = current_platform.device_control_env_var
    named = os.environ.get(variable)
    visible = named.split(",") if named else [str(number) for number in range(current_platform.device_count())]
    per_replica = config.tensor_parallel_size * config.pipeline_parallel_size
    return [Replica({variable: group}, turn) for group in device_groups(visible, config.replicas, per_replica)]


def _resolve(
    config: RunConfig,
    model: str,
    wanted: Literal["auto", "native", "logprobs", "none"],
    untruncated: Literal["some", "none"],
) -> tuple[Capture, VllmConfig, tuple[str, ...]]:
    """Pick the capture and build vLLM's configuration for it, which loads no weights. Notes say why not native."""
    if wanted in {"none", "logprobs"}:
        return wanted, _vllm_config(config, model, native=False), ()
    if untruncated == "some":
        problem = "vLLM's masks need top_k > 0 on every request, some prompts have top_k 0"
    else:
        try:
            return "native", _native_config(config, model), ()
        except UsageError as error:
            problem = str(error)
    if wanted == "native":
        raise UsageError(f"--capture native: {problem}; use --capture logprobs")
    built = _vllm_config(config, model, native=False)
    if current_platform.is_cpu():  # there it is what everyone gets
        return "logprobs", built, ()
    return "logprobs", built, (f"supports are read from logprobs instead of sampling masks: {problem}",)


def _native_config(config: RunConfig, model: str) -> VllmConfig:
    """vLLM's configuration with sampling masks. Raises UsageError when this vLLM has none, or refuses them here."""
    problem = native_problem(vllm_version, [field.name for field in fields(AsyncEngineArgs)])
    if problem is not None:
        raise UsageError(problem)
    return _vllm_config(config, model, native=True)


def _vllm_config(config: RunConfig, model: str, *, native: bool) -> VllmConfig:
    arguments = {
        "model": model,
        "tokenizer": config.tokenizer,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "enable_expert_parallel": config.enable_expert_parallel,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": bool(config.enforce_eager),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "use_tqdm_on_load": False,
    }
    if native:
        arguments[NATIVE_ARGUMENT] = True
    cpu_defaults = _cpu_defaults(config) if current_platform.is_cpu() else {}
    try:
        built = AsyncEngineArgs(**(arguments | cpu_defaults | config.engine_arg)).create_engine_config()
        if not current_platform.is_cpu() or "max_num_batched_tokens" in config.engine_arg:
            return built
        # Without chunked prefill a whole prompt is one batch: it must hold the longest one.
        context = {"max_num_batched_tokens": max(2048, built.model_config.max_model_len)}
        return AsyncEngineArgs(**(arguments | cpu_defaults | context | config.engine_arg)).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(f"vLLM refuses this configuration: {_one_line(error)}") from error


def _cpu_defaults(config: RunConfig) -> dict[str, Any]:
    import psutil

    defaults: dict[str, Any] = {
        "enable_chunked_prefill": False,
        "enforce_eager": True if config.enforce_eager is None else config.enforce_eager,
        "max_num_seqs": config.max_num_seqs or CPU_MAX_NUM_SEQS,
    }
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        free = psutil.virtual_memory().available / config.replicas
        defaults["kv_cache_memory_bytes"] = int(min(CPU_KV_CACHE_SHARE * free, CPU_KV_CACHE_MAX))
    return defaults


def _sampling_arguments(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    """`--sampling-arg` values in the types that SamplingParams wants. Raises UsageError when it refuses them."""
    arguments: dict[str, Any] = dict(config.sampling_arg)
    try:
        allowed = arguments.get("allowed_token_ids") or []
        if not all(0 <= token < vocab_size for token in allowed):
            raise ValueError(f"allowed_token_ids lie outside the model's vocabulary of {vocab_size}")
        if isinstance(arguments.get("structured_outputs"), dict):
            arguments["structured_outputs"] = StructuredOutputsParams(**arguments["structured_outputs"])
        if isinstance(arguments.get("logit_bias"), dict):
            arguments["logit_bias"] = {int(token): float(bias) for token, bias in arguments["logit_bias"].items()}
        SamplingParams(**({"max_tokens": config.max_tokens} | arguments))
    except (ValueError, TypeError) as error:
        names = ", ".join(arguments)
        raise UsageError(f"--sampling-arg {names}: vLLM refuses the value: {_one_line(error)}") from error
    return arguments


def _routed_experts(config: RunConfig, built: VllmConfig) -> RoutedExperts | None:
    """What the numbers of experts mean that vLLM returns, where it was told to (vLLM: `_get_routed_experts_shape`)."""
    if not config.engine_arg.get(EXPERTS_ARGUMENT):
        return None
    model = built.model_config
    if not hasattr(model, "get_num_experts_per_tok"):
        raise UsageError(f"--engine-arg {EXPERTS_ARGUMENT}: vLLM {vllm_version} is too old for it; 0.32 is not")
    return RoutedExperts(
        layers=model.get_total_num_hidden_layers(),
        top_k=model.get_num_experts_per_tok(),
        experts=model.get_num_experts(),
    )


def _engine_record() -> EngineRecord:
    device = current_platform.device_type if current_platform.is_cpu() else current_platform.get_device_name()
    return EngineRecord(
        name="vllm", version=vllm_version, device=device, versions=package_versions(), processors=PROCESSORS["vllm"]
    )


def _one_line(error: BaseException) -> str:
    """The telling part of an exception's text; of pydantic's, what is wrong with which field."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        place = "".join(f"{part}: " for part in problem["loc"])
        return place + problem["msg"].removeprefix("Value error, ")
    return " ".join(str(error).split()) or type(error).__name__
