"""`rollgen generate --dry-run` on a run that there is, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from models.runs import Runs

from rollgen.format.journal import list_shards

ROLLGEN = Path(sys.executable).with_name("rollgen")


def dry_run(runs: Runs, *flags: object) -> subprocess.CompletedProcess[str]:
    """The settings of `Runs`, on the command line."""
    options = ["--model", runs.model, "--out", runs.out, "--top-k", 8, "--n", 2, "--resume", "--dry-run", *flags]
    command = [str(ROLLGEN), "generate", str(runs.prompts), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


def planned(runs: Runs, *flags: object) -> tuple[dict[str, Any], str]:
    """What it prints as JSON, and on stderr."""
    done = dry_run(runs, "--json", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_retry_is_counted(runs: Runs) -> None:
    """Before it is planned and when it is owed: its samples, at its own max_tokens; nothing is changed."""
    cut = runs(max_tokens=5).length_finishes
    before = {path: path.read_bytes() for path in runs.out.rglob("*") if path.is_file()}
    report, notes = planned(runs, "--retry", "finish_reason=length", "--max-tokens", 9)
    assert (report["retried"], report["estimate"]["samples"]) == (cut, cut)
    assert report["estimate"]["max_generated_tokens"] == 9 * cut
    assert f"{cut} samples that were cut are made again with 9 tokens" in notes
    assert {path: path.read_bytes() for path in runs.out.rglob("*") if path.is_file()} == before
    assert planned(runs, "--max-tokens", 5)[0]["estimate"]["samples"] == 0


def test_damage_is_told_and_not_in_the_way(runs: Runs) -> None:
    """The run itself sets a damaged shard aside: its samples are owed, and how many are cut is not known yet."""
    runs(max_tokens=5)
    [shard] = list_shards(runs.out)
    os.truncate(shard, 100)
    report, notes = planned(runs, "--retry", "finish_reason=length", "--max-tokens", 9)
    assert (report["retried"], report["estimate"]["samples"]) == (0, 10)
    assert "how many samples cannot be told yet" in notes


def test_bytes_that_are_no_text(runs: Runs) -> None:
    """Names that no manifest could hold are refused at once."""
    command = [os.fsencode(ROLLGEN), b"generate", b"p\xff.jsonl"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=180)
    assert done.returncode == 2
    assert done.stderr.startswith(b"rollgen: error: p\\udcff.jsonl: not UTF-8")
