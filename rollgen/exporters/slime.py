"""slime: debug rollout files with top-p masks, for `--load-debug-rollout-data`.

Follows THUDM/slime of July 2026 (commit 681b3adc and after): `slime/utils/types.py` (`Sample`), `slime/ray/rollout.py`
(`_convert_samples_to_train_data`), `slime/backends/megatron_utils/loss.py`. Older ones have no field for masks and
would keep them aside, unread.

Response token t was drawn from `rollout_top_p_token_ids[offsets[t]:offsets[t + 1]]`. slime takes an empty range for
the sampled token alone, of log-probability 0, and not for the full vocabulary: so samples that were truncated and
others that were not do not go into one export. It reads masks only if `--rollout-top-p` is not 1, whatever the masks
come from, which the printed flags see to. Rewards become advantages there, by the place of a sample in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from rollgen.exporters.debug_rollouts import DebugRollouts, Row
from rollgen.exporters.grouped import Steps

NEVER_CUTS = 0.9999
"""A top_p that slime does not take for off; nothing is sampled with it."""


class Slime(DebugRollouts):
    """See DebugRollouts."""

    follows: ClassVar[str] = "main, July 2026 (681b3adc)"
    name: ClassVar[str] = "slime"

    @property
    def places(self) -> Mapping[str, str]:
        masks = "rollout_top_p_token_ids, rollout_top_p_token_offsets"
        return {**super().places, "sampling_mask": masks}

    def own_fields(self, row: Row) -> Mapping[str, Any]:
        fields: dict[str, Any] = {"weight_versions": list(row.versions.versions) if row.versions else []}
        if row.mask_ids is not None:
            fields["rollout_top_p_token_ids"] = row.mask_ids
            fields["rollout_top_p_token_offsets"] = row.mask_offsets.to(torch.int32)
        return fields

    def advice(self, steps: Steps, *, support_logprobs: bool) -> list[str]:
        drawn = steps.drawn
        top_p = min(drawn.top_p, NEVER_CUTS) if drawn.truncated else 1.0  # not 0.99999999, which is printed as 1
        return [
            "slime (PATH: this directory): --load-debug-rollout-data 'PATH/{rollout_id}.pt' --use-rollout-logprobs "
            f"--rollout-temperature {drawn.temperature} --rollout-top-p {top_p:.6g} "
            f"--rollout-batch-size {steps.prompts} --n-samples-per-prompt {steps.samples} "
            f"--global-batch-size {steps.prompts * steps.samples} --num-rollout {steps.number}"
        ]
