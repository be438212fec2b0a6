"""The `rollgen` command: fast help, one plain line an error, exit codes, data on stdout and the rest on stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from rollgen import __version__
from rollgen.cli.app import main
from rollgen.cli.settings import describe_settings
from rollgen.config import RunConfig, flag
from rollgen.errors import EXIT_CODES_HELP
from rollgen.preflight import public_settings

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


@pytest.mark.parametrize("columns", [80, 40, 200])
def test_help_never_cuts_a_name(rollgen: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Whatever the width: each option whole, with what it takes, and no box around it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = rollgen("generate", "--help").stdout
    for name in RunConfig.model_fields:
        assert re.search(rf"^  (--\S+, )?{flag(name)}( |,|$)", text, re.MULTILINE), name
    assert "--no-trust-remote-code\n" in text
    assert "--tensor-parallel-size, -tp INTEGER\n" in text
    assert not set("…│╭") & set(text)
    assert "Usage: rollgen generate [OPTIONS] PROMPTS..." in text
    assert "<" not in text.replace("<name of the", "").replace("<name of", "").replace("<name", "")


def test_help_names_defaults(rollgen: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are zero."""
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(rollgen("generate", "--help").stdout.split())
    for words in ("0 is off. [0.0] --max-tokens", "prompt's id and k. [0] --stop", "at most. [60.0] --progress"):
        assert words in text


def test_help_has_a_line_for_each_command(rollgen: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns, to the full stop."""
    monkeypatch.setenv("COLUMNS", "80")
    _, _, commands = rollgen("--help").stdout.partition("Commands:\n")
    lines = commands.partition("\n\n")[0].splitlines()
    names = "generate inspect status score export verify repair compact merge"
    assert [line.split()[0] for line in lines] == names.split()
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


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
        (["generate", "p.jsonl", "--sampling-arg", "x"], "--sampling-arg: 'x' is not KEY=VALUE, got ['x']"),
        (["generate", "p.jsonl", "--top-k", "0"], "top_p and min_p need a top_k"),
        (["generate", "p.jsonl", "--config", "no.toml"], "no.toml: cannot read the config file"),
        (["generate", "p.jsonl"], "p.jsonl: cannot read it: No such file or directory"),
        (["generate", __file__], "no model: name one with --model"),
        (["generate", __file__, "--model", "./none"], "./none: no such model directory; check --model"),
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
    assert "1 of 0-1 · finished by stop · 8 tokens" in outcome.stdout
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
    assert outcome.stdout.startswith(f'# out: prompts-rollouts\nmodel = "{tiny_model}"\nn = 3\nchat = true\n')
    assert "first prompt, a, as the model sees it:\n<s><|im_start|>user\nWhat is seven and five?" in outcome.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_dry_run_prints_a_config_file(rollgen: Callable[..., Outcome], prompts: Path, tiny_model: Path) -> None:
    """Everything above the counts is TOML, and as a config file makes the same run."""
    options = (
        "--min-p",
        0.05,
        "--sampling-arg",
        "min_tokens=4",
        "--engine-arg",
        "enable_prefix_caching=true",
        "--stop",
        '\x07"\\é',
    )
    outcome = rollgen("generate", prompts, "--model", tiny_model, *options, "--stop-token-ids", 7, "--dry-run")
    assert outcome.code == 0
    settings = outcome.stdout.partition("\n\n3 prompts,")[0]
    (prompts.parent / "run.toml").write_text(settings)
    again = rollgen("generate", prompts, "--config", "run.toml", "--dry-run")
    assert (again.code, again.stdout) == (0, outcome.stdout)
    changed, _, rest = settings.partition("# as by default:\n")
    assert [line.partition(" ")[0] for line in changed.splitlines()[1:-1]] == [
        "model",
        "min_p",
        "stop",
        "stop_token_ids",
        "sampling_arg",
        "engine_arg",
        "progress",  # of this test's environment
    ]
    assert "\ntemperature = 1.0\n" in rest
    assert "\n# not set: revision, " in rest


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"x y": [True, 1.5], "z": {"a": "\u202e"}}, '{ "x y" = [true, 1.5], z = { a = "\\U0000202e" } }'),
        ({"x": None}, None),
    ],
)
def test_json_as_toml(value: dict[str, Any], expected: str | None) -> None:
    """Nested, with keys of any kind, inert; a null, which TOML does not have, is said where it can be."""
    lines = "\n".join(describe_settings(public_settings(RunConfig(engine_arg=value))))
    if expected is None:
        assert "# engine_arg: has a null, which TOML cannot say: give it on the command line\n" in lines
    else:
        assert f"engine_arg = {expected}\n" in lines
        assert tomllib.loads(lines)["engine_arg"] == value


def test_dry_run_of_a_part(rollgen: Callable[..., Outcome], runs: Runs) -> None:
    """Of five prompts of two samples part 1 of 2 has prompts 1 and 3, and owes what is not stored of those."""
    command = ["generate", runs.prompts, "--model", runs.model, "--out", runs.out, "--top-k", 8, "--max-tokens", 8]
    command += ["--resume", "--dry-run", "--shard", "1/2"]
    assert "\nowed by part 1 of 2: 4 samples, at most 32 generated tokens\n" in rollgen(*command, "--n", 2).stdout
    runs(shard="0/2", resume=True)
    assert "\nowed by part 1 of 2: 4 samples" in rollgen(*command, "--n", 2).stdout
    runs(resume=True)
    assert json.loads(rollgen(*command, "--n", 3, "--json").stdout)["estimate"]["samples"] == 2


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
    assert "\ntime: no speed is known before a first run; at most 0:00:01 at 100 tokens/s" in outcome.stdout
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


def test_interrupted_at_the_very_beginning(rollgen: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is parsed: one line."""

    def interrupt(app: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.main.get_command", interrupt)
    outcome = rollgen("status", ".")
    assert (outcome.code, outcome.error) == (130, "interrupted")


def test_help_is_the_same_in_each_process() -> None:
    """Also where sets are in another order: `docs/cli.md` is compared with it."""
    for command in ([], ["status"]):
        said = {
            subprocess.run(
                [ROLLGEN, *command, "--help"],
                env=os.environ | {"PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in "1234"
        }
        assert len(said) == 1
        assert "  -h, --help" in said.pop()
