"""What recomputing log-probabilities found: the figures, the verdict over them, and both as text.

    delta = log pi_theta - log pi_old      ratio = exp(delta)      at temperature, of sampled tokens

pi_old is what is stored, pi_theta what a model says now: normalised over the stored supports (with masks), or over the
full vocabulary, as a trainer has it that ignores them (without). With the checkpoint that sampled pi_theta is pi_old,
so with masks each ratio is 1 but for rounding. What rounding may do is measured, not guessed: below float32 the *noise
floor* is |delta| between two passes of the same weights, one in float32. No replay comes closer than that. The mean
ratio is sharper: tokens were drawn from pi_old, and the sum over the support of pi_old * ratio is 1 whatever the noise,
if the support is the same. So it has to be 1 within its standard error, and wrong supports show in bfloat16 too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

OUTSIDE: Final = 0.1
"""Ratios further than this from 1 are counted."""
RATIO_ERRORS: Final = 5
"""Standard errors that the mean ratio may be from 1: chance alone goes further once in 1.7 million datasets."""
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
"""Added to both: a floor over a few tokens may be 0, where most supports are single ids."""


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
    unreplayable: int
    """Samples that were left out: their relative logits were changed inside the support."""
    tokens: int
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

    def problem(self) -> str | None:
        """Why this dataset does not replay; None when it does, or when another checkpoint cannot tell.

        Temperatures below 1 divide rounding errors too, so bounds in nats grow with their inverse.
        """
        if not self.same_checkpoint:
            return None
        drift, floor, scale = self.with_masks, self.noise_floor, 1 / min(1.0, self.lowest_temperature)
        far = _excess(
            "|mean ratio - 1|",
            abs(drift.mean_ratio - 1),
            RATIO_ERRORS * drift.standard_error + RATIO_SLACK * scale,
        )
        if floor is None:
            return far or _excess("the largest |delta|", drift.max_abs, DELTA_BOUND * scale)
        mean_bound = NOISE_FACTOR * floor.mean_abs + NOISE_SLACK * scale
        largest_bound = LARGEST_FACTOR * floor.max_abs + NOISE_SLACK * scale
        return (
            far
            or _excess("the mean |delta|", drift.mean_abs, mean_bound)
            or _excess("the largest |delta|", drift.max_abs, largest_bound)
        )

    def to_json(self) -> dict[str, Any]:
        """Figures by name, flat but for the noise floor."""
        return {
            "model": self.model,
            "same_checkpoint": self.same_checkpoint,
            "dtype": self.dtype,
            "device": self.device,
            "samples": self.samples,
            "unreplayable": self.unreplayable,
            "tokens": self.tokens,
            "lowest_temperature": self.lowest_temperature,
            **self.with_masks.to_json(),
            "kl": _finite(self.kl),
            "kl_estimator": self.kl_estimator,
            **self.without_masks.to_json("_without_masks"),
            "noise_floor": None if self.noise_floor is None else self.noise_floor.to_json(),
            "problem": self.problem(),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _excess(name: str, value: float, bound: float) -> str | None:
    """A text when the value is beyond its bound, or no number."""
    return None if value <= bound else f"{name} is {value:.2e} with masks, where rounding explains {bound:.1e}"


def describe(recomputation: Recomputation) -> list[str]:
    """A few lines for a terminal. The name of the model is as given."""
    run, floor = recomputation, recomputation.noise_floor
    whose = "the checkpoint that sampled" if run.same_checkpoint else "not the checkpoint that sampled"
    lines = [
        f"{run.model}, {whose}, {run.dtype} on {run.device}: {run.samples:,} samples, {run.tokens:,} tokens",
        f"{'':30}{'with masks':>14}{'without masks':>16}",
    ]
    one, other = run.with_masks, run.without_masks
    lines += [
        f"{'mean ratio pi_theta / pi_old':30}{one.mean_ratio:>14.6f}{other.mean_ratio:>16.6f}",
        f"{'  its standard error':30}{one.standard_error:>14.1e}{other.standard_error:>16.1e}",
        f"{'mean |delta log pi|':30}{one.mean_abs:>14.2e}{other.mean_abs:>16.2e}",
        f"{'largest |delta log pi|':30}{one.max_abs:>14.2e}{other.max_abs:>16.2e}",
        f"{'ratios outside 1 ± 0.1':30}{one.share_outside:>14.1%}{other.share_outside:>16.1%}",
        f"{'KL(pi_old || pi_theta)':30}{run.kl:>14.2e}   nats a token, {_ESTIMATORS[run.kl_estimator]}",
    ]
    if floor is not None:
        lines.append(
            f"noise floor of {run.dtype}: |delta| of this model against itself in float32 is {floor.mean_abs:.2e} on "
            f"average, {floor.max_abs:.2e} at most, {floor.share_outside:.1%} of ratios outside; no replay is closer"
        )
    if not run.same_checkpoint:
        lines.append(
            "its fingerprint is another, so the figures are how far apart two policies are, and prove nothing; "
            "of a Hugging Face model give the id, a local copy has a fingerprint of its own"
        )
    if run.unreplayable:
        lines.append(f"{run.unreplayable:,} samples that cannot be replayed were left out")
    return lines


_ESTIMATORS: Final = {
    "exact": "exact over the supports",
    "k3": "estimated at the sampled tokens (k3)",
    "mixed": "exact over the supports, k3 where nothing was truncated",
}
