"""`rollgen.ops` on a CUDA device: are the values right, and how near to the memory's own speed is it?

    python -m tests.benchmarks.gpu [--json FILE] [--seconds 270] [--device cpu --small]

A report in Markdown, in under five minutes. It needs torch, numpy, pyarrow and this repository, and makes its own data.
Each case is the median of repeats timed with device events, after a warm-up, the caches flushed before each. `GB` is
the least that the case must move: what is read counts once, each scattered logit as the 32 bytes that memory moves at
once, and what is written once. `of copy` is GB / time as a share of what a large device-to-device copy reaches in the
same run. What would begin after `--seconds`, or does not fit into memory, is skipped and named. Progress is on stderr.
Exits 1 when a value is wrong, 2 when there is no CUDA device or no way to write the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgen.ops import Support, support_logprobs, support_logprobs_from_hidden
from tests.benchmarks.replay import (
    BACKWARD,
    FORWARD,
    WITH_WEIGHT,
    Case,
    Tokens,
    backward,
    dense_from_hidden,
    dense_logprobs,
    hidden_cases,
    logits_cases,
    make_tokens,
)

WARM_UPS = 2
REPEATS = 20
CASE_SECONDS = 1.0
"""No further repeat of a case that has taken this long, but three at least."""
SECTOR_BYTES = 32
"""What the device's memory moves for a single number."""
FLUSH_BYTES = 256 << 20
"""More than any cache holds."""
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Sizes:
    """What to measure at."""

    vocab_size: int
    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    checked_tokens: int
    """Where values are compared with float64."""
    copy_bytes: int
    batch_tokens: int
    """Of the transfer from the host."""


FULL = Sizes(151_936, (4096, 16_384), (896, 4096), 256, 4 << 30, 65_536)
SMALL = Sizes(1000, (8,), (16,), 16, 1 << 20, 64)


@dataclass(frozen=True)
class Result:
    """One measured case."""

    section: str
    case: str
    seconds: float
    bytes: int
    """The least that must be moved."""
    copy_share: float | None
    """None when no copy was measured."""
    extra_bytes: int | None
    """Peak device memory beyond what was allocated before; None on a CPU."""


