"""Causal models that score pairs by their next token, over real servers, compared with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.eventually import eventually
from helpers.real_server import RealServer, serve
from helpers.refused import inside, program, reason
from helpers.tiny_rerankers import (
    PAIR_TEMPLATE,
    add_logit_score,
    make_classifier,
    make_reranker,
    qwen3_prompt,
    say_in_config,
    scores_of,
    tokenizer,
)

QUERY = "who runs away?"
DOCUMENTS = [
    "The fox runs away, quickly!",
    "def main(argument):\n    return 1",
    " naïve café ",
    "東京は日本の首都です。",
]
WORDS = tokenizer()
YES, NO = WORDS.token_to_id("yes"), WORDS.token_to_id("no")
VLLM = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def server(original: Path) -> Iterator[RealServer]:
    with serve("--rerank-template", "qwen3", "--served-model-name", "ranker", model=original) as server:
        yield server


def prompts(query: str = QUERY, documents: list[str] = DOCUMENTS, *instruction: str) -> list[str]:
    return [qwen3_prompt(query, text, *instruction) for text in documents]


def count(prompt: str) -> int:
    return len(WORDS.encode(prompt, add_special_tokens=False).ids)


def ranked(server: RealServer, **body: object) -> torch.Tensor:
    """Scores of DOCUMENTS in their own order. The order of results must agree with them."""
    results = server.ask("/v1/rerank", query=QUERY, documents=DOCUMENTS, **body)["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    return torch.tensor([score for _, score in sorted(zip((r["index"] for r in results), scores, strict=True))])


def check_scores(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.min() > 0.02 and wanted.max() < 0.98 and wanted.max() - wanted.min() > 0.02, wanted
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_original_checkpoint_ranks_by_its_next_token(server: RealServer, original: Path) -> None:
    check_scores(ranked(server), scores_of(original, prompts()))
    other = prompts(QUERY, DOCUMENTS, "Find <code>")
    check_scores(ranked(server, instruction="Find <code>"), scores_of(original, other))
    pairs = list(zip(DOCUMENTS, reversed(DOCUMENTS), strict=True))
    answer = server.ask("/v1/score", text_1=[a for a, _ in pairs], text_2=[b for _, b in pairs])
    wanted = scores_of(original, [qwen3_prompt(*pair) for pair in pairs])
    check_scores(torch.tensor([item["score"] for item in answer["data"]]), wanted)
    assert answer["usage"]["prompt_tokens"] == sum(count(qwen3_prompt(*pair)) for pair in pairs)


def test_reranker_generates_and_reports_its_scoring(server: RealServer) -> None:
    model = server.get("/v1/models")["data"][0]
    assert (model["tasks"], model["scored_by"]) == (["generate", "embed", "score"], "answer")
    answer = server.complete("The fox", max_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3
    ids = WORDS.encode(qwen3_prompt(QUERY, DOCUMENTS[0]), add_special_tokens=False).ids
    row = server.ask("/pooling", input=ids, task="classify")["data"][0]
    assert row["data"] == [pytest.approx(float(ranked(server)[0]), abs=1e-6)] and row["shape"] == [1, 1]


@pytest.mark.parametrize(("side", "kept"), [("right", "The dog "), ("left", " hello ")])
def test_only_the_document_is_truncated(server: RealServer, original: Path, side: str, kept: str) -> None:
    long = "The dog sleeps; " * 20 + "hello " * 20 + "hello "
    error = server.refuse("/v1/rerank", query=QUERY, documents=["a", long * 10])
    assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")
    around = count(qwen3_prompt(QUERY, ""))
    most = around + 12
    answer = server.ask("/v1/rerank", query=QUERY, documents=[long], truncate_prompt_tokens=most, truncation_side=side)
    used = answer["usage"]["prompt_tokens"]
    assert most - 2 <= used <= most
    texts = [long[:end] if side == "right" else long[-end:] for end in range(1, 200)]
    fitting = [text for text in texts if count(qwen3_prompt(QUERY, text)) == used and kept in text]
    wanted = scores_of(original, prompts(QUERY, fitting))
    assert (wanted - answer["results"][0]["relevance_score"]).abs().min() < 1e-5
    error = server.refuse("/v1/rerank", query=QUERY, documents=["abc"], truncate_prompt_tokens=around - 5)
    assert f"document has {around} tokens" in error["message"]


def test_inapplicable_fields_are_refused(server: RealServer) -> None:
    pair = {"query": "a", "documents": ["b"]}
    assert server.refuse("/v1/rerank", **pair, pooling="mean")["param"] == "pooling"
    assert "instruction" in server.refuse("/v1/rerank", **pair, instruct="a")["message"]
    for instruction in ("", "a" * 20_000, "a b " * 3000):
        assert server.refuse("/v1/rerank", **pair, instruction=instruction)["param"] == "instruction"
    assert server.refuse("/classify", input="a")["code"] == "no_classifier"


@pytest.mark.slow
def test_keys_of_vllm_in_config_json_are_read(tmp_path: Path) -> None:
    directory = make_reranker(tmp_path)
    wanted = scores_of(directory, prompts())
    with serve(model=say_in_config(directory, **VLLM)) as server:
        check_scores(ranked(server), wanted)
        model = server.get("/v1/models")["data"][0]
        assert (model["architecture"], model["scored_by"]) == ("Qwen3ForCausalLM", "answer")
        assert "not understood" not in server.log.read_text()


@pytest.mark.slow
def test_files_of_sentence_transformers_are_read(tmp_path: Path) -> None:
    directory = add_logit_score(make_reranker(tmp_path, chat_template=PAIR_TEMPLATE), YES, NO, "take any")

    def pairs(instruction: str) -> list[str]:
        return [f"<|im_start|>{instruction}\nq: {QUERY}\nd: {text.strip()}<|im_end|>" for text in DOCUMENTS]

    with serve(model=directory) as server:
        check_scores(ranked(server), scores_of(directory, pairs("take any")))
        check_scores(ranked(server, instruction="be strict"), scores_of(directory, pairs("be strict")))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--rerank-template", "--chat-template"])
def test_single_token_scores_by_its_logit(option: str, tmp_path: Path) -> None:
    directory = make_reranker(tmp_path)
    template = tmp_path / "pair.jinja"
    template.write_text("{{ messages[0].content }}|{{ messages[1].content }}|")
    with serve("--rerank-tokens", "yes", option, str(template), model=directory) as server:
        wanted = scores_of(directory, [f"{QUERY}|{text}|" for text in DOCUMENTS], no=None)
        check_scores(ranked(server), wanted)
        error = server.refuse("/v1/rerank", query=QUERY, documents=DOCUMENTS, instruction="a")
        assert error["param"] == "instruction"


@pytest.mark.slow
@pytest.mark.parametrize("given", ["option", "chat_template"])
def test_converted_checkpoint_uses_the_prompt(given: str, tmp_path: Path) -> None:
    source = make_reranker(tmp_path / "source", chat_template=PAIR_TEMPLATE if given == "chat_template" else None)
    options = ("--rerank-template", "qwen3") if given == "option" else ()
    pairs = prompts()
    if given == "chat_template":
        pairs = [f"<|im_start|>find what fits\nq: {QUERY}\nd: {text.strip()}<|im_end|>" for text in DOCUMENTS]
    with serve(*options, model=make_classifier(tmp_path / "classifier", source)) as server:
        check_scores(ranked(server), scores_of(source, pairs))
        assert server.get("/v1/models")["data"][0]["scored_by"] == "head"


@pytest.mark.slow
def test_two_ranks_give_the_scores_of_one(original: Path) -> None:
    wanted = scores_of(original, prompts())
    with serve("--device", "cpu", "--rerank-template", "qwen3", "--tensor-parallel", "2", model=original) as server:
        check_scores(ranked(server), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rerank-tokens", "no,yes"), "this model has no chat template"),
        (("--rerank-tokens", "no,yes,perhaps"), "takes one token or two"),
        (("--rerank-tokens", "no,no", "--rerank-template", "qwen3"), "the same token"),
        (("--rerank-tokens", "no,yes indeed", "--rerank-template", "qwen3"), "'yes indeed' is"),
        (("--rerank-template", "/no/such/file"), "cannot read --rerank-template"),
        (("--rerank-template", "FILE"), "--rerank-tokens, such as no,yes"),
        (("--rerank-template", "CHAT", "--rerank-tokens", "no,yes"), "no message of the role document"),
    ],
)
def test_refused_starts(options: tuple[str, ...], message: str, original: Path, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text("{{ messages[0].content }} {{ messages[1].content }}")
    (tmp_path / "CHAT").write_text("{{ messages[0].content }}")
    given = [str(tmp_path / option) if option in ("FILE", "CHAT") else option for option in options]
    start = program if message == "this model has no chat template" else inside
    assert message in reason(start("serve", original, "--port", "0", *given))


@pytest.mark.slow
def test_recorded_rankings_are_replayed_exactly(original: Path, tmp_path: Path) -> None:
    file = tmp_path / "recorded"
    options = ("--rerank-template", "qwen3", "--deterministic")
    with serve(*options, "--record", str(file), "--record-text", model=original) as server:
        ranked(server)
        ranked(server, instruction="Find code")
        eventually(lambda: len(file.read_text().splitlines()) == 3, 20)
    with serve(*options, model=original) as server:
        windlass = str(Path(sys.executable).with_name("windlass"))
        command = [windlass, "replay", str(file), "--url", server.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["compared"], found["equal"], found["failed"], found["mismatches"]) == (2, 2, [], [])
