"""The load tester against a real server with the bundled model, and agreement with two other clients."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from helpers.eventually import eventually
from helpers.real_server import RealServer, serve

from windlass.clients import Client
from windlass.clients.loadtest.load_plan import Lengths, LoadPlan, WeightedScaling, WorkloadSpec
from windlass.clients.loadtest.results import read_json
from windlass.clients.loadtest.runner import measure, prepare
from windlass.clients.loadtest.target import ControlClient, Target
from windlass.clients.loadtest.workload import Workload
from windlass.server.cli import main as cli


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--api-key", "secret", "--deterministic", "--kv-cache-memory", "64MiB") as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("WINDLASS_API_KEY", "secret")


def run(server: RealServer, count: int, **spec):
    target = Target(url=server.url, api_key="secret")
    return measure(LoadPlan(target=target, workload=WorkloadSpec(**spec), count=count, concurrency=2, keep_text=True))


def prepared(server: RealServer, spec: WorkloadSpec) -> Workload:
    plan = LoadPlan(target=Target(url=server.url, api_key="secret"), workload=spec, count=1)

    async def prepare_workload() -> Workload:
        async with ControlClient(plan.target) as control:
            return await prepare(plan, control)

    return asyncio.run(prepare_workload())


def serve_command(server: RealServer, *arguments: object) -> int:
    return cli.run(["bench", "serve", "--url", server.url, *map(str, arguments)])


def test_closed_loop(server, tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["--input-len", 300, "--output-len", 8, "--concurrency", 4, "--num-prompts", 8, "--json", path]
    assert serve_command(server, *arguments) == 0
    data = json.loads(path.read_text())
    assert (data["completed"], data["failed"], data["errors"]) == (8, 0, {})
    result = read_json(path)
    # The server counts exactly the requested lengths of prompts and responses.
    assert {record.input_tokens for record in result.records} == {300}
    assert {record.output_tokens for record in result.records} == {8}
    assert data["settings"]["prompts"] == "token ids"
    assert data["server"]["owned_by"] == "windlass" and data["server"]["max_model_len"] == 512
    assert data["server_metrics"]["windlass_generation_tokens_total"] == 64
    assert data["server_metrics"]["windlass_prompt_tokens_total"] == 2400
    assert {"windlass_prefix_cache_hits_total", "windlass_num_preemptions_total", "windlass_key_moves_total"} <= set(
        data["server_metrics"]
    )
    assert "8 completed, 0 failed" in capsys.readouterr().out


def test_prompts_have_no_special_tokens(server):
    """Prompts are drawn from ids of text, without the special tokens of the bundled model, which come first."""
    workload = prepared(server, WorkloadSpec())
    drawn = set()
    for conversation in itertools.islice(workload.conversations(), 20):
        drawn |= set(json.loads(conversation.request.body)["prompt"])
    assert len(drawn) > 300
    with Client(server.url, api_key="secret") as client:
        for token_id in (min(drawn), max(drawn)):
            assert client.detokenize([token_id]).prompt
        special = {client.tokenize(text).tokens[-1] for text in ("<|bos|>", "<|end|>", "<|pad|>", "<|user|>")}
    assert not drawn & special


@pytest.mark.parametrize("chat", [False, True])
def test_text_prompts_have_the_requested_length(server, chat):
    for length in (30, 61):
        target = Target(url=server.url, api_key="secret")
        spec = WorkloadSpec(input_len=Lengths.fixed(length), output_len=Lengths.fixed(2), chat=chat)
        result = measure(LoadPlan(target=target, workload=spec, count=3, text_prompts=True))
        assert [record.input_tokens for record in result.completed] == [length] * 3


def test_three_clients_receive_equal_tokens_and_text(server):
    scaling = {"rope_type": "linear", "factor": 2.0}
    result = run(
        server,
        4,
        input_len=Lengths.parse("uniform:20:60"),
        output_len=Lengths.fixed(12),
        scalings=[WeightedScaling(None), WeightedScaling(scaling)],
        extra_body={"return_token_ids": True},
    )
    assert len(result.completed) == 4 and len({record.label for record in result.records}) == 2
    spec = WorkloadSpec(
        input_len=Lengths.parse("uniform:20:60"),
        output_len=Lengths.fixed(12),
        scalings=[WeightedScaling(None), WeightedScaling(scaling)],
        ignore_eos=True,
    )
    conversations = itertools.islice(prepared(server, spec).conversations(), 4)  # drawn again from the same seed
    bodies = [json.loads(conversation.request.body) for conversation in conversations]
    with (
        Client(server.url, api_key="secret") as ours,
        openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as theirs,
    ):
        for record, body in zip(result.records, bodies, strict=True):
            options = {name: body[name] for name in ("rope_scaling",) if name in body}
            answer = ours.completions(
                body["prompt"], max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True, **options
            )
            assert (answer.text, tuple(answer.choices[0].token_ids)) == (record.text, record.token_ids)
            assert answer.usage.prompt_tokens == record.input_tokens == len(body["prompt"])
            assert answer.usage.completion_tokens == record.output_tokens == 12
            assert answer.choices[0].finish_reason == record.finish_reason
            extra = {"ignore_eos": True, "return_token_ids": True, **options}
            text, ids, usage = "", [], None
            for chunk in theirs.completions.create(
                model=body["model"],
                prompt=body["prompt"],
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
            ):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.text
                    ids += choice.token_ids
            assert (text, tuple(ids)) == (record.text, record.token_ids)
            assert (usage.prompt_tokens, usage.completion_tokens) == (record.input_tokens, record.output_tokens)


def test_turns_and_prefixes_hit_the_prefix_cache(server):
    result = run(
        server, 3, input_len=Lengths.fixed(16), output_len=Lengths.fixed(4), turns=3, prefix_groups=1, prefix_len=64
    )
    assert len(result.completed) == 9
    by_label = {record.label: record for record in result.records}
    assert by_label["turn 3"].input_tokens == 64 + 16 * 3 + 4 * 2
    assert (
        by_label["turn 2"].cached_tokens >= 64 and by_label["turn 3"].cached_tokens > by_label["turn 1"].cached_tokens
    )
    assert result.server_metrics["windlass_prefix_cache_hits_total"] > 0


@pytest.mark.slow
def test_documents_with_and_without_cache_reuse(tmp_path, capsys):
    load = ["--documents", 4, "--document-len", "uniform:70:90", "--documents-per-prompt", "uniform:2:3"]
    load += ["--input-len", 12, "--output-len", 4, "--num-prompts", 12, "--concurrency", 1, "--warmup", 0]
    paths = [tmp_path / f"{name}.json" for name in ("computed", "reused")]
    with serve("--max-model-len", "512", "--kv-cache-memory", "64MiB") as running:
        running.wait_ready()
        for path, fields in zip(
            paths, ({"cache_reuse": 0}, {"cache_reuse": 32, "cache_reuse_recompute": 4}), strict=True
        ):
            body = json.dumps(fields | {"cache_salt": path.stem})  # separates the cached prompts of both runs
            assert serve_command(running, *load, "--extra-body", body, "--json", path) == 0
            shown = " ".join(capsys.readouterr().out.split())  # lines may be wrapped anywhere
            assert "prompt tokens (" in shown
            assert ("at other positions" in shown) == (path.stem == "reused"), shown
    computed, reused = (read_json(path) for path in paths)
    assert len(computed.completed) == len(reused.completed) == 12
    assert [r.input_tokens for r in computed.records] == [r.input_tokens for r in reused.records]
    first, second = computed.summary(), reused.summary()
    assert first["reused_tokens"] == 0 and second["reused_tokens"] > second["input_tokens"] / 3
    assert second["cached_tokens"] >= second["reused_tokens"] and second["cached_tokens"] > first["cached_tokens"]
    assert second["reused_tokens"] == reused.server_metrics["windlass_reused_tokens_total"]
    assert cli.run(["bench", "compare", *map(str, paths), "--json"]) == 0
    lines = {line["measure"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["reused"]["first"] == 0 and lines["reused"]["second"] > 0.3 and "ttft" in lines


def test_disconnected_clients_free_the_server(server):
    result = run(
        server,
        2,
        input_len=Lengths.fixed(8),
        disconnect_share=1.0,
        # Long enough not to end before the clients disconnect.
        extra_body={"max_tokens": 100_000, "context_overflow": "shift"},
    )
    assert result.abandoned == {"disconnected": 2}
    assert result.server_metrics["windlass_generation_tokens_total"] < 100_000
    with Client(server.url, api_key="secret") as client:
        eventually(lambda: client.metrics().value("windlass_num_requests_running") == 0, 20)


def test_refused_lengths_and_keys_are_one_line(server, monkeypatch, capsys):
    assert serve_command(server, "--input-len", 8192, "--output-len", 64) == 2
    assert "the server accepts 512 tokens" in capsys.readouterr().err
    assert serve_command(server, "--model", "other") == 2
    assert "has no model 'other'" in capsys.readouterr().err
    monkeypatch.setenv("WINDLASS_API_KEY", "wrong")
    assert serve_command(server) == 2
    assert "refuses the API key" in capsys.readouterr().err


def test_requests_refused_by_the_server_are_counted(server, tmp_path):
    path = tmp_path / "run.json"
    assert serve_command(server, "--extra-body", '{"no_such_field": 1}', "--num-prompts", 2, "--json", path) == 0
    result = read_json(path)
    assert result.errors == {"http_400": 2} and "no_such_field" in result.records[0].message
    assert httpx.get(server.url + "/ready").status_code == 200
