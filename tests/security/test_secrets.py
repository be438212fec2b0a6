"""What a dataset must not tell of where it was made: no directory, no user, no host, no secret of the environment.

Whoever made it gives it away. So every byte that a run, a retry, a compaction or a `RolloutWriter` leaves below `--out`
is searched for CANARY, which is in the directories of everything that is named and in the environment.
"""

from __future__ import annotations

import json
import shutil
import socket
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from models.fake_engine import FakeEngine
from models.fake_server import FakeServer
from models.outputs import plain
from models.printed import Printed
from models.runs import Runs

from rollgen.cli.progress import ConsoleReporter
from rollgen.config import RunConfig, load_config, make_config
from rollgen.curate.compact import compact
from rollgen.engines.base import RequestError, SampleRequest
from rollgen.engines.replay import check_replayable
from rollgen.errors import CaptureError, EngineError, TooManyFailures, UsageError
from rollgen.format.journal import list_shards
from rollgen.inspect.card import write_card
from rollgen.loop.engines import Engines
from rollgen.loop.run import generate
from rollgen.rollout_writer import RolloutWriter

CANARY = "CANARY"
SECRETS = {
    "HF_TOKEN": "hf_CANARYxCANARYxCANARY",
    "AWS_SECRET_ACCESS_KEY": "CANARY/aws+secret",
    "OPENAI_API_KEY": "sk-CANARY-0123456789abcdef",
    "DATABASE_PASSWORD": "CANARY of a database",
    "ANY_OTHER_VARIABLE": "CANARY of no use",
    "USER": "CANARYuser",
    "LOGNAME": "CANARYuser",
}


@dataclass(frozen=True)
class Place:
    """Where everything lies: below directories that nobody is to hear of."""

    runs: Runs
    root: Path
    """With a space in its name, as in those of its directories."""

    @property
    def told(self) -> str:
        """What an engine may say, with all that it knows."""
        known = " ".join(f"{name}={value}" for name, value in SECRETS.items() if name in TOLD)
        return (
            f"[Errno 2] No such file or directory: '{self.root}/un known/x.bin' in {self.root}/models/tiny/config\n"
            f'  File "{self.root}/site packages/engine.py", line 3; /srv/CANARY/lib/a.py:7; file:///srv/CANARY/b\n'
            f"  {self.root}/home/.cache/hub; {self.root}/here/p.log; {self.root}/tmp/socket; {self.runs.out}/data\n"
            f"  {known}; https://me:CANARY@hub.example/x; sent hf_CANARYcanaryCANARYcanary"
        )


TOLD = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DATABASE_PASSWORD")


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Home, working and temporary directory, model, tokenizer, template, prompts, configuration and dataset."""
    root = tmp_path / "CANARY of al ice"
    for name in ("home", "here", "tmp", "models", "prompts", "config", "datasets"):
        (root / name).mkdir(parents=True)
    shutil.copytree(tiny_model, root / "models" / "tiny")
    settings = root / "models" / "tiny" / "tokenizer_config.json"
    upstream = {"name_or_path": "/srv/CANARY/upstream", "vocab_file": "/srv/CANARY/vocab.json", "unk_token": "/a/b"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | upstream))
    (root / "config" / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("TMPDIR", str(root / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("rollgen.loop.stop.SIGNAL_GRACE_SECONDS", 0.01)
    monkeypatch.chdir(root / "here")
    runs = Runs(root / "prompts", root / "models" / "tiny")
    runs.out = root / "datasets" / "set"
    runs.write_prompts(4)
    return Place(runs, root)


def contents(out: Path) -> Iterator[tuple[str, bytes]]:
    """Every file's name and bytes, and of Parquet also its columns and metadata, decoded."""
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        yield name, name.encode()
        if path.is_file():
            content = path.read_bytes()
            yield name, content
            if content[-4:] == b"PAR1":
                table = pq.read_table(path)
                yield name, str([table.schema.metadata, pq.read_metadata(path).metadata, table.to_pydict()]).encode()


def leaks(place: Place) -> set[str]:
    """Files below `--out` that tell something."""
    host = socket.gethostname().encode()
    return {
        name
        for name, content in contents(place.runs.out)
        if CANARY.encode() in content or b"al ice" in content or (len(host) > 4 and host in content)
    }


