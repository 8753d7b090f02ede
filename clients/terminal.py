"""Common parts of the commands of both distributions: exit codes, standard streams, signals, files, progress display."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import errno
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer
    from rich.progress import Progress, TaskID


class CommandError(Exception):
    """An invalid option, argument or file. The message is one line that names the problem and its solution."""


def print_status(line: str) -> None:
    """Print a line on standard error. A failure, such as a full disk or a closed pipe, is ignored."""
    if sys.stderr is None:  # print would take standard output
        return
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that was closed at the start, as by `2>&-`.

    Otherwise the next file or socket would get its number, and users of the stream would read or write that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null == number:
            os.set_inheritable(null, True)
        elif not _is_open(number):
            os.dup2(null, number)
        setattr(sys, name, os.fdopen(null, mode))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def is_output_closed(error: OSError) -> bool:
    """Whether an error means that standard output is a closed pipe or a closed terminal."""
    if isinstance(error, BrokenPipeError):
        return True
    if error.errno != errno.EIO or sys.stdout is None:
        return False
    try:
        os.get_terminal_size(sys.stdout.fileno())
    except OSError as refused:  # ENOTTY if the error came from a file
        return refused.errno == errno.EIO
    return False


def discard_output() -> None:
    """Redirect standard output to /dev/null, so that the final flush does not fail."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stderr_is_terminal() -> bool:
    """Whether standard error is a terminal. The host of a library may have no standard error."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event, received: list[signal.Signals]) -> Iterator[None]:
    """Set `stop` and append to `received` at the first ctrl-C or SIGTERM; a second one ends the program."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def receive(number: signal.Signals) -> None:
        received.append(number)
        stop.set()
        restore()

    def receive_in_loop(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(receive, signal.Signals(number))

    for number in before:
        try:
            loop.add_signal_handler(number, receive, number)
        except NotImplementedError:  # on Windows
            signal.signal(number, receive_in_loop)
    try:
        yield
    finally:
        restore()


def check_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path] | None = None) -> None:
    """Raise CommandError for a file that cannot be written, and for two options with the same file.

    outputs: the file of each option, None if it was not given. inputs: files that are read, which no output may replace.
    """
    taken = {path.resolve(): option for option, path in (inputs or {}).items()}
    for option, path in outputs.items():
        if path is None:
            continue
        target = path.resolve()
        if target.is_dir():
            raise CommandError(f"cannot write {option} {path}: it is a directory, give the name of a file")
        if not target.parent.is_dir():
            raise CommandError(f"cannot write {option} {path}: {target.parent} is not a directory")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise CommandError(f"cannot write {option} {path}: no permission")
        if target in taken:
            raise CommandError(f"{taken[target]} and {option} are both {path}: give each its own file")
        taken[target] = option


