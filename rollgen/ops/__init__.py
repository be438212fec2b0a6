"""Tensor operations over supports: `Support` (CSR) and log-probabilities normalised over it."""

from __future__ import annotations

from rollgen.ops.arguments import SupportLogprobs
from rollgen.ops.hidden import support_logprobs_from_hidden
from rollgen.ops.logprobs import support_logprobs
from rollgen.ops.support import Support

__all__ = ["Support", "SupportLogprobs", "support_logprobs", "support_logprobs_from_hidden"]
