"""Variables of the environment that look like options of ours and are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windlass.engine.errors import nearest

_PREFIX = "WINDLASS_"
# What is no option: a folder, a processor's instructions, the address that clients use, a key for them.
_OTHERS = {"WINDLASS_CACHE", "WINDLASS_CPU_ISA", "WINDLASS_BASE_URL", "WINDLASS_API_KEY", "WINDLASS_CLIENT_KEY"}


def mistyped(program: Any, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each variable that no command of the program (a group of commands) reads, and the one that is near to it.

    One that is near to none is somebody else's: whoever runs a service of this name is given such variables by Kubernetes.
    """
    known = _OTHERS | set(_variables(program))
    plain = {name.removeprefix(_PREFIX): name for name in known}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known and (near := nearest(name.removeprefix(_PREFIX), plain)):
            yield name, plain[near]


def _variables(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(variable := parameter.envvar, str):
            yield variable
    for inner in getattr(command, "commands", {}).values():
        yield from _variables(inner)
