"""Which sampling parameters and engine arguments leave a run replayable. One allow-list: unknown means no.

Hard exclusions (top-k, top-p, min-p, allowed ids, bad words, grammars, forced tokens) only shrink the support and
replay exactly from it. Penalties, logit biases and soft processors change the relative logits *inside* the support; a
trainer that normalises its own logits over the same ids cannot reproduce them.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, Final

from rollgen.config import RunConfig
from rollgen.engines.address import check_key_variable
from rollgen.errors import UsageError
from rollgen.inert import by_name, is_secret

LOGITS_PROCESSOR_GROUP: Final = "vllm.logits_processors"

_OWNED_SAMPLING: Final = frozenset(
    "n seed temperature top_p top_k min_p max_tokens stop stop_token_ids logprobs prompt_logprobs flat_logprobs "
    "prompt_logprob_token_ids prompt_logprob_start logprob_token_ids detokenize output_kind stream_interval "
    "skip_clone".split()
)
"""SamplingParams fields that rollgen sets itself."""
_REPLAYABLE_SAMPLING: Final = frozenset(
    "min_tokens ignore_eos bad_words allowed_token_ids structured_outputs repetition_detection thinking_token_budget "
    "skip_special_tokens spaces_between_special_tokens include_stop_str_in_output skip_reading_prefix_cache".split()
)
_EXCLUDES_IDS: Final = frozenset(
    "min_tokens bad_words allowed_token_ids structured_outputs thinking_token_budget".split()
)
"""Of these, the ones that take ids out of the vocabulary."""
_NEUTRAL_SAMPLING: Final[Mapping[str, Any]] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "extra_args": None,
}
"""Fields that change relative logits, with the value at which they do nothing."""
_REFUSED_SAMPLING: Final[Mapping[str, str]] = {
    "trace_decode_token_ids": "it replaces sampled ids, which then lie outside their support",
    "watermarking": "a watermark re-weights ids inside the support",
}

_OWNED_ENGINE: Final = frozenset(
    "model revision tokenizer trust_remote_code dtype max_model_len tensor_parallel_size max_num_seqs "
    "gpu_memory_utilization enforce_eager generation_config logprobs_mode max_logprobs return_sampling_mask "
    "override_generation_config".split()
)
"""Engine arguments that have a flag of their own or that the capture decides."""
_NUMERIC_ENGINE: Final = frozenset(
    "quantization quantization_config hf_overrides kv_cache_dtype kv_cache_dtype_skip_layers config_format "
    "hf_config_path code_revision tokenizer_mode tokenizer_revision model_impl structured_outputs_config "
    "reasoning_parser reasoning_config speculative_config enable_return_routed_experts".split()
)
"""Replayable arguments that decide which distribution is sampled, or what is stored of it: identity keys of a run."""
_OPERATIONAL_ENGINE: Final = frozenset(
    "load_format download_dir safetensors_load_strategy model_loader_extra_config ignore_patterns seed block_size "
    "kv_cache_memory_bytes num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo "
    "enable_chunked_prefill max_num_batched_tokens max_num_scheduled_tokens long_prefill_token_threshold "
    "scheduling_policy async_scheduling pipeline_parallel_size data_parallel_size data_parallel_size_local "
    "data_parallel_backend distributed_executor_backend enable_expert_parallel enable_eplb eplb_config "
    "all2all_backend decode_context_parallel_size prefill_context_parallel_size max_parallel_loading_workers "
    "disable_custom_all_reduce numa_bind numa_bind_nodes cpu_offload_gb offload_backend kv_offloading_size "
    "kv_offloading_backend attention_backend attention_config moe_backend linear_backend kernel_config "
    "disable_cascade_attn compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level "
    "performance_mode disable_log_stats limit_mm_per_prompt language_model_only use_tqdm_on_load log_level".split()
)
"""Replayable arguments that decide how the work is done."""
_REFUSED_ENGINE: Final[Mapping[str, str]] = {
    "logits_processors": "custom logits processors change logits in ways a trainer cannot repeat",
    "enable_batch_sharded_sampling": "vLLM drops sampling masks when sampling is sharded over the batch",
    "watermark_config": "a watermark re-weights ids inside the support",
    "enable_trace_replay": "it replaces sampled ids, which then lie outside their support",
    "hf_token": "a secret would be written into the dataset; set HF_TOKEN in the environment",
}
_EXACT_REJECTION: Final = frozenset({"standard", "block"})
"""Rejection samplers of speculative decoding that commit tokens of the target's own distribution."""


