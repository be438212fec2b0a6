"""`RolloutDataset`: a dataset directory as a map-style PyTorch Dataset, `ds[i] -> Rollout`.

Opening reads the footers and the narrow columns of every shard, no more. A row group is the unit of reading: it is
decoded once, checksums verified, into numpy arrays, and kept in a small cache; a sample is a slice of these, copied. So
reading in order or in neighbourhoods is fast (a few million tokens a second), while a fully shuffled pass over a
dataset larger than the cache decodes a row group for most samples: `RolloutStream` shuffles without that.

Works in DataLoader workers, forked or spawned: no file stays open between reads, and the cache is not pickled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from operator import index as as_index
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rollgen.format.ragged import Ragged
from rollgen.format.row_groups import RowGroupCache
from rollgen.loader.batch import Rollout
from rollgen.loader.index import Index, check_some, open_index
from rollgen.loader.places import identity_of, place_of
from rollgen.loader.rewards import names_of
from rollgen.loader.samples import SCALARS, Experts, Samples, offsets_of
from rollgen.ops import Support
from rollgen.remote.cache import MAX_BYTES, open_cache

if TYPE_CHECKING:
    import pyarrow.compute as pc


class RolloutDataset(Dataset[Rollout]):
    """All committed samples of a dataset, by shard name and row. `path` is a directory, or a URL of object storage.

    Of a sample that was made again, with a larger max_tokens, only the latest row is one of them, unless
    `all_generations`: then every row that is stored is.

    With `routed_experts` each Rollout has those of its tokens, which are a lot to read: some hundred numbers a token.

    Row groups that are fetched from object storage are kept on the disk of this machine, in `rollgen/parts` below the
    directory `disk_cache` (default `~/.cache`), at most `disk_cache_bytes` (default 32 GiB).

    With a `filter`, a pyarrow expression over the columns (`pc.field("finish_reason") == "stop"`), those that it keeps:
    UsageError when these are none. Without, a dataset that holds no sample yet has length 0.

    With `rewards`, one name or several, each Rollout has these: `"correct"`, or `"correct.format"` for a further value
    that the scorer gave. All samples must have them; rows that were superseded before they were scored get none.

    Raises DatasetError when there is no complete, undamaged dataset, and UsageError when it holds samples that cannot
    be replayed (penalties, biases: relative logits were changed inside the support), unless `allow_unreplayable`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        filter: pc.Expression | None = None,
        allow_unreplayable: bool = False,
        all_generations: bool = False,
        routed_experts: bool = False,
        rewards: str | Sequence[str] | None = (),
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_bytes: int = MAX_BYTES,
    ) -> None:
        place = place_of(path)
        self._index = open_index(
            [place],
            cache=partial(open_cache, disk_cache, disk_cache_bytes),
            filter=filter,
            allow_unreplayable=allow_unreplayable,
            all_generations=all_generations,
            rewards=names_of(rewards),
        )
        if filter is not None:
            check_some(self._index, [place], filter)
        self.manifest = self._index.datasets[0].manifest
        self._dataset = identity_of(place)
        self._scalars = self._index.scalars(SCALARS)
        self._routed_experts = routed_experts
        if routed_experts:
            self._index.experts()  # or this is refused here, not at the first sample
        self._row_groups = RowGroupCache(self._load)

    @property
    def index(self) -> Index:
        """Prompt, number and length of each sample, without reading any."""
        return self._index

    @property
    def vocab_size(self) -> int:
        """Of the model that sampled; support ids lie below it."""
        return self._index.vocab_size

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Rollout:
        position = as_index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        group, row = self._index.locate(np.array([position % len(self)]))
        return _rollout(self._row_groups[int(group[0])], int(row[0]), self._dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[Rollout]:
        """What a DataLoader calls for a batch: each row group is decoded once, however the indices are shuffled."""
        rollouts = {index: self[index] for index in sorted(indices)}
        return [rollouts[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_row_groups"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._row_groups = RowGroupCache(self._load)

    def _load(self, group: int) -> Samples:
        opened, drop_copy = methodcaller("open"), methodcaller("drop_copy")
        return self._index.load(group, self._scalars, self._routed_experts, opened, drop_copy)


def _rollout(samples: Samples, row: int, dataset: str) -> Rollout:
    """One row as tensors of its own memory."""
    tokens = slice(*samples.token_ids.offsets[row : row + 2].tolist())
    ids = slice(*samples.mask_offsets[row : row + 2].tolist())
    stored = samples.support_logprobs
    return Rollout(
        prompt_ids=_tensor(samples.prompt_ids, row, np.int64),
        token_ids=_tensor(samples.token_ids, row, np.int64),
        logprobs=torch.from_numpy(samples.logprobs[tokens].copy()),
        support=Support(
            torch.from_numpy(samples.mask_ids[ids].copy()),
            torch.from_numpy(offsets_of(samples.mask_lengths[tokens])),
            samples.vocab_size,
        ),
        stored_support_logprobs=None if stored is None else torch.from_numpy(stored[ids].copy()),
        routed_experts=None if samples.experts is None else _experts(samples.experts, row),
        dataset=dataset,
        rewards={name: float(values[row]) for name, values in samples.rewards.items()},
        **{name: _plain(value[row]) for name, value in samples.scalars.items()},
    )


def _experts(experts: Experts, row: int) -> Tensor:
    return _tensor(experts.numbers, row, np.int16).view(-1, experts.layers, experts.top_k)


def _plain(value: Any) -> Any:
    """A numpy number as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _tensor(column: Ragged, row: int, dtype: npt.DTypeLike) -> Tensor:
    """One row as a tensor of its own memory: Arrow's buffers are read-only, and shared by the whole row group."""
    return torch.from_numpy(column.values[column.offsets[row] : column.offsets[row + 1]].astype(dtype))