def everything_named(place: Place) -> None:
    """All paths that can be given, in a configuration file and on the command line."""
    file = place.root / "config" / "run.toml"
    template = place.root / "config" / "template.jinja"
    file.write_text(f"chat_template = '{template}'\nchat = true\nn = 2\ntokenizer = '{place.runs.model}'\n")
    arguments = [f"hf_config_path={place.root}/config", f"download_dir={place.root}/models"]
    arguments += [f'speculative_config={{"model": "{place.root}/models/draft", "method": "ngram"}}']
    config = load_config({"model": str(place.runs.model), "max_tokens": "8", "engine_arg": arguments}, file)
    with ConsoleReporter("none") as reporter:
        crew = Engines([FakeEngine()])
        generate([place.runs.prompts], config, place.runs.out, reporter=reporter, make_crew=lambda preflight: crew)
    write_card(place.runs.out)
    manifest = json.loads((place.runs.out / "rollgen.json").read_text())
    assert manifest["identity"]["engine_arg"] == {
        "hf_config_path": "config",
        "speculative_config": {"model": "draft", "method": "ngram"},
    }
    settings = json.loads((place.runs.out / "tokenizer" / "tokenizer_config.json").read_text())
    assert settings["unk_token"] == "/a/b"


def rows_that_are_skipped(place: Place) -> None:
    """Bad ones, and one whose id is taken."""
    place.runs.write_prompts(4, bad=[1])
    with place.runs.prompts.open("a") as file:
        file.write('{"id": "p0", "prompt": "again"}\n{"prompt": 7}\nno JSON\n')
    place.runs(on_bad_row="skip")


def failing(place: Place) -> FakeEngine:
    """An engine that fails every first sample, and says why."""

    async def before(request: SampleRequest) -> None:
        if request.sample_index == 0:
            raise RequestError(place.told)

    engine = FakeEngine(before=before)
    engine.notes = (place.told,)
    return engine


