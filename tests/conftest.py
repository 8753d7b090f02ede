"""What tests of several folders share: an app over a scripted engine, on a real port, started once for a module."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import shutil
import ssl
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from helpers.crashes import CRASHES, FOLDER
from helpers.device import PLACE

if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is imported, by whichever library does so first: without a GPU its programs are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

for name, value in (PLACE | CRASHES).items():
    os.environ.setdefault(name, value)

# A test fails for what it tests: not because a machine is busy, and not for an example that came up by chance. Others are
# looked for with --hypothesis-profile=unseeded.
hypothesis.settings.register_profile("unseeded", deadline=None)
hypothesis.settings.register_profile("windlass", deadline=None, derandomize=True)
hypothesis.settings.load_profile("windlass")

if TYPE_CHECKING:
    from helpers.live_server import Live
    from helpers.real_server import RealServer

# Files with single tests of minutes: begun first, so that no process is left alone with one at the end.
_LONG = frozenset({"test_scheduler_machine.py", "test_soak.py", "test_replicas_soak.py", "test_simulation.py"})


def pytest_unconfigure() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: to look among it for garbage, then and in each test, takes a tenth of all time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONG)


def pytest_collection_finish() -> None:
    """pytest gives its handlers to, and takes them from, each logger that does not hand on to the root, six times a test.

    torch has dozens of them, and none of them has to keep anything from the root here.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def one_set_of_authorities() -> Iterator[None]:
    """HTTP clients share what they trust by default. Each would read the certificates of all authorities anew, which takes longer
    than most of what they ask, and a server that is waited for is asked many times a second."""
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
    from helpers.live_server import live_server  # the app takes a while to import, and most tests need none

    with live_server() as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Live:
    """That server, its engine as new."""
    shared.engine.reset()
    return shared


@pytest.fixture(scope="session")
def demo_server() -> Iterator[RealServer]:
    """A server with the bundled model, started once per test process."""
    from helpers.real_server import serve

    profiles = {"long": {"rope_type": "yarn", "factor": 2.0}, "grow": {"rope_type": "dynamic", "factor": 4.0}}
    options = [
        word for name, scaling in profiles.items() for word in ("--rope-profile", f"{name}={json.dumps(scaling)}")
    ]
    # Answers do not end by chance.
    options += ["--override-generation-config", json.dumps({"temperature": 0})]
    with serve("--kv-cache-memory", "64MiB", "--max-model-len", "1024", *options) as running:
        yield running
