"""vLLM in this process: AsyncLLM, one request a sample, masks read natively or from processed logprobs.

What rollgen sets on every engine: `logprobs_mode="processed_logprobs"` (logprobs after temperature, normalised over the
support), `generation_config="vllm"` (a model's generation_config.json must not change sampling in silence; its EOS ids
still count), unlimited `max_logprobs`. On a CPU also: no chunked prefill, because Model Runner V1 kills the engine when
a prefill with a per-request seed is chunked; a batch wide enough for one whole context; an explicit KV cache size,
because the default claims nearly all memory; eager mode.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import ValidationError

from rollgen.config import RunConfig
from rollgen.engines import capture
from rollgen.engines.base import Capture, RequestError, SampleRequest
from rollgen.engines.children import PARENT_VARIABLE
from rollgen.errors import CaptureError, EngineError, UsageError
from rollgen.format.manifest import EngineRecord
from rollgen.rollouts import FINISH_REASONS, Completion, Sampling

# Read by vLLM when it is imported. Standard output is for data, so its log goes to stderr, and without its chatter.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore::DeprecationWarning")  # in its processes

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput

    from rollgen.rollouts import Int32Array

GIB = 1 << 30
CPU_MAX_NUM_SEQS = 64
CPU_KV_CACHE_SHARE = 0.25
"""Of the memory that is free at start; bounded by CPU_KV_CACHE_MAX."""
CPU_KV_CACHE_MAX = 16 * GIB
SHUTDOWN_SECONDS = 10.0
"""For the engine process to release its device and shared memory before it is killed."""
WINDOW_PER_SLOT = 1.5
"""Requests in flight for each place in the engine's batch: the next prompt waits inside the engine, not outside."""
PROCESSORS = "temperature, min_p, top_k, top_p"
"""vLLM's order (`vllm/v1/worker/gpu/sample/sampler.py`)."""
_DEAD = "vLLM's engine process died (its own messages are above); finished samples are stored, continue with --resume"
_VERSIONED = ("torch", "transformers", "triton", "flashinfer-python")


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
        self.capture: Capture
        self.capture, self._vllm_config = _resolve(config, model, capture_wanted, untruncated)
        if self._vllm_config.model_config.is_diffusion:
            raise UsageError(f"{model}: diffusion models have no per-token sampling distribution to keep")
        self.record = _engine_record()
        self.dtype = str(self._vllm_config.model_config.dtype).removeprefix("torch.")
        self.window = int(WINDOW_PER_SLOT * self._vllm_config.scheduler_config.max_num_seqs)

    async def start(self) -> None:
        """Load the weights in a thread, so that the loop sees signals. Cancelling it ends the engine's processes."""
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        loading = asyncio.ensure_future(
            asyncio.to_thread(AsyncLLM.from_vllm_config, self._vllm_config, disable_log_stats=True)
        )
        try:
            self._llm = await asyncio.shield(loading)
        except asyncio.CancelledError:
            while not loading.done():  # the thread cannot be stopped, but without its processes it gives up
                _end_processes()
                await asyncio.wait({loading}, timeout=0.2)
            loading.exception()  # expected, and of no interest
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not load the model: {_one_line(error)}") from error

    async def sample(self, request: SampleRequest) -> Completion:
        """See `engines.base.Engine.sample`."""
        num_logprobs = self._first_num_logprobs(request.prompt.sampling)
        while True:
            output = await self._generate(request, num_logprobs)
            try:
                return self._completion(request, output, num_logprobs)
            except capture.IncompleteSupport:
                self.resampled += 1
                num_logprobs = min(2 * num_logprobs, self._vocab_size)

    def close(self) -> None:
        """Shut the engine down, or end its processes when it has not finished loading."""
        if self._llm is not None:
            self._llm.shutdown(timeout=SHUTDOWN_SECONDS)
            self._llm = None
        _end_processes()

    def _first_num_logprobs(self, sampling: Sampling) -> int:
        """How many logprobs to ask for besides the sampled token's; 0 when masks or nothing suffices."""
        wanted = self.capture == "logprobs" or (self.capture == "native" and self._config.support_logprobs)
        if not wanted or not sampling.truncates:
            return 0
        return min(capture.first_num_logprobs(sampling.top_k), self._vocab_size)

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
        sampling = request.prompt.sampling
        return SamplingParams(
            seed=request.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=num_logprobs,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            **self._sampling_args,
        )

    def _completion(self, request: SampleRequest, output: CompletionOutput, num_logprobs: int) -> Completion:
        if output.finish_reason not in FINISH_REASONS:
            raise RequestError(f"vLLM ended the request with finish reason {output.finish_reason!r}")
        prompt = request.prompt
        support = self._support(prompt.sampling, output, num_logprobs)
        token_ids = np.asarray(output.token_ids, np.int32)
        return Completion(
            prompt_id=prompt.prompt_id,
            sample_index=request.sample_index,
            prompt_index=prompt.prompt_index,
            prompt_token_ids=prompt.token_ids,
            token_ids=token_ids,
            logprobs=support.logprobs,
            mask_ids=support.mask_ids,
            mask_offsets=support.mask_offsets,
            finish_reason=output.finish_reason,
            sampling=prompt.sampling,
            seed=request.seed,
            stop_reason=_stop_reason(output),
            support_logprobs=support.support_logprobs if self._config.support_logprobs else None,
            replayable=self._replayable,
            text=self._decode(token_ids),
            prompt=prompt.prompt,
            metadata=prompt.metadata,
        )

    def _support(self, sampling: Sampling, output: CompletionOutput, num_logprobs: int) -> capture.CapturedSupport:
        flat, tokens = output.logprobs, len(output.token_ids)
        if flat is None:
            raise CaptureError("vLLM returned no logprobs")
        if not sampling.truncates:
            return capture.untruncated(tokens, capture.sampled_logprobs(flat.logprobs, tokens=tokens))
        if num_logprobs:
            processed = capture.from_processed_logprobs(
                flat.token_ids, flat.logprobs, tokens=tokens, num_logprobs=num_logprobs, vocab_size=self._vocab_size
            )
            if self.capture == "logprobs":
                return processed
        if output.sampling_mask is None:
            raise CaptureError("vLLM returned no sampling mask: was sampling sharded over the batch?")
        logprobs = capture.sampled_logprobs(flat.logprobs, tokens=tokens, stride=num_logprobs + 1)
        native = capture.from_masks(output.sampling_mask.token_ids, logprobs)
        return capture.attach_support_logprobs(native, processed) if num_logprobs else native