@dataclass(frozen=True)
class Check:
    """One compared value."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """A NaN does not pass."""
        return self.error <= self.limit


@dataclass
class Bench:
    """The device, the clock and what was found so far."""

    device: torch.device
    sizes: Sizes
    budget_seconds: float
    started: float = field(default_factory=time.monotonic)
    copy_rate: float | None = None
    """Bytes a second, read and written, of a large copy."""
    results: list[Result] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    flushed: Tensor = field(init=False)
    """Written before each repeat, which empties the caches."""

    def __post_init__(self) -> None:
        self.flushed = torch.empty(FLUSH_BYTES if self.on_cuda else 1, dtype=torch.uint8, device=self.device)

    @property
    def on_cuda(self) -> bool:
        """Whether there are device events and memory statistics."""
        return self.device.type == "cuda"

    @property
    def is_over(self) -> bool:
        """Whether all the time is spent."""
        return time.monotonic() - self.started > self.budget_seconds

    def begin(self, what: str) -> bool:
        """Whether there is time for it, before anything is made for it: it is announced, or named as skipped."""
        if self.is_over:
            self.skipped.append(f"{what}: no time left")
            return False
        print(f"gpu: {time.monotonic() - self.started:.0f} s: {what}", file=sys.stderr, flush=True)
        return True

    @contextmanager
    def fitting(self, what: str) -> Iterator[None]:
        """What does not fit into memory, that of a CPU included, ends here and is named as skipped."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.skipped.append(f"{what}: out of memory")

    def measure(self, section: str, case: str, run: Callable[[], object], moved: int) -> None:
        """Add a result, or a skipped case."""
        with self.fitting(f"{section}, {case}"):
            extra = self._extra_bytes(run)
            seconds = self._median_seconds(run)
            share = None if self.copy_rate is None else moved / seconds / self.copy_rate
            self.results.append(Result(section, case, seconds, moved, share, extra))

    def _median_seconds(self, run: Callable[[], object]) -> float:
        """Of one run on the device; the last one is that in which the time ran out."""
        for _ in range(WARM_UPS):
            if not self.is_over:
                run()
        times: list[float] = []
        while not times or (
            len(times) < REPEATS and not self.is_over and (len(times) < 3 or sum(times) < CASE_SECONDS)
        ):
            self.flushed.zero_()
            times.append(self._cuda_seconds(run) if self.on_cuda else _wall_seconds(run))
        return statistics.median(times)

    def _cuda_seconds(self, run: Callable[[], object]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    def _extra_bytes(self, run: Callable[[], object]) -> int | None:
        if not self.on_cuda:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def randn(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(*shape, dtype=dtype, device=self.device).mul_(scale)

    def tokens(self, count: int) -> Tokens:
        """The synthetic tokens on the device."""
        return make_tokens(count, self.sizes.vocab_size).to(self.device)


def main() -> int:
    """Parse, measure, print. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description="rollgen.ops on CUDA.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--seconds", type=float, default=270.0, help="begin nothing after this long")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    if complaint := what_is_missing(arguments.device, arguments.json):
        print(f"gpu: {complaint}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    sizes = SMALL if arguments.small else FULL
    bench = Bench(torch.device(arguments.device), sizes, arguments.seconds)
    run_all(bench)
    about = environment(bench)
    print(as_markdown(bench, about))
    if arguments.json:
        numbers = {name: [asdict(row) for row in getattr(bench, name)] for name in ("results", "checks")}
        arguments.json.write_text(json.dumps(about | numbers | {"skipped": bench.skipped}, indent=1) + "\n")
    return 0 if all(check.passed for check in bench.checks) else 1


def what_is_missing(device: str, file: Path | None) -> str | None:
    """The device, or the right to write the file: said before anything is measured."""
    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device (--device cpu --small runs on a CPU)"
    try:
        if file:
            file.open("a").close()
    except OSError as error:
        return f"cannot write {file}: {error.strerror}"
    return None


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Of a device, of numpy, or of torch on a CPU, which has no type of its own for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def run_all(bench: Bench) -> None:
    """Values first, whatever time there is, then the copy that all is compared with, then every section."""
    print("gpu: values against float64 and the CPU", file=sys.stderr, flush=True)
    for dtype in DTYPES:
        check_logits(bench, dtype)
        check_hidden(bench, dtype)
    check_dense_forms(bench)
    measure_copy(bench)
    for tokens in bench.sizes.tokens:
        measure_dense_forms(bench, tokens)
    measure_transfer(bench)
    for tokens in bench.sizes.tokens:
        for dtype in DTYPES:
            measure_logits(bench, tokens, dtype)
    for tokens in bench.sizes.tokens:
        for hidden in bench.sizes.hidden:
            for dtype in DTYPES:
                measure_hidden(bench, tokens, hidden, dtype)


def check_logits(bench: Bench, dtype: torch.dtype) -> None:
    """`support_logprobs` against the dense recipe in float64, value and gradient."""
    tokens = bench.tokens(bench.sizes.checked_tokens)
    logits = bench.randn(len(tokens.support), bench.sizes.vocab_size, dtype=dtype, scale=4).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    value = support_logprobs(logits, tokens.support, tokens.targets, tokens.temperature)
    mask, temperature = tokens.support.to_bool(), tokens.temperature.double()
    expected = dense_logprobs(exact, mask, tokens.targets, temperature)
    name = f"support_logprobs, {_short(dtype)}"
    _compare(bench, name, value, expected, [logits], [exact], tokens.upstream)


def check_hidden(bench: Bench, dtype: torch.dtype) -> None:
    """`support_logprobs_from_hidden` against float64, and its gradients bit by bit over repeats."""
    tokens, width = bench.tokens(bench.sizes.checked_tokens), bench.sizes.hidden[0]
    inputs = [
        bench.randn(len(tokens.support), width, dtype=dtype).requires_grad_(),
        bench.randn(bench.sizes.vocab_size, width, dtype=dtype, scale=width**-0.5).requires_grad_(),
    ]
    exact = [part.detach().double().requires_grad_() for part in inputs]

    def compute() -> Tensor:
        return support_logprobs_from_hidden(*inputs, tokens.support, tokens.targets, tokens.temperature)

    mask, temperature = tokens.support.to_bool(), tokens.temperature.double()
    expected = dense_from_hidden(*exact, mask, tokens.targets, temperature)
    name = f"support_logprobs_from_hidden, {_short(dtype)}"
    _compare(bench, name, compute(), expected, inputs, exact, tokens.upstream)
    first, *others = (backward(compute, inputs, tokens.upstream) for _ in range(5))
    differing = sum(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    bench.checks.append(Check(f"{name}: gradients that differ in any bit over 5 runs", differing, 0))


def _compare(
    bench: Bench,
    name: str,
    value: Tensor,
    expected: Tensor,
    inputs: list[Tensor],
    exact: list[Tensor],
    upstream: Tensor,
) -> None:
    """Relative errors: sums are in float32, and gradients are rounded to the dtype of the inputs, by half an eps."""
    bench.checks.append(Check(f"{name}: values", _error(value, expected), 1e-5))
    gradients = torch.autograd.grad(value, inputs, upstream)
    references = torch.autograd.grad(expected, exact, upstream.double())
    for place, (gradient, reference) in enumerate(zip(gradients, references, strict=True)):
        limit = max(1e-5, torch.finfo(gradient.dtype).eps / 2)
        bench.checks.append(Check(f"{name}: gradient of input {place}", _error(gradient, reference), limit))


def check_dense_forms(bench: Bench) -> None:
    """Each dense form on the device, over garbage, against the one that the CPU makes."""
    support = make_tokens(bench.sizes.checked_tokens, bench.sizes.vocab_size).support
    moved = support.to(bench.device)
    for name in ("to_bool", "to_bitmask", "to_padded_ids"):
        expected = getattr(support, name)()
        garbage = torch.ones_like(expected, device=bench.device)
        differing = (getattr(moved, name)(out=garbage).cpu() != expected).sum().item()
        bench.checks.append(Check(f"{name}: elements unlike the CPU's", differing, 0))


def measure_copy(bench: Bench) -> None:
    """The device's own speed: bytes read and written, a second, of a copy larger than any cache."""
    if not bench.begin("device, copy and memset"):
        return
    with bench.fitting("device, copy and memset"):
        source = torch.ones(bench.sizes.copy_bytes, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        bench.measure("device", "copy", lambda: target.copy_(source), 2 * source.nbytes)
        if bench.results:
            bench.copy_rate = bench.results[0].bytes / bench.results[0].seconds
        bench.measure("device", "memset", target.zero_, target.nbytes)


def measure_dense_forms(bench: Bench, count: int) -> None:
    """Into buffers made once, as in a loop over chunks."""
    section = f"dense forms, N {count:,}"
    if not bench.begin(section):
        return
    with bench.fitting(section):
        support = bench.tokens(count).support
        csr = support.ids.nbytes + support.offsets.nbytes
        for name in ("to_bool", "to_bitmask", "to_padded_ids"):
            make = getattr(support, name)
            out = make()
            bench.measure(section, name, partial(make, out=out), out.nbytes + csr)


def measure_transfer(bench: Bench) -> None:
    """What a RolloutBatch holds, from the host: as the loader collates it, and pinned."""
    count = bench.sizes.batch_tokens
    section = f"batch of {count:,} tokens to the device"
    if not bench.begin(section):
        return
    tokens = make_tokens(count, bench.sizes.vocab_size)
    batch: list[Tensor | Support] = [
        tokens.support,
        tokens.targets,  # input_ids
        torch.arange(count),  # response_places
        torch.zeros(count),  # logprobs
        *(torch.ones(count, dtype=torch.bool) for _ in range(2)),  # attention_mask, response_mask
    ]
    size = sum(part.ids.nbytes + part.offsets.nbytes if isinstance(part, Support) else part.nbytes for part in batch)
    bench.measure(section, "pageable", lambda: [part.to(bench.device) for part in batch], size)
    if bench.on_cuda:
        pinned = [part.pin_memory() for part in batch]
        bench.measure(section, "pinned", lambda: [part.to(bench.device, non_blocking=True) for part in pinned], size)


def measure_logits(bench: Bench, count: int, dtype: torch.dtype) -> None:
    """`support_logprobs` and the dense recipe."""
    section = f"logits, N {count:,}, {_short(dtype)}"
    if not bench.begin(section):
        return
    tokens, vocab_size = bench.tokens(count), bench.sizes.vocab_size
    logits_bytes = count * vocab_size * dtype.itemsize
    csr = tokens.support.ids.nbytes + tokens.support.offsets.nbytes
    gathered = csr + len(tokens.support.ids) * SECTOR_BYTES

    def moved(case: Case) -> int:
        reading = logits_bytes + count * vocab_size if case.way == "dense" else gathered
        return reading + (logits_bytes if case.passes == BACKWARD else 0)

    def cases() -> Iterator[Case]:
        return logits_cases(bench.randn(count, vocab_size, dtype=dtype), tokens)

    _measure_cases(bench, section, cases, moved)


def measure_hidden(bench: Bench, count: int, width: int, dtype: torch.dtype) -> None:
    """`support_logprobs_from_hidden` and the full product with the dense recipe."""
    section = f"hidden, N {count:,}, H {width:,}, {_short(dtype)}"
    if not bench.begin(section):
        return
    tokens, vocab_size = bench.tokens(count), bench.sizes.vocab_size
    row = width * dtype.itemsize
    several = tokens.support[tokens.support.lengths > 1]  # a support of one id needs neither its state nor its weight
    distinct = len(several.ids.unique())

    def moved(case: Case) -> int:
        read = vocab_size + count if case.way == "dense" else distinct + len(several)
        written = {FORWARD: 0, BACKWARD: count, WITH_WEIGHT: count + vocab_size}[case.passes]
        return (read + written) * row

    def cases() -> Iterator[Case]:
        hidden = bench.randn(count, width, dtype=dtype)
        return hidden_cases(hidden, bench.randn(vocab_size, width, dtype=dtype, scale=width**-0.5), tokens)

    _measure_cases(bench, section, cases, moved)


def _measure_cases(
    bench: Bench, section: str, cases: Callable[[], Iterator[Case]], moved: Callable[[Case], int]
) -> None:
    """All cases of a section. Inputs that do not fit end it, and so does the time: the next case may make more."""
    with bench.fitting(f"{section}, inputs"):
        for case in cases():
            bench.measure(section, f"{case.way}, {case.passes}", case.run, moved(case))
            if bench.is_over:
                bench.skipped.append(f"{section}: no time left for what comes after {case.way}, {case.passes}")
                return


def environment(bench: Bench) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "device": torch.cuda.get_device_name(bench.device) if bench.on_cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "sizes": asdict(bench.sizes),
        "copy_bytes_per_second": bench.copy_rate,
        "seconds": time.monotonic() - bench.started,
    }


def as_markdown(bench: Bench, about: dict[str, Any]) -> str:
    """The report."""
    seconds = {(result.section, result.case): result.seconds for result in bench.results}
    rate = "not measured" if bench.copy_rate is None else f"moves {bench.copy_rate / 1e9:,.0f} GB/s, read and written"
    lines = [
        f"# rollgen.ops on {about['device']}",
        "",
        f"torch {about['torch']}, CUDA {about['cuda']}, V {bench.sizes.vocab_size:,}; a copy {rate}; "
        f"{about['seconds']:.0f} s in all.",
        "",
        "| | | ms | GB | of copy | extra MiB | times dense |",
        "|---|---|---|---|---|---|---|",
        *(_result_line(result, seconds) for result in bench.results),
        "",
        "| value | relative error | limit | |",
        "|---|---|---|---|",
        *(f"| {c.name} | {c.error:.2g} | {c.limit:.2g} | {'' if c.passed else 'WRONG'} |" for c in bench.checks),
    ]
    if bench.skipped:
        lines += ["", "Skipped:", "", *(f"- {what}" for what in bench.skipped)]
    return "\n".join(lines)


def _result_line(result: Result, seconds: dict[tuple[str, str], float]) -> str:
    """`seconds` of every case: the last column is the speed against the dense twin, where there is one."""
    dense = seconds.get((result.section, result.case.replace("rollgen", "dense")))
    speed = "" if dense is None or "rollgen" not in result.case else f"{dense / result.seconds:,.1f}"
    extra = "" if result.extra_bytes is None else f"{result.extra_bytes / 2**20:,.1f}"
    share = "" if result.copy_share is None else f"{result.copy_share:.0%}"
    numbers = f"{result.seconds * 1e3:.3f} | {result.bytes / 1e9:.3f} | {share} | {extra} | {speed}"
    return f"| {result.section} | {result.case} | {numbers} |"


def _wall_seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _error(value: Tensor, expected: Tensor) -> float:
    """|value - expected| / |expected|, in float64."""
    return ((value.double() - expected).norm() / expected.norm()).item()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
