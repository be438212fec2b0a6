"""miles: debug rollout files with sampling masks, for `--load-debug-rollout-data`, after a conversion where miles is.

Follows radixark/miles of November 2026 (commit 2806267d): `miles/utils/types.py` (`Sample`),
`miles/utils/sampling_mask.py` (`RolloutSamplingMask`), `miles/ray/rollout/debug_data.py`,
`miles/ray/rollout/train_data_conversion.py`, `docs/advanced/sampling-support-replay.md`, score centering's README.

miles pickles the masks in its files as objects of its own class, which nothing but miles can make. So masks are written
as the two tensors of that object, and docs/export.md has the lines that make the object of them; without these miles
would leave the masks unread. Every token must have a support: samples that were not truncated are refused beside
others that were. Rewards become advantages there, by group.

Stored `support_logprobs` stand beside the ids, and the same lines make of both the arrays of the loss score_centering:
int32 and float32 [T, `--rollout-top-logprobs-num`], padded with -1 and -inf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rollgen.exporters.agreement import Agreement
from rollgen.exporters.debug_rollouts import DebugRollouts, Row
from rollgen.exporters.grouped import Steps
from rollgen.rollouts import WeightVersions


class Miles(DebugRollouts):
    """See DebugRollouts."""

    follows: ClassVar[str] = "main, November 2026 (2806267d)"
    name: ClassVar[str] = "miles"

    @property
    def places(self) -> Mapping[str, str]:
        return {
            **super().places,
            "sampling_mask": "rollout_sampling_mask",
            "support_logprobs": "rollout_topk_log_probs",
        }

    def own_fields(self, row: Row) -> Mapping[str, Any]:
        length = len(row.mask_offsets) - 1
        spans = [] if row.versions is None else [_spans(row.versions, row.prompt_length, row.prompt_length + length)]
        fields: dict[str, Any] = {"weight_versions": spans}
        if row.mask_ids is not None:
            fields["rollout_sampling_mask_ids"] = row.mask_ids
            fields["rollout_sampling_mask_offsets"] = row.mask_offsets
            if row.mask_logprobs is not None:
                fields["rollout_sampling_mask_log_probs"] = row.mask_logprobs
        return fields

    def advice(self, steps: Steps, *, support_logprobs: bool) -> list[str]:
        drawn, top_k = steps.drawn, _top_k(steps.drawn)
        masks = f"--rollout-top-k {top_k} --rollout-top-p {drawn.top_p:.6g} " if drawn.truncated else ""
        lines = [
            "miles: first make its own mask objects of the two tensors of each sample (docs/export.md)",
            "miles (PATH: this directory): --load-debug-rollout-data 'PATH/{rollout_id}.pt' --use-rollout-logprobs "
            f"--rollout-temperature {drawn.temperature} {masks}"
            f"--rollout-batch-size {steps.prompts} --n-samples-per-prompt {steps.samples} "
            f"--global-batch-size {steps.prompts * steps.samples} --num-rollout {steps.number}",
        ]
        if drawn.truncated and support_logprobs:
            width = max(top_k, drawn.widest)
            lines.append(f"miles: with --loss-type score_centering also --rollout-top-logprobs-num {width}")
        return lines


def _top_k(drawn: Agreement) -> int:
    """miles replays no masks of top-p without a top-k; where there was none, one that cuts nothing off."""
    return drawn.top_k or drawn.widest


def _spans(told: WeightVersions, first: int, stop: int) -> list[dict[str, Any]]:
    """Which weights made the tokens of one call of the engine; places are those in `tokens`."""
    starts = [first + start for start in told.starts]
    return [
        {"version": version, "abs_start": start, "abs_end": end}
        for version, start, end in zip(told.versions, starts, [*starts[1:], stop], strict=True)
    ]
