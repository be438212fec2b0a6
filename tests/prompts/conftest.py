"""A tiny model made once per session, and a function that plans rows and reads the plan back."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from models.tiny import make_tiny_model

from rollgen.config import RunConfig
from rollgen.prompts.model import ModelInfo, load_model_info
from rollgen.prompts.plan import Plan
from rollgen.prompts.planner import PlanSummary, write_plan
from rollgen.prompts.sources import PromptFiles
from rollgen.rollouts import Prompt

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Planned(NamedTuple):
    """A plan that was written and read back."""

    prompts: list[Prompt]
    summary: PlanSummary
    plan: Plan


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny chat model; not to be changed."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model_info(tiny_model: Path) -> ModelInfo:
    """What is known about the tiny model under default settings."""
    return load_model_info(RunConfig(), str(tiny_model))


@pytest.fixture
def stdin(tmp_path_factory: pytest.TempPathFactory):
    """`stdin(content)` puts content on file descriptor 0 until the end of the test."""
    saved = os.dup(0)

    def put(content):
        path = tmp_path_factory.mktemp("stdin") / "stdin"
        path.write_bytes(content)
        with path.open("rb") as file:
            os.dup2(file.fileno(), 0)

    yield put
    os.dup2(saved, 0)
    os.close(saved)


@pytest.fixture(scope="session")
def make_plan(tmp_path_factory: pytest.TempPathFactory, model_info: ModelInfo):
    """`make_plan(*contents, **config)`: each content a file of bytes, or of rows as objects; files are p0, p1, ..."""
    directory = tmp_path_factory.mktemp("plans")

    def plan(*contents: bytes | list[Any], model: ModelInfo = model_info, **config: Any) -> Planned:
        paths = [directory / f"p{index}.jsonl" for index in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content if isinstance(content, bytes) else b"".join(map(json_line, content)))
        target = directory / "plan.parquet"
        settings = RunConfig(**{"max_tokens": 8, **config})
        with PromptFiles(paths, settings.limit) as lines:
            summary = write_plan(lines, settings, model, target, now=NOW)
        written = Plan(target)
        return Planned(list(written), summary, written)

    return plan


def json_line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"
