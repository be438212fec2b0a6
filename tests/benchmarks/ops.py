"""`rollgen.ops` on one CPU thread, beside the dense recipe; time, and memory beyond the inputs.

    python -m tests.benchmarks.ops

Times are medians of interleaved rounds in one process. Memory is the peak of one run in a process of its own, over what
was resident just before: inputs, and the mask of the dense recipe, are not counted; results are, so a gradient of the
logits [N, V] or of the weight [V, H] is in it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.benchmarks.memory import peak_kib
from tests.benchmarks.replay import Case, hidden_cases, logits_cases, make_tokens

TOKENS = 512
WARM_UP_TOKENS = 8
VOCAB_SIZE = 151_936
HIDDEN = 896
"""With this vocabulary: the shape of Qwen2.5-0.5B."""
ROUNDS = 3
SECONDS = 0.02
"""A run shorter than this is repeated until it has taken this long."""
TITLES = {
    "logits": "support_logprobs, from float32 logits [N, V]",
    "hidden": f"support_logprobs_from_hidden, from float32 hidden states [N, {HIDDEN}] and lm_head [V, {HIDDEN}]",
}


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    support = make_tokens(TOKENS, VOCAB_SIZE).support
    print(f"{TOKENS} tokens, {len(support.ids) / TOKENS:.1f} ids a support, V {VOCAB_SIZE:,}, one thread")
    for group in TITLES:
        _replay_table(group)
    _dense_forms_table()


def make_cases(group: str, tokens: int) -> list[Case]:
    """The cases of one table, with inputs of their own."""
    torch.manual_seed(0)
    data = make_tokens(tokens, VOCAB_SIZE)
    if group == "logits":
        return list(logits_cases(torch.randn(tokens, VOCAB_SIZE), data))
    return list(hidden_cases(torch.randn(tokens, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN) / HIDDEN**0.5, data))


def _replay_table(group: str) -> None:
    cases = make_cases(group, TOKENS)
    seconds = median_seconds([case.run for case in cases])
    mib = [_extra_mib_of(group, place) for place in range(len(cases))]
    dense = {case.passes: place for place, case in enumerate(cases) if case.way == "dense"}
    print(f"\n{TITLES[group]}")
    print(f"{'':42}{'ms':>10}{'speed':>9}{'extra MiB':>12}{'share':>9}")
    for case, taken, extra in zip(cases, seconds, mib, strict=True):
        against = dense[case.passes]
        speed, share = seconds[against] / taken, extra / mib[against]
        print(
            f"{case.way + ', ' + case.passes:42}{taken * 1e3:>10.2f}{speed:>8,.1f}x{extra:>12.1f}{share:>9.2%}",
            flush=True,
        )


def _dense_forms_table() -> None:
    support = make_tokens(TOKENS, VOCAB_SIZE).support
    mask, bits, ids = support.to_bool(), support.to_bitmask(), support.to_padded_ids()
    runs: dict[str, tuple[Callable[[], object], torch.Tensor]] = {
        "memset": (mask.zero_, mask),
        "to_bool": (lambda: support.to_bool(out=mask), mask),
        "to_bitmask": (lambda: support.to_bitmask(out=bits), bits),
        "to_padded_ids": (lambda: support.to_padded_ids(out=ids), ids),
    }
    seconds = median_seconds([run for run, _ in runs.values()])
    print(f"\nDense forms\n{'':42}{'ms':>10}{'MiB':>9}{'GB/s':>12}")
    for (name, (_, result)), taken in zip(runs.items(), seconds, strict=True):
        print(f"{name:42}{taken * 1e3:>10.2f}{result.nbytes / 2**20:>9.1f}{result.nbytes / taken / 1e9:>12.1f}")


def median_seconds(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Of one run each, over ROUNDS rounds in turns, so that a slow moment of the machine hits all alike."""
    rounds = [[_seconds(run) for run in runs] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _seconds(run: Callable[[], object]) -> float:
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < SECONDS:
        run()
        count += 1
    return elapsed / count


def _extra_mib_of(group: str, place: int) -> float:
    command = [sys.executable, "-m", "tests.benchmarks.ops", group, str(place)]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def extra_mib(group: str, place: int) -> float:
    """Peak memory of one case in this process beyond what is resident before it, after a run with a few tokens."""
    torch.set_num_threads(1)
    make_cases(group, WARM_UP_TOKENS)[place].run()
    case = make_cases(group, TOKENS)[place]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at what is resident now
    before = peak_kib()
    case.run()
    return (peak_kib() - before) / 1024


if __name__ == "__main__":
    print(json.dumps(extra_mib(sys.argv[1], int(sys.argv[2])))) if len(sys.argv) > 1 else main()
