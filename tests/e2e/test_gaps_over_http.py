"""Gaps filled by a real engine: whatever goes with `suffix` is what the same prompt in token ids is answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from helpers.device import DEVICE
from helpers.real_server import RealServer, serve

DEMO = Path(__file__).parents[2] / "models" / "demo"
NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
# A GPU adds up alike in other steps, such as those behind a cached prompt, only under it.
EXACT = () if DEVICE == "cpu" else ("--deterministic",)
BEFORE, AFTER = "Once upon a time there was a little ", " who lived in a house near the sea."


def taught_demo(folder: Path) -> tokenizers.Tokenizer:
    """The bundled model, whose rarest tokens became those around gaps."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "*.md", "*.png"))
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    data["model"]["merges"] = data["model"]["merges"][: -len(NAMES)]
    for name, (token, index) in zip(NAMES, sorted(vocab.items(), key=lambda item: -item[1])[: len(NAMES)], strict=True):
        del vocab[token]
        vocab[name] = index
        data["added_tokens"].append({**data["added_tokens"][0], "id": index, "content": name})
    data["added_tokens"].sort(key=lambda token: token["id"])
    file.write_text(json.dumps(data), encoding="utf-8")
    return tokenizers.Tokenizer.from_file(str(file))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, tokenizers.Tokenizer]]:
    folder = tmp_path_factory.mktemp("models") / "taught"
    backend = taught_demo(folder)
    with serve("--max-num-batched-tokens", "64", *EXACT, model=folder) as server:
        yield server, backend


def post(server: RealServer, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.8, "seed": 5, "n": 3},
        {"temperature": 0.8, "seed": 5, "best_of": 3},
        {"temperature": 0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "return_token_ids": True},
        {"temperature": 0, "stop": ["."], "prompt_logprobs": 1},
        {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{4,12}"}},
    ],
)
def test_a_suffix_asks_for_what_token_ids_ask_for(
    served: tuple[RealServer, tokenizers.Tokenizer], fields: dict[str, Any]
) -> None:
    server, backend = served
    ids = backend.encode(f"{NAMES[0]}{BEFORE}{NAMES[1]}{AFTER}{NAMES[2]}").ids
    body = {"max_tokens": 12, **fields}
    by_text = post(server, "/v1/completions", prompt=BEFORE, suffix=AFTER, **body)
    by_ids = post(server, "/v1/completions", prompt=ids, **body)
    assert by_text["choices"] == by_ids["choices"] and by_text["usage"]["prompt_tokens"] == len(ids)


def test_echo_repeats_what_stands_before_the_gap_and_scores_the_whole_prompt(
    served: tuple[RealServer, tokenizers.Tokenizer],
) -> None:
    server, backend = served
    ids = backend.encode(f"{NAMES[0]}{BEFORE}{NAMES[1]}{AFTER}{NAMES[2]}").ids
    body = {"max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 0}
    choice = post(server, "/v1/completions", prompt=BEFORE, suffix=AFTER, **body)["choices"][0]
    scored = post(server, "/v1/completions", prompt=ids, **body)["choices"][0]
    assert choice["text"].startswith(BEFORE) and len(choice["logprobs"]["tokens"]) == len(ids) + 4
    assert choice["logprobs"]["token_logprobs"] == scored["logprobs"]["token_logprobs"]


def test_infill_is_the_same_gap_and_its_passages_stay_in_the_cache(
    served: tuple[RealServer, tokenizers.Tokenizer],
) -> None:
    server, backend = served
    fields = {"n_predict": 12, "temperature": 0}
    answer = post(server, "/infill", input_prefix=BEFORE, input_suffix=AFTER, **fields)
    by_suffix = post(server, "/v1/completions", prompt=BEFORE, suffix=AFTER, max_tokens=12, temperature=0)
    assert answer["content"] == by_suffix["choices"][0]["text"]
    extra = [{"filename": "a.txt", "text": "The king said that the sea was wide. " * 8}]
    first = post(server, "/infill", input_prefix=BEFORE, input_suffix=AFTER, input_extra=extra, **fields)
    again = post(server, "/infill", input_prefix=BEFORE, input_suffix=AFTER, input_extra=extra, prompt="girl", **fields)
    passages = backend.encode(f"{NAMES[4]}myproject\n{NAMES[3]}a.txt\n{extra[0]['text']}").ids
    assert again["tokens_cached"] >= (len(passages) - 16) // 16 * 16 > first["tokens_cached"]
    assert again["timings"]["prompt_n"] == again["tokens_evaluated"] - again["tokens_cached"]
