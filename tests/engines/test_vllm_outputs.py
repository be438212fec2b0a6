"""vLLM's own output classes, as a loop of one's own receives them, without an engine."""

from __future__ import annotations

import math
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

from rollgen.config import RunConfig
from rollgen.engines.base import Extras
from rollgen.engines.extras import read_experts, read_versions
from rollgen.engines.outputs import read_outputs
from rollgen.format.manifest import RoutedExperts

pytestmark = pytest.mark.vllm

IDS = [7, 4]
QUARTER, REST = math.log(0.25), math.log(0.75)
ENTRIES = [
    [(7, QUARTER), (9, REST), (7, QUARTER), (2, -math.inf)],
    [(4, 0.0), (4, 0.0), (1, -math.inf), (2, -math.inf)],
]
"""Of each token as vLLM returns them: the sampled id, then the 3 most likely."""


def request_output(*, flat: bool, masks: Any, sequences: int = 1) -> Any:
    """A RequestOutput whose logprobs were collected by vLLM's own code."""
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    logprobs = create_sample_logprobs(flat)
    for row in ENTRIES:
        ids, values = map(list, zip(*row, strict=True))
        append_logprobs_for_next_position(logprobs, ids, values, [None] * len(row), rank=1, num_logprobs=3)
    outputs = [
        CompletionOutput(
            index=index,
            text="",
            token_ids=IDS,
            cumulative_logprob=None,
            logprobs=logprobs,
            sampling_mask=masks,
            finish_reason="stop",
            stop_reason=4 + index,
        )
        for index in reversed(range(sequences))
    ]
    return RequestOutput("0", None, [1], None, outputs, finished=True)


@pytest.mark.parametrize("capture", ["logprobs", "native"])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "a dict a token"])
def test_request_outputs(flat: bool, capture: Any) -> None:
    """Both shapes of logprobs, with masks beside them; sequences in the order of their index."""
    from vllm.outputs import SamplingMask

    output = request_output(flat=flat, masks=SamplingMask([[7, 9], [4]]), sequences=2)
    first, second = read_outputs(output, truncates=True, vocab_size=16, capture=capture)
    assert first.support.mask_ids.tolist() == second.support.mask_ids.tolist() == [7, 9, 4]
    assert first.support.mask_offsets.tolist() == [0, 2, 3]
    assert first.support.logprobs.tolist() == pytest.approx([QUARTER, 0])
    assert first.support.support_logprobs is not None
    assert first.support.support_logprobs.tolist() == pytest.approx([QUARTER, REST, 0])
    assert (first.stop_reason, second.stop_reason) == ("4", "5")
    assert (first.index, second.index) == (0, 1)
    assert first.prompt_token_ids is not None
    assert first.prompt_token_ids.tolist() == [1]


def test_masks_as_vllm_keeps_them_inside() -> None:
    """CSR arrays, and a single token whose offsets are left out."""
    import numpy as np
    from vllm.v1.outputs import SamplingMaskLists

    masks = SamplingMaskLists(np.array([7, 9, 4], np.int32), np.array([0, 2, 3]))
    plain = {"token_ids": IDS, "logprobs": [QUARTER, 0.0], "finish_reason": "length"}
    (both,) = read_outputs(plain | {"sampling_mask": masks}, truncates=True, vocab_size=16, capture="native")
    assert both.support.mask_offsets.tolist() == [0, 2, 3]
    first = {"token_ids": IDS[:1], "logprobs": [QUARTER], "finish_reason": "length"}
    one = first | {"sampling_mask": masks.slice_request(0, 1)}
    (single,) = read_outputs(one, truncates=True, vocab_size=16, capture="native")
    assert single.support.mask_ids.tolist() == [7, 9]


def test_weights_and_experts() -> None:
    """vLLM's spans and arrays, and the same as its server writes them into JSON."""
    import numpy as np
    from vllm.outputs import WeightVersionSpan
    from vllm.utils.serial_utils import numpy2base64

    layout = RoutedExperts(layers=2, top_k=2, experts=300)
    experts = np.arange(16, dtype=np.uint16).reshape(4, 2, 2) + 250
    spans = [WeightVersionSpan("default", 0, 3), WeightVersionSpan("step 2", 3, 4)]
    versions = read_versions(spans, 4)
    assert versions == (("default", "step 2"), (0, 3))
    assert read_versions([vars(span) for span in spans], 4) == versions
    for value in (experts, numpy2base64(experts)):
        np.testing.assert_array_equal(read_experts(value, 4, layout), experts)


@pytest.mark.parametrize("has_field", [True, False])
def test_weight_versions_where_vllm_has_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, has_field: bool
) -> None:
    """An output of vLLM before 0.32 has no such field: a dataset that stores them is then not continued."""
    from rollgen.engines import vllm

    if not has_field:
        monkeypatch.setattr(vllm, "CompletionOutput", make_dataclass("CompletionOutput", ["index", "text"]))
    config = RunConfig(model=str(tiny_model), max_model_len=64, engine_arg={"kv_cache_memory_bytes": 1 << 26})
    engine = vllm.VllmEngine(
        config,
        str(tiny_model),
        vocab_size=512,
        capture_wanted="logprobs",
        untruncated="none",
        replayable=True,
        decode=str,
        weight_versions=True,
    )
    assert engine.extras == Extras(weight_versions=has_field)