def check_replayable(config: RunConfig) -> bool:
    """Whether every row of this run replays. Raises UsageError for what is refused, naming the reason and the fix.

    Secrets are, because settings are recorded. What could be accepted as not replayable is refused too, unless
    `config.allow_unreplayable`.
    """
    check_key_variable(config.api_key_env)
    problems = [*_sampling_problems(config.sampling_arg), *_engine_problems(config.engine_arg)]
    _refuse_installed_processors()
    if problems and not config.allow_unreplayable:
        raise UsageError(
            f"{'; '.join(problems)}. Leave it out, or pass --allow-unreplayable: rows then carry replayable=false and "
            "loaders refuse them unless told to take them"
        )
    return not problems


def excluding_args(arguments: Mapping[str, Any]) -> list[str]:
    """The sampling parameters among these that take ids out of the vocabulary, beside top-k, top-p and min-p."""
    return sorted(name for name, value in arguments.items() if value and name in _EXCLUDES_IDS)


def is_sampling_parameter(name: str) -> bool:
    """Whether vLLM's SamplingParams has such a field, as far as is known here."""
    return name in _known_sampling()


def _known_sampling() -> frozenset[str]:
    return frozenset().union(_OWNED_SAMPLING, _REPLAYABLE_SAMPLING, _NEUTRAL_SAMPLING, _REFUSED_SAMPLING)


def check_untruncated(config: RunConfig) -> None:
    """Refuse hard exclusions on prompts that truncate nothing: their supports are stored as the full vocabulary."""
    if excluding := excluding_args(config.sampling_arg):
        raise UsageError(
            f"--sampling-arg {excluding[0]}: takes ids out of the vocabulary, but some prompts are sampled without "
            "truncation and would be stored as if all ids were possible; set a top_k that never binds, like 1000"
        )


def identity_engine_args(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The engine arguments that decide the data; the rest only says how the work is done. Paths by name: they move."""
    return {name: by_name(value) for name, value in arguments.items() if name not in _OPERATIONAL_ENGINE}


def _sampling_problems(arguments: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, value in arguments.items():
        if name in _OWNED_SAMPLING:
            raise UsageError(f"--sampling-arg {name}: rollgen sets this itself; use its own flag if there is one")
        if name in _REFUSED_SAMPLING and value:
            raise UsageError(f"--sampling-arg {name}: refused, {_REFUSED_SAMPLING[name]}")
        _check_open("--sampling-arg", name, value)
        if (
            name in _REPLAYABLE_SAMPLING
            or name in _REFUSED_SAMPLING
            or (name in _NEUTRAL_SAMPLING and value == _NEUTRAL_SAMPLING[name])
        ):
            continue
        if is_sampling_parameter(name):
            why = "cannot be replayed: it may change logits inside the support"
        else:
            similar = get_close_matches(name, sorted(_known_sampling()), 1)
            meant = f" (did you mean {similar[0]}?)" if similar else ""
            why = f"is none that is known here{meant}: it may change logits"
        problems.append(f"--sampling-arg {name}={value} {why}")
    return problems


def _engine_problems(arguments: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, value in arguments.items():
        if name in _OWNED_ENGINE:
            raise UsageError(f"--engine-arg {name}: rollgen sets this itself; use its own flag if there is one")
        if name in _REFUSED_ENGINE and value:
            raise UsageError(f"--engine-arg {name}: refused, {_REFUSED_ENGINE[name]}")
        _check_open("--engine-arg", name, value)
        if name == "speculative_config":
            _check_speculation(value)
        if not any(name in known for known in (_NUMERIC_ENGINE, _OPERATIONAL_ENGINE, _REFUSED_ENGINE)):
            problems.append(f"--engine-arg {name} is not known to leave sampling replayable")
    return problems


def _check_open(flag: str, name: str, value: object) -> None:
    """Refuse what a dataset would make public."""
    if is_secret(name, value):
        raise UsageError(
            f"{flag} {name}: looks like a secret, which would be written into the dataset; set it in the environment "
            "(HF_TOKEN, for instance)"
        )


def _check_speculation(value: object) -> None:
    """Only exact rejection sampling with fixed verification boundaries keeps the target's distribution."""
    if not isinstance(value, dict):
        raise UsageError("--engine-arg speculative_config: expected a JSON object")
    method = value.get("rejection_sample_method", "standard")
    if method not in _EXACT_REJECTION:
        raise UsageError(
            f"--engine-arg speculative_config: rejection_sample_method {method!r} can commit tokens outside the "
            f"support; use one of {', '.join(sorted(_EXACT_REJECTION))}"
        )
    for name in ("enable_adaptive_verification", "synthetic_acceptance_rates", "synthetic_acceptance_length"):
        if value.get(name):
            raise UsageError(f"--engine-arg speculative_config: {name} is refused: acceptance is then not exact")


def _refuse_installed_processors() -> None:
    installed = sorted(entry.name for entry in entry_points(group=LOGITS_PROCESSOR_GROUP))
    if installed:
        raise UsageError(
            f"installed packages add logits processors to vLLM ({', '.join(installed)}), which cannot be replayed; "
            "uninstall them, or use an environment without them"
        )
