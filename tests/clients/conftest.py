"""What tests of this folder share: a server with the bundled model, started once, and which client a test goes through."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from helpers.real_server import RealServer, serve


@pytest.fixture(scope="session")
def demo_server() -> Iterator[RealServer]:
    profiles = {"long": {"rope_type": "yarn", "factor": 2.0}, "grow": {"rope_type": "dynamic", "factor": 4.0}}
    options = [
        word for name, scaling in profiles.items() for word in ("--rope-profile", f"{name}={json.dumps(scaling)}")
    ]
    # Answers do not end by chance.
    options += ["--override-generation-config", json.dumps({"temperature": 0})]
    with serve("--kv-cache-memory", "64MiB", "--max-model-len", "1024", *options) as running:
        yield running


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param
