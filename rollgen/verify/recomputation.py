"""What recomputing log-probabilities found: the figures, the verdict over them, and both as text.

    delta = log pi_theta - log pi_old      ratio = exp(delta)      at temperature, of sampled tokens

pi_old is what is stored, pi_theta what a model says now: normalised over the stored supports (with masks), or over the
full vocabulary, as a trainer has it that ignores them (without). With the checkpoint that sampled pi_theta is pi_old,
so with masks each ratio is 1 but for rounding. What rounding may do is measured, not guessed: below float32 the *noise
floor* is |delta| between two passes of the same weights, one in float32. No replay comes closer than that. The mean
ratio is sharper: tokens were drawn from pi_old, and the sum over the support of pi_old * ratio is 1 whatever the noise,
if the support is the same. So it has to be 1 within its standard error, and wrong supports show in bfloat16 too.

Supports that are wrong and log-probabilities that fit them give ratios of 1: so each support is judged by what top-k,
top-p and min-p leave of the model's logits (`truncation.py`). In float32 none may be wrong. Below, rounding swaps ids
at a boundary, and what counts is how many supports are off by more than that.

Tokens that were sampled at another temperature have ratios of mean 1 too. Their mean score tells, as does the slope of
delta over the score, which needs fewer tokens: they estimate the temperature that sampled over the one that is stored.

Chance has one bound everywhere, for sums over tokens that are 0 on average, each given the ones before: ERRORS standard
errors, and JUMP times the largest term, which is what a few tokens have in place of a bell curve. That is Bernstein's
inequality for martingales (Freedman, "On tail probabilities for martingales", 1975): for a chance of 2 exp(-L) the
sum stays within sqrt(2 L V) + 2 L M / 3, V its variance and M the largest term. L = 12.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

OUTSIDE: Final = 0.1
"""Ratios further than this from 1 are counted."""
ERRORS: Final = 5
"""Standard errors that a mean may be off: chance alone takes a bell curve further once in 1.7 million datasets."""
JUMP: Final = 8.3
"""Largest terms that a sum may be off on top of that."""
RATIO_SLACK: Final = 1e-3
"""Added to that: in float32 the ratios hardly scatter, but kernels may round in one direction. 2e-8 was measured (2,441
tokens of a 135M model, vLLM against transformers on a CPU); supports that are ignored cost that run 8e-2."""
DELTA_BOUND: Final = 1e-2
"""Of the largest |delta| in float32: 5e-5 in that run, with room for deeper models and for GPU kernels. A row that
holds another's numbers is off by tenths and more."""
NOISE_FACTOR: Final = 4
"""Noise floors that the mean |delta| may be long below float32: each implementation is one away from the exact result,
so 2 if all errors add up (1.3 was measured, bfloat16), and as much again for kernels that round more often."""
LARGEST_FACTOR: Final = 10
"""The same for the largest |delta|: a maximum scatters more than a mean."""
NOISE_SLACK: Final = 1e-3
"""Added to both: a floor over a few tokens may be 0, where most supports are single ids. A few tokens are also allowed
LARGEST_FACTOR times the largest noise over their number, and no noise counts as less than one step of the dtype."""
SAMPLER_SLACK: Final = 0.05
"""Of the temperature that the tokens say, on top of chance: what random numbers of an engine may be worth."""
SLOPE_SLACK: Final = 0.01
"""Of the temperature that the log-probabilities say: rounding that is not independent of the logits looks like another
one. 0.0016 was measured (bfloat16, that model)."""
TOLERANCES: Final = tuple(2.0**power for power in range(-7, 7))
"""Gaps of supports in logits that counts are kept for. The first is what float32 may be off, as DELTA_BOUND: no support
of that run had any gap."""
SUPPORT_FACTOR: Final = 4
"""Mean differences of the gaps of two passes that a support may be off below float32."""
SUPPORT_SHARE: Final = 0.005
"""Of supports that are off by more even so: none of 2,304 was (bfloat16, that model), 0.003 of a tiny model's."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far log-probabilities are apart, over all tokens."""

    mean_ratio: float
    standard_error: float
    """Of the mean ratio."""
    mean_abs: float
    """Of delta, nats."""
    max_abs: float
    """Of delta, nats; infinite when a sampled token is outside its support."""
    share_outside: float
    """Of the ratios, further than OUTSIDE from 1."""

    def to_json(self, suffix: str = "") -> dict[str, float | None]:
        """Figures by name; None for one that is not finite, which JSON has no number for."""
        figures = {
            "mean_ratio": self.mean_ratio,
            "standard_error": self.standard_error,
            "mean_abs_delta_logprob": self.mean_abs,
            "max_abs_delta_logprob": self.max_abs,
            "share_outside": self.share_outside,
        }
        return {name + suffix: _finite(value) for name, value in figures.items()}


