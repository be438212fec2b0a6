"""`--dry-run --out s3://...`: looks, takes no lock and changes nothing."""

from __future__ import annotations

import json

from models.stored_run import StoredRuns


def test_of_nothing(stored_runs: StoredRuns) -> None:
    """Everything is owed; how much room there is, nobody tells."""
    estimate = json.loads(stored_runs("--dry-run", "--json").stdout)["estimate"]
    assert (estimate["samples"], estimate["free_bytes"], estimate["fits"]) == (12, None, True)
    assert stored_runs.store.list() == {}


def test_of_a_run(stored_runs: StoredRuns) -> None:
    """What is stored counts; what `--clean` would remove is told; a refusal names the URL and no copy of it."""
    stored_runs("--n", 1)
    before = stored_runs.store.list()
    dry = json.loads(stored_runs("--dry-run", "--json", "--resume", "--n", 3).stdout)
    assert dry["estimate"]["samples"] == 24
    assert dry["estimate"]["expected"]["tokens"] > 0
    assert "12 samples" in stored_runs("--dry-run", "--clean").stdout
    refused = stored_runs("--dry-run", code=2)
    assert f"--out {stored_runs.url}: holds a run already" in refused.stderr
    changed = stored_runs("--dry-run", "--resume", "--temperature", 0.5, code=4)
    assert "temperature (1.0 -> 0.5)" in changed.stderr
    assert "/tmp" not in refused.stderr + changed.stderr
    longer = stored_runs("--dry-run", "--resume", "--retry", "finish_reason=length", "--max-tokens", 20)
    assert f"how many samples cannot be told yet: {stored_runs.url}/data/" in longer.stderr
    assert stored_runs.store.list() == before
