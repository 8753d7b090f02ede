"""The jinja2 sandbox in which chat templates run.

Responsible for the helpers templates expect (byte for byte those of transformers) and for bounding time and text. Knows
nothing of messages. Not every way to ask for memory can be foreseen: the usual ones (operators, loops, padding, joining)
are checked before they allocate.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class LimitError(TemplateError):
    """A render took too long or built too much text."""


class Budget:
    """What one render may still spend: seconds, and characters of any one text. Checked from inside the template."""

    __slots__ = ("deadline", "max_chars", "seconds", "ticks")

    def __init__(self, max_chars: int, seconds: float) -> None:
        self.max_chars = max_chars
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks & 255 == 0 and time.monotonic() > self.deadline:
            raise LimitError(f"rendering the chat template took more than {self.seconds:g} s")

    def check_size(self, size: float) -> None:
        if size > self.max_chars:
            raise LimitError(f"the chat template builds more than {self.max_chars} characters of text")


# Per thread and per task: renders of one template may run side by side.
current_budget: ContextVar[Budget | None] = ContextVar("chat_template_budget", default=None)


def _metered(items: Iterable[Any]) -> Iterator[Any]:
    budget = current_budget.get()
    for item in items:
        if budget is not None:
            budget.tick()
        yield item


def _sized(text: Any) -> Any:
    budget = current_budget.get()
    if budget is not None and isinstance(text, str):
        budget.check_size(len(text))
    return text


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training masks; when serving it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` that refuses underscore names, which could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=1)` must work
        self, positional = args[0], args[1:]
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"chat templates cannot store the underscore name {name!r} on a namespace")


class _Dict:
    """`dict` as templates may use it: callable, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with metered loops and size checks before text is multiplied, padded or joined."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "metered_", [], [], None, None, lineno=loop.lineno)
        _wrap_concatenations(tree)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = current_budget.get()
        if budget is not None:
            budget.tick()
            budget.check_size(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # names as in jinja2
        budget = current_budget.get()
        if budget is not None:
            budget.tick()
            method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
            receiver = getattr(method, "__self__", None)
            if isinstance(receiver, str):
                budget.check_size(_call_size(method.__name__, receiver, [*args, *kwargs.values()]))
        return super().call(__context, __obj, *args, **kwargs)


def _wrap_concatenations(node: nodes.Node) -> None:
    """Put a size check around every `a ~ b`, which jinja2 joins without asking the environment."""
    for child in node.iter_child_nodes():
        _wrap_concatenations(child)
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, field, _check_size_of(value))
        elif isinstance(value, list):
            value[:] = [_check_size_of(item) if isinstance(item, nodes.Concat) else item for item in value]


def _check_size_of(node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, "sized_", [], [], None, None, lineno=node.lineno)


def _result_size(operator: str, left: Any, right: Any) -> float:
    """An upper bound of the length of `left operator right`, 0 where it cannot be large."""
    if operator == "+":
        if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            return len(left) + len(right)
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, list, tuple)) and isinstance(times, int):
                return len(items) * max(times, 0)
        if isinstance(left, int) and isinstance(right, int):
            return (left.bit_length() + right.bit_length()) / 3  # decimal digits, from above
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and right > 0:
            return left.bit_length() * right
    elif isinstance(left, str):
        return _format_size(left, right if isinstance(right, tuple) else (right,))
    return 0


def _format_size(text: str, args: Iterable[Any]) -> float:
    """A width in a format, or an argument that a `*` takes as one, can ask for any length."""
    numbers = [int(run[:12]) for run in re.findall(r"[0-9]+", text)]
    return max([*numbers, *(abs(arg) for arg in args if isinstance(arg, int))], default=0)


def _call_size(name: str, text: Any, args: list[Any]) -> float:
    """An upper bound of what a string method or filter of this name builds, 0 where it cannot be large."""
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        return max((arg for arg in args if isinstance(arg, int)), default=0)
    if name == "indent":
        widths = [arg if isinstance(arg, int) else len(arg) for arg in args if isinstance(arg, (int, str))]
        return max(widths, default=0) * (str(text).count("\n") + 1)
    if name in ("format", "format_map"):
        return _format_size(str(text), args)
    if name == "replace" and len(args) >= 2:
        return str(text).count(str(args[0])) * len(str(args[1]))
    if name == "join" and args:
        items, separator = (args[0], text) if isinstance(text, str) else (text, args[0])
        return len(items) * len(str(separator)) if isinstance(items, Sized) else 0
    return 0


def _checked_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 1 if hasattr(original, "jinja_pass_arg") else 0  # jinja2 hands some filters a context first

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        if budget is not None and len(args) > skipped:
            budget.tick()
            budget.check_size(_call_size(name, args[skipped], [*args[skipped + 1 :], *kwargs.values()]))
        return original(*args, **kwargs)

    return checked


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def sandboxed_environment() -> jinja2.Environment:
    """An environment with everything chat templates expect, as transformers sets it up."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        cache_size=0,
    )
    for name in ("center", "indent", "format", "replace", "join"):
        environment.filters[name] = _checked_filter(name, environment.filters[name])
    environment.filters.update(tojson=_tojson, metered_=_metered, sized_=_sized)
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment
