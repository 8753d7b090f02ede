"""Runs a typer app as a command: an exit code comes back, and every error a person can cause is one line."""

from __future__ import annotations

import difflib
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from windlass.clients.terminal.errors import CommandError
from windlass.clients.terminal.lines import say
from windlass.clients.terminal.streams import open_standard_streams

# Older typers use click's exceptions, newer ones their own copy of them.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
# What only writing meets.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_app(
    app: typer.Typer,
    name: str,
    arguments: Sequence[str] | None,
    errors: tuple[type[Exception], ...] = (),
    words: Callable[[str], str] = str,
) -> int:
    """Run one command and return the exit code; errors are one line on standard error.

    name: what the program is called in its help. arguments: None for those of the process. errors: classes whose
    messages are lines for the person who typed the command, beside CommandError; 2 is their exit code.
    words: puts such a message into the program's own words.
    """
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # not every console's encoding has every sign
    mendable: tuple[type[Exception], ...] = (CommandError, *errors)
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # else the interpreter meets what is wrong with it when nobody can tell any more
        return code if isinstance(code, int) else 0
    except _ClickError as error:
        return _usage_error(error)
    except mendable as error:
        return _fail(words(str(error)))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # whoever reads has enough
        _leave_output()
        return 1  # as click ends where it meets this first
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _leave_output()
        return _fail(f"cannot write: {error.strerror}")


def _leave_output() -> None:
    """Nothing is left to be flushed at the end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_error(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # the help page
        return 2
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    message: str = error.format_message()
    if possible := getattr(error, "possibilities", None):
        meant = difflib.get_close_matches(error.option_name[:64], possible, n=1, cutoff=0.0)[0]
        message = f"No such option: {error.option_name}: did you mean {meant}?"
    return _fail(message.rstrip(".") + hint)


def _fail(message: str) -> int:
    say("error: " + " ".join(message.split()))
    return 2
