"""Help texts of commands: a short and a full page, and a hint for refused keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from windlass.clients import APIError

# By parameter. A command's own options are always shown.
COMMON_OPTIONS = (
    "dtype",
    "quantization",
    "served_model_name",
    "max_model_len",
    "kv_cache_memory",
    "context_overflow",
    "max_num_seqs",
    "deterministic",
    "threads",
    "replicas",
    "rope_scaling",
    "rope_profile",
    "rope_policy",
    "lora",
    "speculative_model",
    "speculative_mtp",
    "host",
    "port",
    "api_key",
    "api_key_file",
    "chat_template",
)

_HELP_ALL = "windlass.help_all"


class BriefHelp(TyperCommand):
    """A command whose `--help` is short. Hidden options work, and are completed, as ever."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if ctx.meta.get(_HELP_ALL):
            return super().format_help(ctx, formatter)
        rare = [p for p in self.params if getattr(p, "rich_help_panel", None) and p.name not in COMMON_OPTIONS]
        named = [p for p in self.params if getattr(p, "show_envvar", False)]
        epilog = self.epilog
        try:
            for parameter in rare:
                parameter.hidden = True  # type: ignore[attr-defined]
            for parameter in named:
                parameter.show_envvar = False  # type: ignore[attr-defined]
            self.epilog = f"--help-all shows {len(rare)} more, and the variable of each, such as WINDLASS_PORT."
            super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
            for parameter in rare:
                parameter.hidden = False  # type: ignore[attr-defined]
            for parameter in named:
                parameter.show_envvar = True  # type: ignore[attr-defined]
        return None


def help_all_option() -> Any:
    """The option --help-all, which a `BriefHelp` command has."""

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
    """The message of an error, on one line, with the option that a refused key asks for."""
    hint = ": give one with --api-key" if error.status == 401 else ""
    return " ".join(error.message.split()) + hint
