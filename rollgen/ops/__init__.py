"""Tensor operations over supports: `Support` (CSR) and log-probabilities normalised over it."""

from __future__ import annotations

from rollgen.ops.logprobs import support_logprobs
from rollgen.ops.support import Support

__all__ = ["Support", "support_logprobs"]
