"""Command-line options made from `RunConfig`: each field is described once, there.

Values arrive as text and are validated by RunConfig together with the config file and the environment, so a wrong value
gets the same message wherever it comes from. An option that is not given is None and leaves the others' value alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from rollgen.config import RunConfig, field_key
from rollgen.errors import UsageError

DatasetPlace = Annotated[str, typer.Argument(help="Dataset directory.", metavar="DIR", show_default=False)]
"""What `dataset_directory` takes: a URL that has become a path has lost a slash."""
_PAIRS = ("sampling_arg", "engine_arg")
"""Mappings that are given as KEY=VALUE, again and again; the other one is a JSON object."""
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


def with_config_options(command: Callable[..., int]) -> Callable[..., int]:
    """Replace the command's `**options` by one keyword option for each field of RunConfig."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    generated = [_parameter(name, field) for name, field in RunConfig.model_fields.items()]
    parameters = [*own, *generated]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    return command


def dataset_directory(place: str) -> Path:
    """The directory that a path or a `file://` URL names. Raises UsageError for what is no directory at all."""
    from rollgen.remote.objects import is_url, local_path

    if is_url(place):
        raise UsageError(
            f"{place}: is in object storage; copy it here (for S3: `aws s3 sync URL DIRECTORY`), and give the copy"
        )
    directory = local_path(place)
    try:
        is_there = directory.is_dir()
    except OSError as error:  # a name that is too long, a permission
        raise UsageError(f"{place}: cannot be read: {error.strerror or error}") from None
    if not is_there:
        raise UsageError(f"{place}: not a directory; name the one that holds rollgen.json")
    return directory


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were on the command line."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    key = field_key(name)
    repeatable = isinstance(field.default, tuple) or name in _PAIRS
    is_switch = field.annotation in (bool, bool | None)
    kind = list[str] | None if repeatable else bool | None if is_switch else str | None
    flag = "--" + name.replace("_", "-")
    flags = key.flags or ((f"{flag}/--no-{name.replace('_', '-')}",) if is_switch else (flag,))
    option = typer.Option(
        *flags,
        help=_help(field),
        metavar=None if is_switch else _metavar(name, field),
        rich_help_panel=key.panel,
        show_default=False,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _help(field: FieldInfo) -> str:
    is_told = field.default is None or isinstance(field.default, bool | tuple | dict)  # or there is none
    return f"{field.description}" if is_told else f"{field.description} [{field.default}]"


def _metavar(name: str, field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if isinstance(field.default, dict):
        return "KEY=VALUE" if name in _PAIRS else "JSON"
    candidates = (annotation, *get_args(annotation))
    return next((_METAVARS[kind] for kind in candidates if kind in _METAVARS), "TEXT")
