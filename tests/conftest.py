"""Tiers of the tests, and fixtures of several folders: an app over a scripted engine, and a server with the bundled model."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import shutil
import ssl
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from helpers.crashes import CRASHES, FOLDER
from helpers.device import PLACE

if not Path("/dev/nvidiactl").exists():
    # Triton reads this variable when it is first imported: without a GPU its programs are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

for name, value in (PLACE | CRASHES).items():
    os.environ.setdefault(name, value)

# Results depend neither on the load of the machine nor on chance. --hypothesis-profile=unseeded searches for new examples.
hypothesis.settings.register_profile("unseeded", deadline=None)
hypothesis.settings.register_profile("windlass", deadline=None, derandomize=True)
hypothesis.settings.load_profile("windlass")

if TYPE_CHECKING:
    from helpers.live_server import Live
    from helpers.real_server import RealServer

# Long files start first, so that no process is left alone with one at the end.
_LONG = frozenset({"test_scheduler_machine.py", "test_soak.py", "test_simulation.py"})

# `make test` runs these folders, apart from tests marked slow or soak. Triton's interpreter is slow.
_TESTS = Path(__file__).parent
_QUICK = ("unit", "kernels", "engine", "api")
_NOT_QUICK = _TESTS / "kernels" / "triton_programs"


def pytest_unconfigure() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported modules and collected tests from garbage collection, which would scan them for a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # marks are set before pytest selects by them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: defaultdict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick_cases") and not item.get_closest_marker("slow"):
            function = item.path, item.originalname if isinstance(item, pytest.Function) else item.name
            cases[function].append(item)
    for group in cases.values():
        limit = group[0].get_closest_marker("quick_cases")
        assert limit is not None
        (count,) = limit.args
        for index, item in enumerate(group):  # quick ones are spread evenly over the table
            if len(group) > count and index * count // len(group) == (index - 1) * count // len(group):
                item.add_marker("slow")
    for item in items:
        tier = item.path.relative_to(_TESTS).parts[0]
        excluded = item.get_closest_marker("slow") or item.get_closest_marker("soak")
        if tier in _QUICK and not excluded and not item.path.is_relative_to(_NOT_QUICK):
            item.add_marker("quick")
    items.sort(key=lambda item: item.path.name not in _LONG)


def pytest_collection_finish() -> None:
    """Let the dozens of loggers of torch propagate to the root logger.

    pytest adds its handlers to each logger that does not, and removes them again, six times per test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def shared_ssl_context() -> Iterator[None]:
    """Share the default SSL context among HTTP clients. Loading all root certificates takes longer than most requests."""
    with pytest.MonkeyPatch.context() as patch:
        for library in ("httpx", "httpx2"):  # openai has the second
            if transports := sys.modules.get(f"{library}._transports.default"):
                patch.setattr(transports, "create_ssl_context", _sharing(transports.create_ssl_context))
        yield


def _sharing(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    usual = functools.cache(create)

    def create_or_share(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        return usual(trust_env=trust_env) if verify is True and cert is None else create(verify, cert, trust_env)

    return create_or_share


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    from helpers.live_server import live_server  # slow to import, and not needed by most tests

    with live_server() as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Live:
    """The shared server, with its engine reset."""
    shared.reset()
    return shared


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def demo_server() -> Iterator[RealServer]:
    """A server with the bundled model, started once per test process."""
    from helpers.real_server import serve

    profiles = {"long": {"rope_type": "yarn", "factor": 2.0}, "grow": {"rope_type": "dynamic", "factor": 4.0}}
    options = [
        word for name, scaling in profiles.items() for word in ("--rope-profile", f"{name}={json.dumps(scaling)}")
    ]
    # The length of an answer does not depend on chance.
    options += ["--override-generation-config", json.dumps({"temperature": 0})]
    with serve("--kv-cache-memory", "64MiB", "--max-model-len", "1024", *options) as running:
        yield running
