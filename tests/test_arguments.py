"""What no public function takes: a UsageError that names the argument, before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollgen
from rollgen.errors import UsageError

PATH = "a directory is given as its path or as its URL, not as "


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, out: rollgen.export(d, ["jsonl"], out), "to must be a text, not of type list"),
        (lambda d, out: rollgen.export(d, "jsonl", out, reward=["c"]), "reward must be a text, not of type list"),
        (lambda d, out: rollgen.export(d, "jsonl", out, advantages=["mean"]), "advantages must be a text"),
        (lambda d, out: rollgen.export(None, "jsonl", out), f"{PATH}NoneType"),
        (lambda d, out: rollgen.export(d, "jsonl", None), f"{PATH}NoneType"),
        (lambda d, out: rollgen.merge(None, out), "datasets: give a list of paths, two or more"),
        (lambda d, out: rollgen.merge(str(d), out), "datasets: give a list of paths, two or more"),
        (lambda d, out: rollgen.merge([d, None], out), "datasets: give a list of paths, two or more"),
        (lambda d, out: rollgen.merge([d, d], None), f"{PATH}NoneType"),
        (lambda d, out: rollgen.merge([d, d], out, shard_tokens="8"), "shard_tokens must be a whole number, 1 or more"),
        (lambda d, out: rollgen.merge([d, d], out, drop=None), "drop: give a list of names of columns"),
        (lambda d, out: rollgen.merge([d, d], out, drop="support_logprobs"), "drop: give a list of names of columns"),
        (lambda d, out: rollgen.score(None, "exact_match"), f"{PATH}NoneType"),
        (lambda d, out: rollgen.score(d, "exact_match", batch_size=True), "batch_size must be a whole number"),
        (lambda d, out: rollgen.score(d, "exact_match", timeout=True), "timeout must be a finite number of seconds"),
        (lambda d, out: rollgen.score(d, "exact_match", progress=3), "progress must be a function"),
        (lambda d, out: rollgen.generate({"prompt": "x"}, None), f"{PATH}NoneType"),
        (lambda d, out: rollgen.generate({"prompt": "x"}, out, 3), "config must be a RunConfig, not of type int"),
        (lambda d, out: rollgen.RolloutWriter(None), f"{PATH}NoneType"),
        (lambda d, out: rollgen.RolloutWriter(out, 3), "config must be a RunConfig, not of type int"),
        (lambda d, out: rollgen.RolloutWriter(out, writer=3), "writer must be a text, not of type int"),
        (lambda d, out: rollgen.RolloutWriter(out, engine=None), "engine must be a text, not of type NoneType"),
        (lambda d, out: rollgen.RolloutWriter(out, engine=""), "engine: '' is not installed here"),
        (lambda d, out: rollgen.RolloutStream(b"x"), f"{PATH}bytes"),
        (lambda d, out: rollgen.RolloutDataset(3), f"{PATH}int"),
        (lambda d, out: rollgen.collate(None), "rollouts: give a list of Rollouts"),
        (lambda d, out: rollgen.collate([None]), "rollouts: give a list of Rollouts"),
        (lambda d, out: rollgen.collate(rollgen.RolloutDataset(d)[0]), "rollouts: give a list of Rollouts"),
        (lambda d, out: rollgen.collate(rollgen.RolloutDataset(d), layout="jagged"), "layout must be one of 'padded'"),
        (lambda d, out: rollgen.collate(rollgen.RolloutDataset(d), pad_id=-1), "pad_id must be a whole number"),
    ],
)
def test_what_no_function_takes(
    tmp_path: Path, make_dataset: Callable[..., Path], call: Callable[[Path, Path], Any], message: str
) -> None:
    """Nothing is there afterwards."""
    directory, out = make_dataset(tmp_path / "run"), tmp_path / "out"
    with pytest.raises(UsageError, match=message):
        call(directory, out)
    assert not out.exists()
    assert not (directory / "rewards").exists()


def test_rollouts_may_be_what_can_be_listed(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """A dataset, or what is made while it is asked for."""
    dataset = rollgen.RolloutDataset(make_dataset(tmp_path / "run"))
    assert len(rollgen.collate(dataset)) == len(rollgen.collate(dataset[index] for index in range(12))) == 12