@dataclass(frozen=True, slots=True)
class Temperature:
    """The temperature at which was sampled over the one that is stored, estimated to first order: 1 is right."""

    by_tokens: float
    """1 - sum of scores / sum of their variances."""
    tokens_error: float
    """Its standard error: the variance is the Fisher information."""
    largest_score: float
    """Absolute; of a sampled token."""
    by_logprobs: float
    """1 + slope of delta over the score."""
    logprobs_error: float
    """Its standard error if 1 is right: noise that is as likely up as down goes ERRORS of these as rarely as a bell
    curve, however few tokens there are."""

    @property
    def z_score(self) -> float:
        """Of the mean score."""
        return (1 - self.by_tokens) / self.tokens_error

    def problem(self) -> str | None:
        """Why it is not 1; None when it may be."""
        chance = ERRORS * self.tokens_error + JUMP * self.largest_score * self.tokens_error**2
        for source, value, bound in (
            ("tokens", self.by_tokens, chance + SAMPLER_SLACK),
            ("log-probabilities", self.by_logprobs, ERRORS * self.logprobs_error + SLOPE_SLACK),
        ):
            if not abs(value - 1) <= bound:
                return (
                    f"the {source} say that the temperature was {value:.3f} times the one that is stored, "
                    f"where chance and rounding explain ± {bound:.3f}"
                )
        return None

    def to_json(self) -> dict[str, float | None]:
        """Figures by name."""
        return {
            "z_score": _finite(self.z_score),
            "ratio_by_tokens": _finite(self.by_tokens),
            "ratio_by_tokens_error": self.tokens_error,
            "ratio_by_logprobs": _finite(self.by_logprobs),
            "ratio_by_logprobs_error": _finite(self.logprobs_error),
        }


@dataclass(frozen=True, slots=True)
class SupportGaps:
    """Supports against what top-k, top-p and min-p leave of the model's logits."""

    tokens: int
    """Judged: those with a support that is not the full vocabulary."""
    violating: int
    """Of these, with a gap beyond the tolerance."""
    tolerance: float
    """Of a gap, logits."""
    worst: float
    """The largest gap, logits; 0 or less: none is off."""
    noise: float | None
    """Largest difference between the gaps of two passes, one in float32, and at least one step of the dtype; None for
    float32."""

    def problem(self) -> str | None:
        """Why these are not right; None when they may be."""
        if self.noise is None:
            allowed, bound = 0, self.tolerance
        else:
            expected = SUPPORT_SHARE * self.tokens
            allowed = int(expected + ERRORS * math.sqrt(expected) + JUMP)
            bound = NOISE_FACTOR * self.noise
        if self.violating <= allowed and self.worst <= bound:
            return None
        return (
            f"{self.violating:,} of {self.tokens:,} supports are not what top_k, top_p and min_p leave of the model's "
            f"logits, by {self.worst:.2g} at most, where rounding explains {allowed:,} and {bound:.2g}"
        )

    def to_json(self) -> dict[str, float | None]:
        """Figures by name."""
        return {
            "judged": self.tokens,
            "violating": self.violating,
            "tolerance": self.tolerance,
            "worst_gap": _finite(self.worst),
        }


