"""The help texts, as plain text: option names are whole at any width, on a terminal as in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer._click.core import Context
    from typer._click.formatting import HelpFormatter

_NAMES_WIDTH = 26
"""Columns; the description of a longer name begins on the next line."""


class PlainGroup(TyperGroup):
    """All commands."""

    def get_help_option_names(self, ctx: Context) -> list[str]:
        """As they were given: of a set, as the library has them, they come in another order in each process."""
        return list(ctx.help_option_names)


class PlainCommand(TyperCommand):
    """A command whose help lists its options by panel."""

    def get_help_option_names(self, ctx: Context) -> list[str]:
        """See PlainGroup."""
        return list(ctx.help_option_names)

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """See `click.Command`; so below."""
        arguments = [param.display_name_raw for param in self.get_params(ctx) if isinstance(param, TyperArgument)]
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Arguments first, then the panels in the order of their first options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            if isinstance(param, TyperArgument):
                sections["Arguments"].append((param.display_name_raw, param.help or ""))
            elif isinstance(param, TyperOption):
                sections.setdefault(param.rich_help_panel or "Options", []).append((_names(param), param.help or ""))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=_NAMES_WIDTH)


def _names(option: TyperOption) -> str:
    """`--n, --num-samples INTEGER`, or `--chat / --no-chat`."""
    names = " / ".join(", ".join(spellings) for spellings in (option.opts, option.secondary_opts) if spellings)
    return names if option.is_flag else f"{names} {option.metavar or 'TEXT'}"
