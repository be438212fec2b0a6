"""Three tokens with their supports, in every shape that an engine answers in, and how they are read."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from rollgen.engines.outputs import SampledOutput, read_outputs

VOCAB_SIZE = 16
IDS = [7, 4, 9]
QUARTER, REST = math.log(0.25), math.log(0.75)
LOGPROBS = [QUARTER, 0.0, REST]
MASKS = [[9, 7], [4], [7, 9]]
"""The supports of three tokens, the first not sorted."""
SUPPORT_LOGPROBS = [[REST, QUARTER], [0.0], [QUARTER, REST]]
FLAT_MASKS, FLAT_SUPPORT_LOGPROBS, OFFSETS, LENGTHS = (
    [9, 7, 4, 7, 9],
    [REST, QUARTER, 0.0, QUARTER, REST],
    [0, 2, 3, 5],
    [2, 1, 2],
)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def plain(**changes: Any) -> dict[str, Any]:
    """A mapping of plain lists."""
    return {"token_ids": IDS, "logprobs": LOGPROBS, "sampling_mask": MASKS, "finish_reason": "length"} | changes


def sglang(**meta: Any) -> dict[str, Any]:
    """A response of SGLang's /generate; `output_token_logprobs` are those before truncation."""
    own = {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_sampling_mask": MASKS,
        "output_token_sampling_logprobs": LOGPROBS,
        "output_token_logprobs": [(-3.0, 7, None), (-2.0, 4, None), (-1.0, 9, None)],
    }
    return {"text": "", "output_ids": IDS, "meta_info": own | meta}


def json_choice(**changes: Any) -> dict[str, Any]:
    """A choice of vLLM's /inference/v1/generate."""
    content = [{"token_id": i, "logprob": p, "top_logprobs": []} for i, p in zip(IDS, LOGPROBS, strict=True)]
    own = {"index": 0, "token_ids": IDS, "logprobs": {"content": content}, "sampling_mask": MASKS}
    return own | {"finish_reason": "length", "stop_reason": None} | changes


class Csr(NamedTuple):
    """The field names of vLLM's SamplingMaskLists."""

    token_ids: np.ndarray
    offsets: np.ndarray | None = None


def chunk(first: int, last: int, *, of_sampled: bool = False) -> SimpleNamespace:
    """SGLang's SamplingMaskChunk of some tokens."""
    ids = slice(OFFSETS[first], OFFSETS[last])
    logprobs = LOGPROBS[first:last] if of_sampled else FLAT_SUPPORT_LOGPROBS[ids]
    return SimpleNamespace(lengths=i32(*LENGTHS[first:last]), token_ids=i32(*FLAT_MASKS[ids]), logprobs=f32(*logprobs))


def trained(*values: float) -> torch.Tensor:
    """Logprobs that remember where they come from."""
    return torch.tensor(values, requires_grad=True) * 1.0


