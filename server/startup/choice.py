"""Which model a command works on: the one that was named, else the first one, else the bundled one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from windlass.clients.terminal.lines import say
from windlass.engine.errors import LoadError
from windlass.server.options.engine import EngineOptions
from windlass.server.startup.catalogue.folder import is_file_of
from windlass.server.startup.catalogue.known import DEMO, KNOWN, SMOLLM2
from windlass.server.startup.gguf_directory import source_stem
from windlass.server.startup.hub import bundled_model, known_model, resolve_model

FIRST_MODEL = SMOLLM2


def choose_model(given: str | None) -> tuple[str, Path]:
    """What to call the model in the API, and its directory.

    given: as `resolve_model` takes it. None: smollm2, pulled where it is not here, or the bundled model where it cannot be
    had, with one line on standard error that says why. Raises LoadError.
    """
    if given is not None:
        path = resolve_model(given)
        return _name_of(given, path), path
    try:
        return FIRST_MODEL.name, known_model(FIRST_MODEL)
    except LoadError as error:
        say(f"note: this is the bundled model ({DEMO.about}), since {error}")
        return DEMO.name, bundled_model()


def known_sampling(given: str | None, name: str) -> Mapping[str, float]:
    """What the authors of a known model recommend. given, name: what was asked for, and what `choose_model` calls it.

    A file that is given by its path is known by its content.
    """
    here = None if given is None else Path(given).expanduser()
    if here is not None and here.exists():  # a folder wins over a name
        return next((model.sampling for model in KNOWN.values() if is_file_of(model, here)), {})
    return KNOWN[name].sampling if name in KNOWN else {}


def with_draft_model(options: EngineOptions) -> EngineOptions:
    """The options with the directory of the draft model in place of its name, if they name one. Raises LoadError."""
    if options.speculative_model is None:
        return options
    try:
        return replace(options, speculative_model=str(resolve_model(options.speculative_model)))
    except LoadError as error:
        raise LoadError(f"--speculative-model: {error}") from None


def _name_of(given: str, path: Path) -> str:
    """A hub id or a known name as given, since the directory behind it is named by a hash; else that of the directory
    or the GGUF file."""
    local = Path(given).expanduser()
    if not local.exists():
        return given
    return source_stem(path) or path.name
