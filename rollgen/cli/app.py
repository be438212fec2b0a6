"""The `rollgen` command: parse, then import, call, print. No logic lives here.

Data goes to stdout; logs, bars and errors to stderr. An error is one plain line, `rollgen: error: what, and the fix`.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

import typer
from typer.exceptions import TyperException

from rollgen import __version__
from rollgen.cli.compact import compact
from rollgen.cli.export import export
from rollgen.cli.generate import generate
from rollgen.cli.help import PlainCommand, PlainGroup
from rollgen.cli.inspect import inspect
from rollgen.cli.merge import merge
from rollgen.cli.repair import repair
from rollgen.cli.score import score
from rollgen.cli.status import status
from rollgen.cli.verify import verify
from rollgen.errors import EXIT_CODES_HELP, RollgenError, UsageError

app = typer.Typer(
    name="rollgen",
    cls=PlainGroup,
    help="Rollout datasets that keep the sampling mask of every token.",
    epilog=EXIT_CODES_HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (generate, inspect, status, score, export, verify, repair, compact, merge):
    app.command(cls=PlainCommand, epilog=EXIT_CODES_HELP)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollgen {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    pass


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a command as Ctrl-C does: with one line, and everything is left in order."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _terminate(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:  # of a terminal that goes it comes twice, from the kernel and from the shell
        signal.signal(number, signal.SIG_IGN)
    raise _Terminated(number)


def main() -> None:
    """Console entry point: run the command and exit with the code that `errors.py` documents."""
    arguments = sys.argv[1:]
    try:
        signal.signal(signal.SIGTERM, _terminate)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(signal.SIGHUP, _terminate)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # where it is not UTF-8: escapes, not a traceback
        command = typer.main.get_command(app)
        _check_arguments(arguments)
        # What `app()` does, but for its own ways with broken pipes and Ctrl-C.
        with command.make_context("rollgen", [*arguments] or ["--help"]) as context:
            code = command.invoke(context)
        if sys.stdout is not None:  # it may have been closed before Python started
            sys.stdout.flush()
    except typer.Exit as stop:
        code = stop.exit_code if arguments else UsageError.exit_code  # nothing was asked: that shows help too
    except TyperException as error:
        code = _fail(error.format_message() if hasattr(error, "format_message") else str(error), 2)
    except RollgenError as error:
        code = _fail(str(error), error.exit_code)
    except _Terminated as stop:
        code = _fail("interrupted", 128 + stop.number)
    except KeyboardInterrupt:
        code = _fail("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (`| head`) went away: not an error
        code = 0
    except MemoryError:
        code = _fail("out of memory; give this process more, or work on fewer or smaller files", 1)
    except OSError as error:
        code = _fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)
    sys.exit(code)


def _check_arguments(arguments: list[str]) -> None:
    """Raise UsageError for bytes that are no text: they could be named in no file of a dataset."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{argument}: not UTF-8; use (or rename the file to) a name that is") from None


def _fail(message: str, code: int) -> int:
    from rollgen.inert import LINE, brief

    lines = message.split("\n") if code == UsageError.exit_code else [message]  # several bad rows are a line each
    for line in filter(None, lines):  # none: help was shown
        print(f"rollgen: error: {brief(line, LINE)}", file=sys.stderr)
    return code
