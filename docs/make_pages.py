"""Write `cli.md` beside this file: the help of every command, as the command prints it 100 columns wide.

python docs/make_cli.py            write it
python docs/make_cli.py --check    exit 1, and change nothing, when it is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from rollgen.cli.app import app

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100
HEAD = """\
# The command line

What `rollgen COMMAND --help` prints. This page is made from it: `python docs/make_cli.py`.
"""


def main() -> int:
    page = "".join([HEAD, *sections()])
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
        print(f"{PAGE.name}: not what the commands print; run `make format`", file=sys.stderr)
        return 1
    return 0


def sections() -> Iterator[str]:
    """A heading and a block of text for `rollgen` itself and for each command, in their order."""
    root = typer.main.get_command(app)
    with root.make_context("rollgen", [], resilient_parsing=True, terminal_width=WIDTH) as context:
        yield section("rollgen", root.get_help(context))
        for name, command in root.commands.items():
            with command.make_context(name, [], parent=context, resilient_parsing=True, terminal_width=WIDTH) as below:
                yield section(f"rollgen {name}", command.get_help(below))


def section(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"\n## {title}\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