def requests_that_fail(place: Place) -> None:
    """Each a line of failures/."""
    place.runs(failing(place))
    lines = [json.loads(line) for line in (place.runs.out / "failures" / "w0.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for kept in ("'x.bin'", "tiny/config", "engine.py", "line 3", "a.py:7", "$HF_TOKEN", "$DATABASE_PASSWORD"):
        assert kept in lines[0]["error"]


def too_many_failures(place: Place) -> None:
    """The last one is in the log's last line too."""
    with pytest.raises(TooManyFailures):
        place.runs(failing(place), max_failures=1)


def an_engine_that_dies(place: Place) -> None:
    """It is started again, until it is not."""

    async def dies(request: SampleRequest) -> None:
        raise EngineError(place.told)

    with pytest.raises(EngineError):
        place.runs(FakeEngine(before=dies), max_restarts=2)


def an_engine_that_does_not_start(place: Place) -> None:
    """Before there is a manifest; then another one continues."""
    with pytest.raises(EngineError):
        place.runs(FakeEngine(start_error=EngineError(place.told)))
    place.runs(resume=True)


def a_crash(place: Place) -> None:
    """Of the program itself, with a traceback in its text."""

    async def crashes(request: SampleRequest) -> None:
        raise RuntimeError(place.told)

    with pytest.raises(RuntimeError):
        place.runs(FakeEngine(before=crashes))
    place.runs(resume=True)


def damage_and_recovery(place: Place) -> None:
    """A shard is set aside, and the log says which."""
    place.runs()
    shard = list_shards(place.runs.out)[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    place.runs(resume=True)
    assert list((place.runs.out / "quarantine").iterdir())


def a_retry_and_a_compaction(place: Place) -> None:
    """What both write beside shards."""
    place.runs(max_tokens=5)
    place.runs(resume=True, retry="finish_reason=length", max_tokens=9)
    compact(place.runs.out, keep=True)
    write_card(place.runs.out)
    assert list(place.runs.out.glob("retry-*.parquet"))


def a_loop_of_ones_own(place: Place) -> None:
    """Which reports failures in its own words, and outputs that are wrong."""
    settings = {"model": str(place.runs.model), "max_tokens": 8, "top_k": 8, "n": 2, "capture": "native"}
    with RolloutWriter(place.runs.out, prompts=place.runs.prompts, **settings) as writer:
        for number, request in enumerate(writer.owed()):
            if number == 0:
                writer.fail(request, OSError(2, "No such file", f"{place.root}/un known/x.bin"))
            elif number == 1:
                writer.fail(request, place.told)
            elif number == 2:
                with pytest.raises(CaptureError):
                    writer.add(request, plain(request, finish_reason=place.told))
            else:
                writer.add(request, plain(request))


SCENARIOS: list[Callable[[Place], None]] = [
    everything_named,
    rows_that_are_skipped,
    requests_that_fail,
    too_many_failures,
    an_engine_that_dies,
    an_engine_that_does_not_start,
    a_crash,
    damage_and_recovery,
    a_retry_and_a_compaction,
    a_loop_of_ones_own,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_told(place: Place, scenario: Callable[[Place], None]) -> None:
    """Whatever happens."""
    scenario(place)
    assert len({*contents(place.runs.out)}) > 10
    assert leaks(place) == set()


def test_what_is_told_is_found(place: Place) -> None:
    """Prompts are kept as they are, and so is what they say: in the plan and in the shards, which are compressed."""
    place.runs.prompts.write_text(json.dumps({"prompt": "x", "note": CANARY * 99}) + "\n")
    place.runs()
    assert leaks(place) == {"plan.parquet", "data/part-w0-000000.parquet"}


@pytest.mark.parametrize(
    "setting",
    [
        {"engine_arg": {"hf_token": "x"}},
        {"engine_arg": {"hf_overrides": {"api_key": "x"}}},
        {"engine_arg": {"model_loader_extra_config": {"headers": ["hf_AbCdEfGhIjKlMnOpQrSt"]}}},
        {"sampling_arg": {"extra_args": {"password": "x"}}},
    ],
    ids=str,
)
def test_secrets_are_refused(setting: dict[str, object]) -> None:
    """A configuration is recorded, so that no secret may be in it, not even with `--allow-unreplayable`."""
    with pytest.raises(UsageError, match="secret"):
        check_replayable(RunConfig(**setting, allow_unreplayable=True))


LOGIN = "http://me:CANARY@127.0.0.1:9"
"""Nobody listens on port 9."""


@pytest.mark.parametrize("given", [f'{{"a": "{LOGIN}"}}', f'["{LOGIN}", 3]', f'[["{LOGIN}"]]', LOGIN])
def test_logins_in_settings_are_not_repeated(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with them: no list, not of texts, not JSON."""
    monkeypatch.setenv("ROLLGEN_SERVER", given)
    with pytest.raises(UsageError, match=r"environment: .*(server|SERVER)") as caught:
        load_config({})
    assert CANARY not in str(caught.value)
    with pytest.raises(UsageError, match="--api-key-env") as caught:
        make_config({"api_key_env": [CANARY]}, {})
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("server", [(), (LOGIN,)], ids=["engine", "server"])
@pytest.mark.parametrize("given", ["sk-CANARY", "CANARY"])
def test_a_key_in_place_of_its_variable_is_refused(place: Place, given: str, server: tuple[str, ...]) -> None:
    """Before anything is written, also where no key is needed."""
    with pytest.raises(UsageError, match="--api-key-env: expected the name") as caught:
        place.runs(api_key_env=given, server=server)
    assert CANARY not in str(caught.value)
    with pytest.raises(UsageError, match="--api-key-env: expected the name") as caught:
        RolloutWriter(place.runs.out, model=str(place.runs.model), api_key_env=given)
    assert CANARY not in str(caught.value)
    assert not place.runs.out.exists()


def test_a_login_of_a_server_is_never_told(rollgen: Callable[..., Printed], place: Place, tiny_model: Path) -> None:
    """A dry run as text and as JSON, a whole run, and one whose server is not there: neither login nor its base64."""
    login = "me:hunter2hunter2"
    secrets = (login.partition(":")[2], b64encode(login.encode()).decode())

    def told(url: str, *flags: str, code: int) -> str:
        options = ["--server", url, "--model", tiny_model, "--top-k", 8, "--max-tokens", 8, "--out", place.runs.out]
        printed = rollgen("generate", place.runs.prompts, *options, *flags)
        assert printed.code == code, printed.err
        return printed.out + printed.err

    with FakeServer(vocab_size=512, shift=None) as server:
        url = server.url.replace("http://", f"http://{login}@")
        outputs = [told(url, "--dry-run", code=0), told(url, "--dry-run", "--json", code=0), told(url, code=0)]
        assert all(server.url in output for output in outputs[:2])
    outputs.append(told(url, "--resume", code=1))
    outputs += [content.decode(errors="replace") for _, content in contents(place.runs.out)]
    assert not [output for output in outputs for secret in secrets if secret in output]
    assert leaks(place) == set()
