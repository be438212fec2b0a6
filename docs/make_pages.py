"""Write the pages beside this file that the program itself can tell: `cli.md` and `python.md`.

python docs/make_pages.py            write them
python docs/make_pages.py --check    exit 1, and change nothing, when one is not what would be written

`cli.md` is the help of every command, as the command prints it 100 columns wide; `python.md` the signatures and
docstrings of the public names, read from the source.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path
from typing import get_args

import griffe
import typer
from pydantic.fields import FieldInfo

import rollgen
from rollgen.cli.app import app

DOCS = Path(__file__).parent
WIDTH = 100
CLI_HEAD = """\
# The command line

What `rollgen COMMAND --help` prints. This page is made from it: `python docs/make_pages.py`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed; of `verify` and `repair`: something is wrong |
| 2 | usage, bad input, or a model that cannot be had; raised before a model loads |
| 3 | done, but some samples failed; `--resume` tries them again. `score`: some could not be scored |
| 4 | resume refused: this command would mix two different datasets or scorers, or another run is writing there |
| 129, 130, 143 | interrupted; what was finished is committed |
"""
PYTHON_HEAD = """\
# Python

The public names, as their docstrings tell them. This page is made from them: `python docs/make_pages.py`. What the
other commands do (`inspect`, `status`, `verify`, `repair`, `compact`) is for the command line, with `--json` for
programs. `rollgen.integrations.trl` has [a page of its own](trl.md).
"""
NAMES = (
    *("generate", "RunConfig", "RolloutWriter", "merge"),
    *("RolloutStream", "RolloutBatch", "RolloutDataset", "Rollout", "collate"),
    *("score", "Answer", "export"),
    *("ops.group_advantages", "ops.support_logprobs", "ops.support_logprobs_from_hidden", "ops.Support"),
    "RollgenError",
)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"not an argument, or one too many: {' '.join(arguments)}; give --check or nothing", file=sys.stderr)
        return 2
    wrong = False
    for name, make in PAGES.items():
        page, path = "".join(make()), DOCS / name
        if not arguments:
            path.write_text(page, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != page:
            print(f"{name}: not what the program tells; run `make format`", file=sys.stderr)
            wrong = True
    return int(wrong)


def command_line() -> Iterator[str]:
    """A heading and a block of text for `rollgen` itself and for each command, in their order."""
    yield CLI_HEAD
    root = typer.main.get_command(app)
    with root.make_context("rollgen", [], resilient_parsing=True, terminal_width=WIDTH) as context:
        yield help_section("rollgen", root.get_help(context))
        for name, command in root.commands.items():
            with command.make_context(name, [], parent=context, resilient_parsing=True, terminal_width=WIDTH) as below:
                yield help_section(f"rollgen {name}", command.get_help(below))


def help_section(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"\n## {title}\n\n```text\n{lines}\n```\n"


def python_names() -> Iterator[str]:
    """A heading, the signature and the docstring of each, and of a class those of its public members."""
    yield PYTHON_HEAD
    package = griffe.load("rollgen", search_paths=[DOCS.parent], try_relative_path=False)
    for name in NAMES:
        module, _, short = f"rollgen.{name}".rpartition(".")
        home = inspect.getmodule(getattr(rollgen.ops if module.endswith("ops") else rollgen, short))
        assert home is not None
        found = package[f"{home.__name__.removeprefix('rollgen.')}.{short}"]
        yield f"\n## rollgen.{name}\n\n{code(signature(found))}{docstring(found)}"
        yield from members(found)
        yield from result(package, found)


def signature(found: griffe.Object) -> str:
    """Of a function, or of a class as it is made; one argument a line where one line would be too long."""
    if isinstance(found, griffe.Class):
        maker = found.members.get("__init__")
        if not isinstance(maker, griffe.Function) or maker.lineno is None or "dataclass" in found.labels:
            return f"class {found.name}"
        return call(found.name, maker, "")
    assert isinstance(found, griffe.Function)
    return call(found.name, found, f" -> {found.returns}" if found.returns else "")


def call(name: str, function: griffe.Function, result: str) -> str:
    parameters = [parameter for parameter in function.parameters if parameter.name not in ("self", "cls")]
    texts = [argument(parameter) for parameter in parameters]
    named = [number for number, each in enumerate(parameters) if each.kind is griffe.ParameterKind.keyword_only]
    if named and not any(each.kind is griffe.ParameterKind.var_positional for each in parameters):
        texts.insert(named[0], "*")
    line = f"{name}({', '.join(texts)}){result}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){result}"


def argument(parameter: griffe.Parameter) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    text = f"{stars.get(parameter.kind, '')}{parameter.name}"
    text += f": {parameter.annotation}" if parameter.annotation else ""
    return text if parameter.default is None or parameter.kind in stars else f"{text} = {parameter.default}"


def members(found: griffe.Object) -> Iterator[str]:
    """The attributes of a class as one list, then its methods."""
    if not isinstance(found, griffe.Class):
        return
    public = [member for member in found.members.values() if not member.name.startswith("_") and not member.is_alias]
    if found.name == "RunConfig":
        yield "\n" + "".join(starmap(setting, rollgen.RunConfig.model_fields.items()))
    elif attributes := [member for member in public if isinstance(member, griffe.Attribute)]:
        yield "\n" + "".join(map(attribute, attributes))
    for method in public:
        if isinstance(method, griffe.Function):
            yield f"\n### {found.name}.{method.name}\n\n{code(signature(method))}{docstring(method)}"


def result(package: griffe.Object, found: griffe.Object) -> Iterator[str]:
    """What a function returns, where that is a class of rollgen without a section of its own."""
    path = found.returns.canonical_path if isinstance(found, griffe.Function) and found.returns else ""
    if path.startswith("rollgen.") and path.rpartition(".")[2] not in NAMES:
        returned = package[path.removeprefix("rollgen.")]
        yield f"\n### {returned.name}\n{docstring(returned)}"
        yield from members(returned)


def setting(name: str, field: FieldInfo) -> str:
    default = "" if field.is_required() else f" = {field.get_default(call_default_factory=True)!r}"
    kind = field.annotation if get_args(field.annotation) else getattr(field.annotation, "__name__", field.annotation)
    return f"- `{name}: {kind}{default}`. {field.description}\n".replace("typing.", "")


def attribute(found: griffe.Attribute) -> str:
    kind = f": {found.annotation}" if found.annotation else ""
    return (
        f"- `{found.name}{kind}`" + (f". {' '.join(found.docstring.value.split())}" if found.docstring else "") + "\n"
    )


def code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def docstring(found: griffe.Object) -> str:
    return f"\n{found.docstring.value}\n" if found.docstring else ""


PAGES: dict[str, Callable[[], Iterator[str]]] = {"cli.md": command_line, "python.md": python_names}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