def _stop_reason(output: CompletionOutput) -> str | None:
    """JSON text of the token id or string that stopped it. (For a repetition, vLLM puts its own word there.)"""
    if output.finish_reason != "stop" or output.stop_reason is None:
        return None
    return json.dumps(output.stop_reason, ensure_ascii=False)


def _end_processes() -> None:
    for child in multiprocessing.active_children():
        child.terminate()


def _resolve(config: RunConfig, model: str, wanted: str, untruncated: str) -> tuple[Capture, VllmConfig]:
    """Pick the capture and build vLLM's configuration for it, which loads no weights."""
    if wanted == "none":
        return "none", _vllm_config(config, model, native=False)
    if wanted == "logprobs" or (wanted == "auto" and untruncated == "some"):
        return "logprobs", _vllm_config(config, model, native=False)
    if untruncated == "some":
        raise UsageError("--capture native: vLLM needs top_k > 0 on every prompt; some prompts have top_k 0")
    try:
        return "native", _vllm_config(config, model, native=True)
    except UsageError as error:
        if wanted == "native":
            raise UsageError(f"--capture native: {error}; use --capture logprobs") from error
    return "logprobs", _vllm_config(config, model, native=False)


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
        arguments["return_sampling_mask"] = True
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
    versions = {}
    for package in _VERSIONED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    device = current_platform.device_type if current_platform.is_cpu() else current_platform.get_device_name()
    from vllm import __version__ as vllm_version

    return EngineRecord(name="vllm", version=vllm_version, device=device, versions=versions, processors=PROCESSORS)


def _one_line(error: BaseException) -> str:
    """The telling part of an exception's text; of pydantic's, what is wrong with which field."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        place = "".join(f"{part}: " for part in problem["loc"])
        return place + problem["msg"].removeprefix("Value error, ")
    return " ".join(str(error).split()) or type(error).__name__
