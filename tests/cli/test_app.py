"""The `rollgen` command: fast help, one plain line an error, exit codes, data on stdout and the rest on stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from rollgen import __version__
from rollgen.cli.app import main
from rollgen.config import RunConfig
from rollgen.errors import EXIT_CODES_HELP

if TYPE_CHECKING:
    from models.runs import Runs

ROLLGEN = Path(sys.executable).with_name("rollgen")
HEAVY = ("torch", "vllm", "transformers", "pyarrow", "polars")


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The message, which is one line."""
        assert self.stderr.startswith("rollgen: error: ")
        assert self.stderr.endswith("\n")
        assert self.stderr.count("\n") == 1
        return self.stderr.removeprefix("rollgen: error: ").removesuffix("\n")


@pytest.fixture
def rollgen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    """`rollgen("inspect", ...)` runs the entry point in this process, in `tmp_path`, without a bar or environment."""
    monkeypatch.chdir(tmp_path)
    for name in RunConfig.model_fields:
        monkeypatch.delenv(f"ROLLGEN_{name.upper()}", raising=False)
    monkeypatch.setenv("ROLLGEN_PROGRESS", "none")

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rollgen", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capfd.readouterr()
        return Outcome(int(exited.value.code or 0), out, err)

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts; the second is text with a control character."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": "a", "prompt": "What is seven and five?"}, {"id": "b", "prompt": "\x1b[2J"}, {"prompt": "The sea"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_help_loads_nothing_heavy() -> None:
    """Help is fast because no heavy package appears among its imports."""
    command = [sys.executable, "-X", "importtime", ROLLGEN, "generate", "--help"]
    imported = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in imported.splitlines()}
    assert "rollgen" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["generate", "--help"], ["inspect", "-h"], ["status", "-h"]])
def test_help_goes_to_stdout(rollgen: Callable[..., Outcome], arguments: list[str]) -> None:
    """So that it can be paged."""
    outcome = rollgen(*arguments)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "Usage: rollgen" in outcome.stdout


def test_help_lists_the_exit_codes(rollgen: Callable[..., Outcome]) -> None:
    """Of the program and of each command, whatever the line breaks."""
    for command in ([], ["generate"], ["inspect"], ["status"], ["verify"], ["repair"], ["compact"]):
        assert EXIT_CODES_HELP in " ".join(rollgen(*command, "--help").stdout.split())


def test_no_arguments_show_help(rollgen: Callable[..., Outcome]) -> None:
    """Nothing was asked, which is a usage error, but not one that needs a message."""
    outcome = rollgen()
    assert outcome.code == 2
    assert "Usage: rollgen" in outcome.stdout + outcome.stderr
    assert "error" not in outcome.stderr