NATIVE_SHAPES: dict[str, Any] = {
    "lists": plain(),
    "numpy": plain(token_ids=np.array(IDS), logprobs=f32(*LOGPROBS), sampling_mask=[i32(*mask) for mask in MASKS]),
    "CSR as a pair of lists": plain(sampling_mask=(FLAT_MASKS, OFFSETS)),
    "CSR as a pair of arrays": plain(sampling_mask=(i32(*FLAT_MASKS), np.array(OFFSETS))),
    "CSR beside each other": plain(sampling_mask=None, mask_ids=i32(*FLAT_MASKS), mask_offsets=i32(*OFFSETS)),
    "CSR as a named tuple": plain(sampling_mask=Csr(i32(*FLAT_MASKS), np.array(OFFSETS))),
    "CSR as a mapping": plain(sampling_mask={"ids": FLAT_MASKS, "offsets": OFFSETS}),
    "nested in an object": plain(sampling_mask=SimpleNamespace(token_ids=MASKS)),
    "lengths": plain(sampling_mask=chunk(0, 3, of_sampled=True)),
    "an object with attributes": SimpleNamespace(**plain()),
    "a list of one": [plain()],
    "vLLM's response": {"choices": [json_choice()]},
    "vLLM's choice": json_choice(),
    "vLLM's choice, as objects": SimpleNamespace(
        token_ids=IDS,
        sampling_mask=SimpleNamespace(token_ids=MASKS),
        finish_reason="length",
        logprobs=SimpleNamespace(
            content=[SimpleNamespace(token_id=i, logprob=p) for i, p in zip(IDS, LOGPROBS, strict=True)]
        ),
    ),
    "tuples": plain(token_ids=tuple(IDS), logprobs=tuple(LOGPROBS)),
    "torch": plain(
        token_ids=torch.tensor(IDS),
        logprobs=trained(*LOGPROBS),
        sampling_mask=[torch.tensor(mask, dtype=torch.int32) for mask in MASKS],
    ),
    "CSR as a pair of tensors": plain(sampling_mask=(torch.tensor(FLAT_MASKS), torch.tensor(OFFSETS))),
    "SGLang's response": sglang(),
    "SGLang without output_ids": {"meta_info": sglang()["meta_info"]},
}
SUPPORT_SHAPES: dict[str, Any] = {
    "plain": plain(support_logprobs=SUPPORT_LOGPROBS),
    "plain, flat": plain(support_logprobs=f32(*FLAT_SUPPORT_LOGPROBS)),
    "CSR of three": plain(sampling_mask=(FLAT_MASKS, OFFSETS, FLAT_SUPPORT_LOGPROBS)),
    "CSR beside each other": plain(mask_ids=FLAT_MASKS, mask_offsets=OFFSETS, support_logprobs=FLAT_SUPPORT_LOGPROBS),
    "a second field, nested": plain(sampling_mask=SimpleNamespace(token_ids=MASKS, logprobs=SUPPORT_LOGPROBS)),
    "a chunk": plain(sampling_mask=chunk(0, 3)),
    "chunks": plain(sampling_mask=[chunk(0, 1), chunk(1, 3)]),
    "torch, flat": plain(support_logprobs=trained(*FLAT_SUPPORT_LOGPROBS)),
    "torch, nested": plain(support_logprobs=[trained(*row) for row in SUPPORT_LOGPROBS]),
    "chunks alone": plain(sampling_mask=[chunk(0, 2), chunk(2, 3)], logprobs=None),
    "SGLang, mode support": sglang(output_token_sampling_logprobs=SUPPORT_LOGPROBS),
    "SGLang, chunks": sglang(output_token_sampling_mask=[chunk(0, 3)], output_token_sampling_logprobs=None),
}
"""Those whose masks bring the logprobs of their ids."""
EXCLUDED = -math.inf
TABLE = [{7: QUARTER, 9: REST, 2: EXCLUDED}, {4: 0.0, 1: EXCLUDED, 2: EXCLUDED}, {9: REST, 7: QUARTER, 0: EXCLUDED}]
TABLE_SHAPES: dict[str, Any] = {
    "mappings": plain(sampling_mask=None, logprobs=TABLE),
    "mappings of objects": plain(
        logprobs=[{i: SimpleNamespace(logprob=p, rank=1) for i, p in row.items()} for row in TABLE]
    ),
    "flat, the sampled id in front": plain(
        logprobs=SimpleNamespace(
            token_ids=[i for token, row in zip(IDS, TABLE, strict=True) for i in (token, *row)],
            logprobs=[p for token, row in zip(IDS, TABLE, strict=True) for p in (row[token], *row.values())],
            start_indices=[0, 4, 8],
            end_indices=[4, 8, 12],
        )
    ),
}
"""Processed logprobs of the most likely ids."""
UNTRUNCATED_ROWS = [(p, i, None) for p, i in zip(LOGPROBS, IDS, strict=True)]
"""SGLang's `output_token_logprobs`."""


def read(output: object, **changes: Any) -> SampledOutput:
    """The only sequence of an output that truncates, natively."""
    (sampled,) = read_outputs(output, **{"truncates": True, "vocab_size": VOCAB_SIZE, "capture": "native"} | changes)
    return sampled
