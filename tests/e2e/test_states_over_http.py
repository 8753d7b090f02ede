"""A real server of a model whose layers carry states: turns of a chat, samples, a stream beyond its context, what is held."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.real_server import serve
from helpers.tiny_models import make_model

import windlass
from windlass.clients import BadRequestError, Client

DEMO = Path(windlass.__file__).parent / "models" / "demo"
QUESTION = "Tell me a long story about a horse and its friends, about the sea, the moon and the stars above them. " * 2


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    vocabulary = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    model = make_model("qwen3_5", tmp_path_factory.mktemp("states"), vocab_size=vocabulary)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, model)
    with (
        serve("--kv-cache-memory", "16MiB", "--max-num-seqs", "6", model=model) as server,
        Client(server.url) as client,
    ):
        yield client


def test_turns_samples_and_a_stream_beyond_its_context(client: Client) -> None:
    greedy = {"temperature": 0, "ignore_eos": True}
    message = {"role": "user", "content": QUESTION}
    first = client.chat([message], max_tokens=40, **greedy)
    assert first.usage is not None
    again = client.chat([message], max_tokens=40, **greedy)
    assert again.text == first.text and again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == (first.usage.prompt_tokens - 1) // 16 * 16
    samples = client.chat([message], max_tokens=12, n=3, temperature=1.0, seed=5, ignore_eos=True)
    assert len({choice.message.content for choice in samples.choices}) == 3
    with client.chat([message], max_tokens=400, context_overflow="shift", stream=True, **greedy) as stream:
        final = stream.get_final()
    assert final.usage is not None and final.usage.completion_tokens == 400
    assert final.text.startswith(first.text)


def test_what_is_held_is_shown_and_what_cannot_be_is_refused(client: Client) -> None:
    groups = httpx.get(f"{client.base_url}/v1/cache").json()["groups"]
    assert [(group["states"], group["window"]) for group in groups] == [(False, None), (True, None)]
    assert sum(groups[1]["held"]) == 0 < sum(groups[1]["idle"])
    assert "carry a state" in client.models()[0].context["reuse_refusal"]
    with pytest.raises(BadRequestError, match="cache_reuse: layers of this model carry a state"):
        client.chat([{"role": "user", "content": QUESTION}], max_tokens=4, cache_reuse=32)