def support_tolerance(noise: float, step: float, tokens: int) -> float:
    """The first of TOLERANCES that noise is below: its mean over so many tokens, and the step of the dtype, logits."""
    wanted = SUPPORT_FACTOR * noise + LARGEST_FACTOR * step / tokens
    return next((tolerance for tolerance in TOLERANCES if tolerance >= wanted), TOLERANCES[-1])


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What a model says about the log-probabilities of a dataset."""

    model: str
    """The Hugging Face id, or the last part of a local path."""
    same_checkpoint: bool
    """Whether its fingerprint is that of the model that sampled. A local copy of a Hugging Face model has another."""
    dtype: str
    """As sampled."""
    device: str
    samples: int
    replayable: int
    """Samples of the dataset that could be compared."""
    unreplayable: int
    """Samples that were left out: their relative logits were changed inside the support."""
    tokens: int
    step: float
    """Between neighbouring numbers of `dtype` at the largest logit of a sampled token."""
    lowest_temperature: float
    with_masks: Drift
    without_masks: Drift
    """The full softmax at the same temperature."""
    kl: float
    """KL(pi_old || pi_theta) with masks, mean over tokens, nats."""
    kl_estimator: Literal["exact", "k3", "mixed"]
    """mixed: exact, and k3 for tokens whose support is the full vocabulary."""
    noise_floor: Drift | None
    """Of this model in `dtype` against itself in float32, with masks; None for float32."""

    temperature: Temperature | None
    """None when no token had a choice."""
    supports: SupportGaps | None
    """None when none was judged."""
    not_judged: str | None
    """Why supports could not be judged."""
    runs: tuple[str, ...] = ()
    """Of a merged dataset, those that this model sampled: all figures are of them."""
    of_other_runs: int = 0
    """Samples of the others."""

    def problem(self) -> str | None:
        """Why this dataset does not replay; None when it does, or when another checkpoint cannot tell.

        Temperatures below 1 divide rounding errors too, so bounds in nats grow with their inverse.
        """
        return next(self._problems(), None) if self.same_checkpoint else None

    def _problems(self) -> Iterator[str]:
        yield from self._drift_problems()
        for judged in (self.supports, self.temperature):
            if judged is not None and (problem := judged.problem()) is not None:
                yield problem
        if self.unreplayable > self.replayable:
            yield (
                f"most samples were not compared: {self.unreplayable:,} of {self.replayable + self.unreplayable:,} are "
                "marked as not replayable"
            )

    def verdict(self) -> str:
        """What the figures mean, in a line."""
        if not self.same_checkpoint:
            return (
                "its fingerprint is another, so the figures are how far apart two policies are, and prove nothing; "
                "of a Hugging Face model give the id, a local copy has a fingerprint of its own"
            )
        if (problem := self.problem()) is not None:
            return f"wrong: {problem}"
        figures = ", ".join(f"{name} is {value:.1e} of at most {bound:.1e}" for name, value, bound in self._bounds())
        return f"it replays: {figures}, which rounding explains"

    def _drift_problems(self) -> Iterator[str]:
        for name, value, bound in self._bounds():
            if not value <= bound:  # or no number
                yield f"{name} is {value:.2e} with masks, where rounding explains {bound:.1e}"

    def _bounds(self) -> Iterator[tuple[str, float, float]]:
        """What is looked at, its value, and what rounding and chance may make of it."""
        drift, floor, scale = self.with_masks, self.noise_floor, 1 / min(1.0, self.lowest_temperature)
        few, largest = 0.0, DELTA_BOUND * scale
        if floor is not None:
            noise = LARGEST_FACTOR * max(floor.max_abs, self.step / self.lowest_temperature)
            few, largest = noise / self.tokens, noise + NOISE_SLACK * scale
        ratio = ERRORS * drift.standard_error + RATIO_SLACK * scale + few
        yield "|mean ratio - 1|", abs(drift.mean_ratio - 1), ratio
        if floor is not None:
            mean = NOISE_FACTOR * floor.mean_abs + NOISE_SLACK * scale + few
            yield "the mean |delta|", drift.mean_abs, mean
        yield "the largest |delta|", drift.max_abs, largest

    def to_json(self) -> dict[str, Any]:
        """Figures by name, flat but for the noise floor, the temperature and the supports."""
        return {
            "model": self.model,
            "same_checkpoint": self.same_checkpoint,
            "dtype": self.dtype,
            "device": self.device,
            "samples": self.samples,
            "replayable": self.replayable,
            "unreplayable": self.unreplayable,
            "tokens": self.tokens,
            "lowest_temperature": self.lowest_temperature,
            **self.with_masks.to_json(),
            "kl": _finite(self.kl),
            "kl_estimator": self.kl_estimator,
            **self.without_masks.to_json("_without_masks"),
            "noise_floor": None if self.noise_floor is None else self.noise_floor.to_json(),
            "temperature": None if self.temperature is None else self.temperature.to_json(),
            "supports": None if self.supports is None else self.supports.to_json(),
            "not_judged": self.not_judged,
            "runs": list(self.runs),
            "of_other_runs": self.of_other_runs,
            "problem": self.problem(),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def describe(recomputation: Recomputation) -> list[str]:
    """A few lines for a terminal. The name of the model is as given."""
    run, floor = recomputation, recomputation.noise_floor
    whose = "the checkpoint that sampled" if run.same_checkpoint else "not the checkpoint that sampled"
    lines = [f"{run.model}, {whose}, {run.dtype} on {run.device}: {run.samples:,} samples, {run.tokens:,} tokens"]
    if run.runs:
        lines.append(
            f"of the runs that it sampled: {', '.join(run.runs)}; not compared: {run.of_other_runs:,} samples of others"
        )
    if run.unreplayable:
        lines.append(
            f"NOT COMPARED: {run.unreplayable:,} of {run.replayable + run.unreplayable:,} samples are marked as not "
            "replayable; nothing below is about them"
        )
    lines += _table(run)
    if floor is not None:
        lines.append(
            f"noise floor of {run.dtype}: |delta| of this model against itself in float32 is {floor.mean_abs:.2e} on "
            f"average, {floor.max_abs:.2e} at most, {floor.share_outside:.1%} of ratios outside; no replay is closer"
        )
    return [*lines, _temperature_line(run.temperature), _supports_line(run), run.verdict()]


def _table(run: Recomputation) -> list[str]:
    """The drifts side by side, in 80 columns."""
    one, other = run.with_masks, run.without_masks
    return [
        f"{'':30}{'with masks':>14}{'without masks':>16}",
        f"{'mean ratio pi_theta / pi_old':30}{one.mean_ratio:>14.6f}{other.mean_ratio:>16.6f}",
        f"{'  its standard error':30}{one.standard_error:>14.1e}{other.standard_error:>16.1e}",
        f"{'mean |delta log pi|':30}{one.mean_abs:>14.2e}{other.mean_abs:>16.2e}",
        f"{'largest |delta log pi|':30}{one.max_abs:>14.2e}{other.max_abs:>16.2e}",
        f"{'ratios outside 1 ± 0.1':30}{one.share_outside:>14.1%}{other.share_outside:>16.1%}",
        f"{'KL(pi_old || pi_theta)':30}{run.kl:>14.2e}   nats a token, {_ESTIMATORS[run.kl_estimator]}",
    ]


def _temperature_line(found: Temperature | None) -> str:
    if found is None:
        return "temperature: no token had a choice that would show it"
    return (
        f"temperature, sampled / stored: {found.by_tokens:.3f} ± {found.tokens_error:.3f} by the tokens "
        f"(z {found.z_score:+.1f}), {found.by_logprobs:.4f} ± {found.logprobs_error:.4f} by the log-probabilities"
    )


def _supports_line(run: Recomputation) -> str:
    found = run.supports
    if found is None:
        return f"supports: not judged, {run.not_judged or 'nothing was truncated'}"
    return (
        f"supports against the model's logits: {found.tokens:,} judged, {found.violating:,} off by more than "
        f"{found.tolerance:.2g} logits, the worst by {max(0.0, found.worst):.2g}"
    )


_ESTIMATORS: Final = {
    "exact": "exact over the supports",
    "k3": "estimated at the sampled tokens (k3)",
    "mixed": "exact over the supports, k3 where nothing was truncated",
}
