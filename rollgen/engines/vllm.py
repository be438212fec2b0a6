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
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from rollgen.config import RunConfig
from rollgen.engines.base import Capture, RequestError, SampleRequest
from rollgen.engines.capture import first_num_logprobs
from rollgen.engines.children import PARENT_VARIABLE
from rollgen.engines.installed import PROCESSORS, package_versions
from rollgen.engines.outputs import completion_of, read_outputs
from rollgen.engines.requirements import NATIVE_ARGUMENT, native_problem
from rollgen.errors import EngineError, IncompleteSupport, UsageError
from rollgen.format.manifest import EngineRecord
from rollgen.rollouts import FINISH_REASONS, Completion, Sampling

# Read by vLLM when it is imported. Standard output is for data, so its log goes to stderr, and without its chatter.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a forked child would not load `children.py`
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore::DeprecationWarning")  # in its processes

from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

    from rollgen.rollouts import Int32Array

GIB = 1 << 30
CPU_MAX_NUM_SEQS = 64
CPU_KV_CACHE_SHARE = 0.25
"""Of the memory that is free at start; bounded by CPU_KV_CACHE_MAX."""
CPU_KV_CACHE_MAX = 16 * GIB
SHUTDOWN_SECONDS = 10.0
"""For the engine process to release its device and shared memory before it is killed."""
TERMINATE_SECONDS = 5.0
"""For a process of a half-loaded engine to end by itself."""
WINDOW_PER_SLOT = 1.5
"""Requests in flight for each place in the engine's batch: the next prompt waits inside the engine, not outside."""
_DEAD = "vLLM's engine process died (its own messages are above)"


class VllmEngine:
    """`engines.base.Engine` on vLLM's AsyncLLM. Constructing it checks everything but loads no weights.

    `capture_wanted` is the user's wish; `untruncated` says whether some or all prompts are sampled without truncation
    (native masks need top_k > 0 on every request). `decode` turns token ids into text.
    Raises UsageError when vLLM refuses the configuration or cannot give the capture that was asked for.
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
    ) -> None:
        self._config = config
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
        self.window = int(WINDOW_PER_SLOT * self._vllm_config.scheduler_config.max_num_seqs)

    async def start(self) -> None:
        """Load the weights in a thread, so that the loop sees signals. Cancelling it ends the engine's processes."""
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        vllm_config = deepcopy(self._vllm_config)  # an engine changes its own, and may be started again
        loading = asyncio.ensure_future(
            asyncio.to_thread(
                AsyncLLM.from_vllm_config,
                vllm_config,
                disable_log_stats=True,
                stat_loggers=[lambda config, index: _TokenCount(config, index, self)],
            )
        )
        try:
            self._llm = await asyncio.shield(loading)
        except asyncio.CancelledError:
            while not loading.done():  # the thread cannot be stopped, but without its processes it gives up
                await asyncio.to_thread(_end_processes)
                await asyncio.wait({loading}, timeout=0.2)
            loading.exception()  # expected, and of no interest
            raise
        except Exception as error:
            raise EngineError(
                f"vLLM could not load the model (its own messages are above): {_one_line(error)}"
            ) from error

    async def sample(self, request: SampleRequest) -> Completion:
        """See `engines.base.Engine.sample`."""
        num_logprobs = self._first_num_logprobs(request.prompt.sampling)
        while True:
            output = await self._generate(request, num_logprobs)
            try:
                return self._completion(request, output)
            except IncompleteSupport:
                if num_logprobs == self._vocab_size:
                    raise
                self.resampled += 1
                num_logprobs = min(2 * num_logprobs, self._vocab_size)

    def close(self) -> None:
        """Shut the engine down, or end its processes when it has not finished loading."""
        if self._llm is not None:
            self._llm.shutdown(timeout=SHUTDOWN_SECONDS)
            self._llm = None
        _end_processes()
        os.environ.pop(PARENT_VARIABLE, None)

    def _first_num_logprobs(self, sampling: Sampling) -> int:
        """How many logprobs to ask for besides the sampled token's; 0 when masks or nothing suffices."""
        wanted = self.capture == "logprobs" or (self.capture == "native" and self._config.support_logprobs)
        if not wanted or not sampling.truncates:
            return 0
        return min(first_num_logprobs(sampling.top_k), self._vocab_size)

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


def _end_processes() -> None:
    """End what vLLM started and wait for it: first asked, then killed. A stopped process only takes the second."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = time.monotonic() + TERMINATE_SECONDS
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


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
        free = psutil.virtual_memory().available
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