def test_version(rollgen: Callable[..., Outcome]) -> None:
    """One line."""
    assert rollgen("--version") == (0, f"rollgen {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["genrate"], "No such command 'genrate'"),
        (["generate"], "Missing argument 'PROMPTS...'"),
        (["generate", "p.jsonl", "--temprature", "1"], "No such option: --temprature"),
        (["generate", "p.jsonl", "--n"], "Option '--n' requires an argument"),
        (["generate", "p.jsonl", "--chat=yes"], "--chat"),
        (["generate", "p.jsonl", "--n", "0"], "--n: Input should be greater than or equal to 1, got '0'"),
        (["generate", "p.jsonl", "--sampling-arg", "x"], "--sampling-arg: expected KEY=VALUE, got 'x'"),
        (["generate", "p.jsonl", "--top-k", "0"], "top_p and min_p need a top_k"),
        (["generate", "p.jsonl", "--config", "no.toml"], "no.toml: cannot read the config file"),
        (["generate", "p.jsonl"], "no model: name one with --model"),
        (["generate", "p.jsonl", "--model", "./none"], "./none: no such model directory; check --model"),
        (["generate", "p.jsonl", "--resume", "--clean"], "--resume and --clean exclude each other"),
        (["inspect"], "Missing argument 'DIR'"),
        (["inspect", "no"], "no: not a directory; name the one that holds rollgen.json"),
        (["inspect", ".", "--at", "3"], "--at shows a token of one completion: name that with --sample"),
        (["status"], "Missing argument 'DIR'"),
        (["status", "no"], "no: not a directory; name the one that holds rollgen.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors(rollgen: Callable[..., Outcome], tmp_path: Path, arguments: list[str], expected: str) -> None:
    """Exit 2, one plain line on stderr that names the flag, nothing on stdout, nothing made."""
    outcome = rollgen(*arguments)
    assert outcome.code == 2
    assert expected in outcome.error
    assert outcome.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_bad_rows_are_a_line_each(rollgen: Callable[..., Outcome], tmp_path: Path, tiny_model: Path) -> None:
    """Each names its file and line, so that editors can jump there; exit 2 before anything is made."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "good"}\n{"id": 1}\n{"prompt": 7}\n')
    outcome = rollgen("generate", "p.jsonl", "--model", tiny_model)
    assert outcome.code == 2
    lines = outcome.stderr.splitlines()
    assert [re.match(r"rollgen: error: p\.jsonl:(\d): ", line)[1] for line in lines] == ["2", "3"]  # type: ignore[index]
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_dataset_errors_exit_1(rollgen: Callable[..., Outcome], tmp_path: Path) -> None:
    """Not the user's flags but the data is wrong."""
    outcome = rollgen("inspect", tmp_path)
    assert outcome.code == 1
    assert outcome.error == f"{tmp_path}/rollgen.json: not found; {tmp_path} is not a rollgen dataset"


def test_errors_cannot_act_on_the_terminal(rollgen: Callable[..., Outcome]) -> None:
    """Control characters of a path are spelled out."""
    assert "\\x1b[2J" in rollgen("inspect", "\x1b[2J").error


def test_another_run_is_refused(
    rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path, make_dataset: Callable[..., Path]
) -> None:
    """Exit 2 without flags; exit 4 with --resume, naming what differs; both before a model loads."""
    directory = make_dataset(prompts.parent / "out")
    command = ["generate", prompts, "--model", tiny_model, "--out", directory]
    outcome = rollgen(*command)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.error.startswith(f"--out {directory}: holds a run already; continue it with --resume")
    outcome = rollgen(*command, "--resume")
    assert (outcome.code, outcome.stdout) == (4, "")
    assert "this run was made with other settings: " in outcome.error
    assert "top_k (8 -> 50)" in outcome.error


def test_default_output_directory(rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path) -> None:
    """Named after the first file, in the current directory; here there is a file in its place."""
    (prompts.parent / "prompts-rollouts").touch()
    outcome = rollgen("generate", prompts, "--model", tiny_model)
    assert (outcome.code, outcome.error) == (2, "--out prompts-rollouts: exists and is not a directory")


def test_inspect_prints_json(
    rollgen: Callable[..., Outcome], make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    """All of stdout is one JSON object; 2 shards of 3 prompts and 2 samples are 12."""
    outcome = rollgen("inspect", make_dataset(tmp_path / "out"), "--json")
    assert (outcome.code, outcome.stderr) == (0, "")
    plan = json.loads(outcome.stdout)["plan"]
    assert (plan["prompts"], plan["samples"], plan["owed"]) == (6, 12, 0)


def test_inspect_prints_text(
    rollgen: Callable[..., Outcome], make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    """On stdout, without escape sequences where it is not a terminal."""
    outcome = rollgen("inspect", make_dataset(tmp_path / "out"))
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "12" in outcome.stdout
    assert "\x1b" not in outcome.stdout


def test_inspect_one_sample(rollgen: Callable[..., Outcome], make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Tokens, or the support of one of them; from the end, too. Without escape sequences where it is no terminal."""
    directory = make_dataset(tmp_path / "out", support_logprobs=True)
    outcome = rollgen("inspect", directory, "--sample", "p2:1")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "1 of 2 · finished by stop · 8 tokens" in outcome.stdout
    assert "\x1b" not in outcome.stdout
    assert "Token 7 of 0-7 · sampled '" in rollgen("inspect", directory, "--sample", "p2", "--at", "-1").stdout


def test_inspect_one_sample_as_json(
    rollgen: Callable[..., Outcome], make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    """One object: the row, its tokens and the support that was asked for."""
    outcome = rollgen("inspect", make_dataset(tmp_path / "out"), "--sample", "p2:1", "--at", 3, "--json")
    assert (outcome.code, outcome.stderr) == (0, "")
    shown = json.loads(outcome.stdout)
    assert (shown["prompt_id"], shown["sample_index"], len(shown["tokens"])) == ("p2", 1, 8)
    assert len(shown["at"]["support"]) == shown["tokens"][3]["support_size"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["p22"], "--sample: no prompt 'p22' in this dataset; did you mean 'p2'?"),
        (["p2:7"], "--sample: sample 7 of 'p2' is not stored; stored: 0-1"),
        (["p2", "--at", "8"], "--at 8: the response has 8 tokens: 0 to 7, or -8 to -1 from the end"),
    ],
)
def test_samples_that_are_not_there(
    rollgen: Callable[..., Outcome],
    make_dataset: Callable[..., Path],
    tmp_path: Path,
    arguments: list[str],
    expected: str,
) -> None:
    """Exit 2, as JSON or not, with what there is instead."""
    directory = make_dataset(tmp_path / "out")
    for more in ([], ["--json"]):
        outcome = rollgen("inspect", directory, "--sample", *arguments, *more)
        assert (outcome.code, outcome.stdout) == (2, "")
        assert outcome.error.startswith(expected)


def test_status(rollgen: Callable[..., Outcome], make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """For people and for programs; exit 0 either way."""
    directory = make_dataset(tmp_path / "out")
    outcome = rollgen("status", directory)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("out · complete\n")
    assert "12 of 12 samples (100.0%)" in outcome.stdout
    outcome = rollgen("status", directory, "--json")
    assert (outcome.code, outcome.stderr) == (0, "")
    shown = json.loads(outcome.stdout)
    assert (shown["planned"], shown["stored"], shown["owed"], shown["writers"][0]["alive"]) == (12, 12, 0, False)


def test_status_of_something_else(rollgen: Callable[..., Outcome], tmp_path: Path) -> None:
    """A directory without a run."""
    outcome = rollgen("status", tmp_path)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.error == f"{tmp_path}/rollgen.json: not found; {tmp_path} is not a rollgen dataset"


def test_dry_run(rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Resolved settings, counts and the first prompt as the model sees it; nothing is made and no model is loaded."""
    outcome = rollgen("generate", prompts, "--model", tiny_model, "--chat", "--n", 3, "--dry-run")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "3 prompts, 9 samples, 0 rows skipped" in outcome.stdout
    assert "\nn = 3\n" in outcome.stdout
    assert '\nmodel = "tiny"\n' in "\n" + outcome.stdout
    assert "first prompt, a, as the model sees it:\n<s><|im_start|>user\nWhat is seven and five?" in outcome.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_dry_run_as_json(rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path) -> None:
    """The same for programs: one object with the config and the plan. The context of 256 clamps 1,024 tokens."""
    outcome = rollgen("generate", prompts, "--model", tiny_model, "--limit", 2, "--dry-run", "--json")
    assert (outcome.code, outcome.stderr) == (0, "")
    shown = json.loads(outcome.stdout)
    assert (shown["config"]["model"], shown["config"]["limit"], shown["config"]["top_k"]) == ("tiny", 2, 50)
    assert (shown["plan"]["prompts"], shown["plan"]["samples"], shown["plan"]["clamped"]) == (2, 2, 2)
    assert (shown["plan"]["first_prompt_id"], shown["plan"]["first_text"]) == ("a", "What is seven and five?")


def test_dry_run_estimates(rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path) -> None:
    """3 prompts of 2 samples of 10 tokens are 60 tokens at most; of a new run, nothing is measured."""
    command = ["generate", prompts, "--model", tiny_model, "--n", 2, "--max-tokens", 10, "--dry-run"]
    outcome = rollgen(*command)
    assert "\nowed: 6 samples, at most 60 generated tokens\n" in outcome.stdout
    assert "assuming 47.2 bytes a token (supports of 16 ids on average)" in outcome.stdout
    assert "\ntime: no rate measured yet; at most 0:00:01 at 100 tokens/s" in outcome.stdout
    estimate = json.loads(rollgen(*command, "--json").stdout)["estimate"]
    assert (estimate["samples"], estimate["max_generated_tokens"], estimate["expected"]) == (6, 60, None)
    assert estimate["fits"]


def test_dry_run_of_a_continued_run_expects(rollgen: Callable[..., Outcome], runs: Runs) -> None:
    """Five prompts have two samples stored; three more each are expected to be like those."""
    stats = runs()
    command = ["generate", runs.prompts, "--model", runs.model, "--out", runs.out, "--resume", "--dry-run", "--json"]
    outcome = rollgen(*command, "--max-tokens", 8, "--top-k", 8, "--n", 5)
    assert (outcome.code, outcome.stderr) == (0, "")
    estimate = json.loads(outcome.stdout)["estimate"]
    assert (estimate["samples"], estimate["max_generated_tokens"]) == (15, 15 * 8)
    assert estimate["expected"]["mean_length"] == stats.tokens / 10
    assert estimate["expected"]["tokens"] == round(15 * stats.tokens / 10)


def test_dry_run_refuses_what_the_run_would(
    rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path, make_dataset: Callable[..., Path]
) -> None:
    """The output directory is looked at too: a file, a run without flags, a run with other settings."""
    directory = make_dataset(prompts.parent / "out")
    command = ["generate", prompts, "--model", tiny_model, "--dry-run", "--out"]
    assert rollgen(*command, prompts).error == f"--out {prompts}: exists and is not a directory"
    assert "holds a run already" in rollgen(*command, directory).error
    assert rollgen(*command, directory, "--resume").code == 4


def test_dry_run_says_what_clean_removes(
    rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path, make_dataset: Callable[..., Path]
) -> None:
    """2 shards of 6 samples, and one that was set aside: three files. What a damaged journal counted is not known."""
    directory = make_dataset(prompts.parent / "out")
    (directory / "quarantine").mkdir()
    (directory / "quarantine" / "part-w0-000007.parquet").write_bytes(b"PAR1")
    size = sum(path.stat().st_size for path in directory.glob("*/part-*.parquet"))
    command = ["generate", prompts, "--model", tiny_model, "--dry-run", "--out", directory, "--clean"]
    assert "\n--clean would remove 3 shards, 12 samples, " in rollgen(*command).stdout
    assert json.loads(rollgen(*command, "--json").stdout)["removed"] == {"shards": 3, "samples": 12, "bytes": size}
    (directory / "journal" / "w0.jsonl").write_text("{}\n")
    assert "\n--clean would remove 3 shards, nobody knows how many samples, " in rollgen(*command).stdout
    assert len(list(directory.glob("*/part-*.parquet"))) == 3


def test_dry_run_of_a_new_run_removes_nothing(rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path) -> None:
    """With the flag or without."""
    for flags in ([], ["--clean"]):
        outcome = rollgen("generate", prompts, "--model", tiny_model, "--dry-run", "--json", *flags)
        assert json.loads(outcome.stdout)["removed"] is None


def test_dry_run_finds_bad_rows(rollgen: Callable[..., Outcome], tmp_path: Path, tiny_model: Path) -> None:
    """As the run itself would."""
    (tmp_path / "p.jsonl").write_text("{}\n")
    outcome = rollgen("generate", "p.jsonl", "--model", tiny_model, "--dry-run")
    assert outcome.code == 2
    assert outcome.error.startswith("p.jsonl:1: no prompt")


def test_reader_that_goes_away_is_no_error(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """`rollgen inspect ... | head -1`: exit 0 and silence."""
    directory = make_dataset(tmp_path / "out")
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [ROLLGEN, "inspect", directory, "--json"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (process.returncode, process.stderr) == (0, b"")
