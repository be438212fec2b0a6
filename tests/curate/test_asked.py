"""What a merge refuses because only the plan shows that it is wrong, and what keeps two samples apart.

The corpus has a dataset for each way in which a plan, its retry lists or its rows may be wrong; `verify` reports them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgen.config import digest
from rollgen.curate.merge import merge
from rollgen.errors import DatasetError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import file_sha256, list_shards, read_journal
from rollgen.format.manifest import Manifest, create_manifest, read_manifest, replace_manifest
from rollgen.format.writer import ShardWriter
from rollgen.prompts.plan import PlanWriter
from rollgen.rollouts import Completion, Prompt, sample_seed
from rollgen.verify.dataset import verify_dataset

MakeRun = Callable[..., Path]
CONFORMANCE = Path(__file__).parents[2] / "schema" / "conformance"
HOSTILE = CONFORMANCE / "hostile"
HIDDEN = {"plan", "retries", "unplanned", "mismatch", "seed", "order", "counts"}
"""Kinds of findings that no row of a merged dataset would show any more."""


def hidden() -> list[str]:
    table = json.loads((HOSTILE / "hostile.json").read_text(encoding="utf-8"))
    return [
        name
        for name, said in table.items()
        if (HOSTILE / name).is_dir() and (said.get("finding") or {}).get("kind") in HIDDEN
    ]


@pytest.mark.parametrize("name", hidden())
def test_what_a_merge_would_hide(tmp_path: Path, name: str) -> None:
    """It is refused, also where nothing would be written."""
    sound = shutil.copytree(CONFORMANCE / "golden" / "extras", tmp_path / "sound")
    wrong = shutil.copytree(HOSTILE / name, tmp_path / "wrong")
    with pytest.raises(DatasetError):
        merge([sound, wrong], tmp_path / "out", drop=["weight_versions", "routed_experts"], dry_run=True)


def test_two_prompts_of_one_id(
    tmp_path: Path,
    make_run: MakeRun,
    make_prompt: Callable[..., Prompt],
    make_completion: Callable[..., Completion],
    make_manifest: Callable[..., Manifest],
) -> None:
    """Of a plan that no planner makes: numbers tell them apart, run and id do not."""
    twins = tmp_path / "twins"
    twins.mkdir()
    with PlanWriter(twins / "plan.parquet") as plan:
        plan.write([make_prompt(0), make_prompt(1, prompt_id="p0")])
    identity = {"seed": 1}
    said = {"identity": identity, "config_digest": digest(identity)}
    manifest = make_manifest(plan_sha256=file_sha256(twins / "plan.parquet"), **said)
    create_manifest(twins, manifest)
    with WriterSlot(twins, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for number in range(2):
            writer.add(make_completion(number, 0, prompt_id="p0", seed=sample_seed(0, "p0", 0)))
    with pytest.raises(DatasetError, match=r"part-w0-000000\.parquet: row 1: the prompt 'p0' has a sample 0 already"):
        merge([make_run(tmp_path / "other", 1), twins], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_samples_that_a_merged_dataset_lost(merged: Path, tmp_path: Path, make_run: MakeRun) -> None:
    """Its shard is retired: merged again, it still says how many there were; more than that is refused."""
    shutil.rmtree(merged)
    merge([tmp_path / "base", tmp_path / "step-1"], merged, shard_tokens=100)
    first = list_shards(merged)[0]
    line = read_journal(merged).committed[first.name]
    with WriterSlot(merged, "merge") as slot:
        slot.retire(line)
    first.unlink()
    third = make_run(tmp_path / "third", 2)
    done = merge([merged, third], tmp_path / "again")
    assert sum(run.lost for run in done.runs) == line.rows
    assert [run.samples for run in read_manifest(tmp_path / "again").runs] == [12, 12, 12]
    [note] = verify_dataset(tmp_path / "again").notes
    assert note == f"samples that were merged and are not here any more: {line.rows}; merge again to have them back"
    manifest = read_manifest(merged)
    fewer = [run.model_copy(update={"samples": 1}) for run in manifest.runs]
    replace_manifest(merged, manifest.model_copy(update={"runs": fewer}))
    with pytest.raises(DatasetError, match=r"merged: holds \d+ samples of the run '.*', of which 1 were merged"):
        merge([merged, third], tmp_path / "more")
