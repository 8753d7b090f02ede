"""Generation jobs for response writers without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from helpers.live_server import MODEL, toy_tokenizer

from windlass.engine.interface.request import SamplingParams
from windlass.server.config.settings import ServerSettings
from windlass.server.schemas.chat import ChatRequest


def writer_job(
    *, samples: int = 1, logprobs: int | None = None, parsing: Any = None, max_response_bytes: int = 2**20, **body: Any
) -> Any:
    """Return the fields of a `GenerationJob` that writers use. body: fields of the request."""
    state = SimpleNamespace(
        tokenizer=toy_tokenizer(),
        settings=ServerSettings(served_model_name=MODEL, max_response_bytes=max_response_bytes),
        fingerprint_with_adapter=lambda info, adapter: "fp",
    )
    return SimpleNamespace(
        state=state,
        body=ChatRequest.model_construct(**body),
        info=None,
        adapter=None,
        request_id="x",
        model_name=MODEL,
        sampling=SamplingParams(n=samples),
        logprobs=logprobs,
        parsing=parsing,
    )