def write_output(path: Path, text: str) -> None:
    """Write a file. Raises CommandError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from None


def option(help: str, *names: str, **more: Any) -> Any:
    """An option of a command, by default under the name of its parameter. more: of `typer.Option`."""
    import typer

    return typer.Option(*names, help=help, **more)


def version_option(line: str) -> Any:
    """The option --version or -V, which prints the line and ends the program."""
    import typer

    def print_version(requested: bool) -> None:
        if requested:
            print(line)
            raise typer.Exit

    return typer.Option("--version", "-V", is_eager=True, callback=print_version, help="Print the version.")


# Private: set by a Windlass command that starts a server, so that the command can display the progress. Each update is then a
# line of this name followed by [stage, done, total] as JSON.
PROGRESS_VARIABLE = "_WINDLASS_PROGRESS"


class LoadingDisplay:
    """A progress bar on a terminal; elsewhere one line per loading stage.

    The instance is the callback `(stage, done, total)`. `stop` removes the bar and may be called twice. first: a line to print
    before the first update.
    """

    def __init__(self, terminal: bool | None = None, first: str | None = None) -> None:
        self._terminal = stderr_is_terminal() if terminal is None else terminal
        self._first = first
        self._stage: str | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.begin()
        if PROGRESS_VARIABLE in os.environ:
            print_status(PROGRESS_VARIABLE + json.dumps([stage, done, total]))
        elif not self._terminal:
            if stage != self._stage:
                print_status(f"{stage} ...")
        else:
            progress = self._progress or self._start()
            if stage != self._stage:
                if self._task is not None:
                    progress.remove_task(self._task)
                self._task = progress.add_task(stage, total=total)
            if self._task is not None:
                progress.update(self._task, completed=done, total=total)
        self._stage = stage

    def begin(self) -> None:
        """Print the first line, unless it has been printed."""
        if self._first is not None:
            print_status(self._first)
            self._first = None

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._progress.start()
        return self._progress

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


_SWITCH_PREFIX = re.compile(r"^--(no-|disable-)?(enable-)?")
_UNKNOWN_COMMAND = re.compile(r"No such command '(?P<name>[^']*)'")
_CUTOFF = 0.75  # common characters: "prot" is similar to "port", "ctx-size" is not similar to "block-size"

# Errors that only writing raises.
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_app(
    app: typer.Typer,
    name: str,
    arguments: Sequence[str] | None,
    errors: tuple[type[Exception], ...] = (),
    translate: Callable[[str], str] = str,
    find_replacement: Callable[[Any, str], str | None] = lambda context, name: None,
) -> int:
    """Run a command and return its exit code; errors are one line on standard error.

    name: of the program in its help. arguments: None for those of the process. errors: classes that are user errors like
    CommandError, with exit code 2. translate: applied to the messages of user errors. find_replacement: given the context of a
    command and an unknown option or command, the advice for users of other programs, or None.
    """
    import typer

    # Older typers use click's exceptions, newer ones their own copy of them.
    click_error: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # not every encoding has every character
    given = None if arguments is None else list(arguments)
    user_errors: tuple[type[Exception], ...] = (CommandError, *errors)
    try:
        code = app(args=given, prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, because errors can no longer be reported at the exit of the interpreter
        return code if isinstance(code, int) else 0
    except click_error as error:
        return _usage_error(error, sys.argv[1:] if given is None else given, find_replacement)
    except user_errors as error:
        return _print_error(translate(str(error)))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        if is_output_closed(error):
            discard_output()
            return 1  # the exit code of click for a closed pipe
        if error.errno not in _DISK_FULL_ERRNOS:
            raise
        discard_output()
        return _print_error(f"cannot write: {error.strerror}")


def _usage_error(error: Any, arguments: Sequence[str], find_replacement: Callable[[Any, str], str | None]) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # the help page
        return 2
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    message: str = error.format_message()
    if type(error).__name__ == "NoSuchOption":
        name = error.option_name
        if len(name) == 2:  # click reports -n for -ngl
            name = next((given for given in arguments if given.startswith(name)), name)
        suggestion = (
            find_replacement(context, name) or _suggest_argument(context, name) or _suggest_option(context, name)
        )
        message = f"No such option: {name}" + (f": {suggestion}" if suggestion else "")
    elif (absent := _UNKNOWN_COMMAND.match(message)) and (suggestion := find_replacement(context, absent["name"])):
        message = f"{absent[0]}: {suggestion}"
    return _print_error(message.rstrip(".") + hint)


def _suggest_argument(context: Any, name: str) -> str | None:
    """Advice for an argument of the command that was given like an option."""
    for parameter in context.command.params:
        if parameter.param_type_name == "argument" and parameter.name == name.removeprefix("--").replace("-", "_"):
            return f"give it without an option, as {parameter.metavar or parameter.name.upper()}"
    return None


def _suggest_option(context: Any, name: str) -> str | None:
    """The most similar option, as a question. An option that disables something is only replaced by another such one."""
    off = name.startswith(("--no-", "--disable-"))
    options = [
        option
        for parameter in context.command.params
        if not getattr(parameter, "hidden", False)
        for option in (*parameter.opts, *parameter.secondary_opts)
    ]
    known = {
        _SWITCH_PREFIX.sub("", option): option
        for option in options
        if option.startswith("--") and option.startswith("--no-") == off
    }
    near = difflib.get_close_matches(_SWITCH_PREFIX.sub("", name)[:64], known, n=1, cutoff=_CUTOFF)
    return f"did you mean {known[near[0]]}?" if near else None


def _print_error(message: str) -> int:
    print_status("error: " + " ".join(message.split()))
    return 2
