"""The tutorial and the examples as a reader would run them: the embedded model, real vLLM, training on its samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models.pages import REPOSITORY, blocks

pytestmark = pytest.mark.vllm

TUTORIAL = blocks("docs/tutorial.md")
PROGRAMS = {"sh": ["bash", "-ec"], "python": [sys.executable, "-c"]}


@pytest.fixture(scope="module")
def place(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks like a clone after `make demo`."""
    directory = tmp_path_factory.mktemp("clone")
    (directory / "examples").symlink_to(REPOSITORY / "examples")
    (directory / ".cache").mkdir()
    (directory / ".cache/smollm2").symlink_to(smollm2)
    return directory


@pytest.fixture(scope="module")
def sampled(place: Path) -> Path:
    """The tutorial's dataset: 8 prompts whose answer is a number, 4 samples each, in float32."""
    follow(place, "2. Generate")
    return place / "sums"


def follow(place: Path, section: str) -> str:
    """Run what a section of the tutorial says, in the shell and in Python. Returns what it prints."""
    steps = [block for block in TUTORIAL if block.section == section and block.language in PROGRAMS]
    return "".join(run(place, block.language, block.code) for block in steps)


def run(place: Path, language: str, code: str) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [*PROGRAMS[language], code]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("3. Look", "add-7-5"),
        ("4. Check", "1.0000"),
        ("5. Reward", "exact_match"),
        ("7. Elsewhere", "32 samples of 8 prompts"),
    ],
)
def test_tutorial(sampled: Path, place: Path, section: str, said: str) -> None:
    """Each section runs as it stands, in order, on what the one before has left."""
    assert said in follow(place, section)


def test_tutorial_trains_on_the_policy_that_sampled(sampled: Path, place: Path) -> None:
    """With the stored rewards; in its first step every ratio is 1."""
    first = follow(place, "6. Train").splitlines()[0]
    assert first.startswith("step 0: loss ")
    assert abs(float(first.rpartition(" ")[2]) - 1) < 1e-4


def test_tutorial_grows_the_dataset(sampled: Path, place: Path) -> None:
    """The last section's command is accepted, and would make the two further samples of each prompt."""
    grow = next(block.code for block in TUTORIAL if block.section == "8. More of it")
    assert "16 samples" in run(place, "sh", grow.rstrip() + " --dry-run")


def run_example(name: str, dataset: Path, *arguments: object) -> Any:
    """What the script prints with `--json`."""
    command = [sys.executable, REPOSITORY / "examples" / name, dataset, *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_replay_is_exact_with_masks_and_biased_without(sampled: Path, smollm2: Path) -> None:
    """vLLM against a Hugging Face forward pass, both float32: mean ratio 1 with masks, about 0.92 without."""
    result = run_example("02_train_step.py", sampled, "--model", smollm2, "--samples", 32)
    masked, unmasked = result["before"]["with masks"], result["before"]["without masks"]
    assert masked["tokens"] > 400
    assert abs(masked["mean_ratio"] - 1) < 1e-4
    assert masked["max_logprob_difference"] < 5e-4
    assert 0.85 < unmasked["mean_ratio"] < 0.97


def test_offline_grpo_starts_from_exact_ratios(sampled: Path, smollm2: Path) -> None:
    """The first of two steps sees ratios of 1 with masks, the second one a policy that has moved."""
    first, second = run_example("04_grpo_offline.py", sampled, "--model", smollm2, "--steps", 2)["steps"]
    assert abs(first["with masks"]["mean_ratio"] - 1) < 1e-4
    assert first["with masks"]["largest"] < 5e-4
    assert first["clipped"] == 0
    assert 0.85 < first["without masks"]["mean_ratio"] < 0.97
    assert second["with masks"]["largest"] > 1e-3
    assert second["loss"] < first["loss"]


def test_trl_starts_from_exact_ratios(sampled: Path, smollm2: Path) -> None:
    """TRL's own trainer, on the supports and on the full vocabulary."""
    runs = run_example("05_trl_grpo.py", sampled, "--model", smollm2, "--steps", 1)
    assert abs(runs["with masks"][0]["mean_ratio"] - 1) < 1e-4
    assert 0.85 < runs["without masks"][0]["mean_ratio"] < 0.97
