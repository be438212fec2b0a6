"""Tensor operations: `Support` (CSR), log-probabilities normalised over it, and advantages of groups."""

from __future__ import annotations

from rollgen.ops.advantages import group_advantages
from rollgen.ops.arguments import SupportLogprobs
from rollgen.ops.hidden import support_logprobs_from_hidden
from rollgen.ops.logprobs import support_logprobs
from rollgen.ops.support import Support

__all__ = ["Support", "SupportLogprobs", "group_advantages", "support_logprobs", "support_logprobs_from_hidden"]
