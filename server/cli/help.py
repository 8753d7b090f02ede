"""Help pages of commands, short and full, and a hint for refused keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from windlass.server.config.server_options import OPTIONS

if TYPE_CHECKING:
    from windlass.clients import APIError

# Parameters of the short help page in addition to a command's own options.
COMMON_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.main)

_HELP_ALL = "windlass.help_all"


class BriefHelp(TyperCommand):
    """A command with a short `--help`, and with configuration keys and expert variables as parameters without a flag."""

    def make_parser(self, ctx: Any) -> Any:
        """The parser of the command line, which knows no parameter without a flag."""
        params = self.params
        self.params = [each for each in params if not getattr(each, "hidden", False)]
        try:
            return super().make_parser(ctx)
        finally:
            self.params = params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        without_flag = [each for each in self.params if getattr(each, "hidden", False)]
        rare, named, epilog = [], [], self.epilog
        if ctx.meta.get(_HELP_ALL):
            variables = ", ".join(str(each.envvar) for each in without_flag)
            self.epilog = (
                f"Environment variables without an option: {variables}. docs/reference/options.md describes them."
            )
        else:
            panels = [
                each for each in self.params if getattr(each, "rich_help_panel", None) and each not in without_flag
            ]
            rare = [each for each in panels if each.name not in COMMON_OPTIONS]
            named = [each for each in self.params if getattr(each, "show_envvar", False)]
            self.epilog = (
                f"--help-all shows {len(rare)} more, and the environment variable of each, such as WINDLASS_DTYPE."
            )
        try:
            for parameter in rare:
                parameter.hidden = True  # type: ignore[attr-defined]
            for parameter in named:
                parameter.show_envvar = False  # type: ignore[attr-defined]
            super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
            for parameter in rare:
                parameter.hidden = False  # type: ignore[attr-defined]
            for parameter in named:
                parameter.show_envvar = True  # type: ignore[attr-defined]


def help_all_option() -> Any:
    """The option --help-all of a `BriefHelp` command."""

    def show(ctx: typer.Context, asked: bool) -> None:
        if asked:
            ctx.meta[_HELP_ALL] = True
            print(ctx.get_help(), end="")
            raise typer.Exit

    return typer.Option(
        "--help-all",
        is_eager=True,
        callback=show,
        help="Show all options, with their environment variables, and exit.",
    )


def with_key_hint(error: APIError) -> str:
    """The message of an error on one line, with the option to use if the key was refused."""
    hint = ": give one with --api-key" if error.status == 401 else ""
    return " ".join(error.message.split()) + hint
