"""Runs a typer app as a command: an exit code comes back, and every error a person can cause is one line."""

from __future__ import annotations

import difflib
import errno
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from windlass.clients.terminal.errors import CommandError
from windlass.clients.terminal.lines import say
from windlass.clients.terminal.streams import leave_output, nobody_reads, open_standard_streams

# Older typers use click's exceptions, newer ones their own copy of them.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_WHETHER = re.compile(r"^--(no-|disable-)?(enable-)?")
_NO_COMMAND = re.compile(r"No such command '(?P<name>[^']*)'")
_CUTOFF = 0.75  # share of characters that agree: "prot" is near "port", "ctx-size" is not near "block-size"
# What only writing meets.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_app(
    app: typer.Typer,
    name: str,
    arguments: Sequence[str] | None,
    errors: tuple[type[Exception], ...] = (),
    words: Callable[[str], str] = str,
    elsewhere: Callable[[Any, str], str | None] = lambda context, name: None,
) -> int:
    """Run one command and return the exit code; errors are one line on standard error.

    name: what the program is called in its help. arguments: None for those of the process. errors: classes whose
    messages are lines for the person who typed the command, beside CommandError; 2 is their exit code.
    words: puts such a message into the program's own words. elsewhere: what to say of an option or a command that the command
    (of this context) has not, where other programs have it.
    """
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # not every console's encoding has every sign
    given = None if arguments is None else list(arguments)
    mendable: tuple[type[Exception], ...] = (CommandError, *errors)
    try:
        code = app(args=given, prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # else the interpreter meets what is wrong with it when nobody can tell any more
        return code if isinstance(code, int) else 0
    except _ClickError as error:
        return _usage_error(error, sys.argv[1:] if given is None else given, elsewhere)
    except mendable as error:
        return _fail(words(str(error)))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        if nobody_reads(error):
            leave_output()
            return 1  # as click ends where it meets a closed pipe first
        if error.errno not in _NO_ROOM:
            raise
        leave_output()
        return _fail(f"cannot write: {error.strerror}")


def _usage_error(error: Any, arguments: Sequence[str], elsewhere: Callable[[Any, str], str | None]) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # the help page
        return 2
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    message: str = error.format_message()
    if type(error).__name__ == "NoSuchOption":
        name = error.option_name
        if len(name) == 2:  # of -ngl, it is -n that there is not
            name = next((given for given in arguments if given.startswith(name)), name)
        meant = elsewhere(context, name) or _as_argument(context, name) or _nearest_option(context, name)
        message = f"No such option: {name}" + (f": {meant}" if meant else "")
    elif (absent := _NO_COMMAND.match(message)) and (meant := elsewhere(context, absent["name"])):
        message = f"{absent[0]}: {meant}"
    return _fail(message.rstrip(".") + hint)


def _as_argument(context: Any, name: str) -> str | None:
    """That an argument of the command is meant: it stands without its name."""
    for parameter in context.command.params:
        if parameter.param_type_name == "argument" and parameter.name == name.removeprefix("--").replace("-", "_"):
            return f"give it without an option, as {parameter.metavar or parameter.name.upper()}"
    return None


def _nearest_option(context: Any, name: str) -> str | None:
    """The nearest option in a question. Only what switches off is near to one that does: never --no-x to --enable-x."""
    off = name.startswith(("--no-", "--disable-"))
    options = [
        option for parameter in context.command.params for option in (*parameter.opts, *parameter.secondary_opts)
    ]
    known = {
        _WHETHER.sub("", option): option
        for option in options
        if option.startswith("--") and option.startswith("--no-") == off
    }
    near = difflib.get_close_matches(_WHETHER.sub("", name)[:64], known, n=1, cutoff=_CUTOFF)
    return f"did you mean {known[near[0]]}?" if near else None


def _fail(message: str) -> int:
    say("error: " + " ".join(message.split()))
    return 2
