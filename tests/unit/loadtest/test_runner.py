"""Runs against a scripted server: loops, limits, turns, disconnects, warm-up, requests, and the server's properties."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from helpers.scripted_http import Generation, ScriptedLLM, answer, full_stream, scripted_llm, stream

from windlass.clients.loadtest import timed_requests
from windlass.clients.loadtest.load_plan import (
    Arrivals,
    Lengths,
    LoadPlan,
    Replay,
    TraceEntry,
    WeightedScaling,
    WorkloadSpec,
)
from windlass.clients.loadtest.runner import MeasuredLoop, measure, run_load
from windlass.clients.loadtest.target import LoadTestError, Target, metric_changes

SHORT = {"input_len": Lengths.fixed(5), "output_len": Lengths.fixed(3)}


def plan(llm: ScriptedLLM, target: dict | None = None, **options) -> LoadPlan:
    spec = options.pop("workload", {})
    options = {"count": 4, **options}
    return LoadPlan(target=Target(url=llm.url, **(target or {})), workload=WorkloadSpec(**{**SHORT, **spec}), **options)


def run(llm: ScriptedLLM, **options):
    return measure(plan(llm, **options))


def test_closed_loop_runs_its_number_of_clients():
    with scripted_llm(stream(0.01, 0.01, 0.01)) as llm:
        result = run(llm, count=12, concurrency=3)
    assert llm.max_running == 3
    assert len(result.completed) == len(llm.generations) == 12
    assert result.offered_rate is None
    assert sorted(record.index for record in result.records) == list(range(12))


def test_prompts_depend_on_the_seed_and_not_on_the_schedule():
    seen = []
    for options in ({"concurrency": 1}, {"schedule": Replay([0.0] * 4), "concurrency": None}, {"seed": 1}):
        with scripted_llm(full_stream) as llm:
            run(llm, vocab_size=1000, **options)
        seen.append(sorted(body["prompt"] for body in llm.bodies))
    assert seen[0] == seen[1] != seen[2]
    assert all(len(prompt) == 5 for prompt in seen[0])


def test_open_loop_does_not_wait_for_responses():
    async def waits_for_all(generation: Generation) -> None:
        while len(llm.generations) < 8:
            await asyncio.sleep(0.005)
        await full_stream(generation)

    with scripted_llm(waits_for_all) as llm:
        result = run(llm, count=8, schedule=Arrivals(100.0, None), concurrency=None, timeout_s=60)
    assert llm.max_running == len(result.completed) == 8
    assert [record.intended for record in result.records] == pytest.approx([n / 100 for n in range(8)])
    assert all(record.sent >= record.intended for record in result.records)
    assert result.offered_rate == 100


def test_open_loop_with_limited_concurrency():
    with scripted_llm(stream(0.03, 0.01)) as llm:
        result = run(llm, count=6, schedule=Arrivals(1000.0, None), concurrency=2)
    assert llm.max_running == 2 and len(result.completed) == 6
    assert result.summary()["schedule_lag_ms"]["p99"] > 40  # two rounds of about 40 ms before the last
    assert result.generator["send_lag_ms"]["p50"] == 0  # the generator did not delay the other four


@pytest.mark.slow
def test_no_request_is_sent_after_the_duration():
    with scripted_llm(stream(0.02, 0.02)) as llm:
        closed = run(llm, count=None, duration_s=0.3, concurrency=2)
    assert len(closed.completed) >= 2 and all(record.intended < 0.3 for record in closed.records)
    with scripted_llm(full_stream) as llm:
        opened = run(llm, count=None, duration_s=0.2, schedule=Arrivals(50.0, None), concurrency=None)
    assert len(opened.records) == 10


def test_warm_up_requests_are_not_counted():
    with scripted_llm(full_stream) as llm:
        result = run(llm, count=3, warmup=2, vocab_size=1000)
    assert len(llm.generations) == 5 and len(result.records) == 3
    prompts = [tuple(body["prompt"]) for body in llm.bodies]
    assert len(set(prompts)) == 5 and {len(prompt) for prompt in prompts} == {5}
    assert result.generator["monotonic_start"] > llm.generations[1].ended


def test_warm_up_does_not_send_prompts_of_the_trace():
    trace = [TraceEntry(line=line, max_tokens=2, prompt=prompt) for line, prompt in enumerate(("hello you", (4, 5)), 1)]
    with scripted_llm(full_stream) as llm:
        run(llm, count=2, warmup=2, workload={"trace": trace}, vocab_size=1000)
    warm, measured = [body["prompt"] for body in llm.bodies[:2]], [body["prompt"] for body in llm.bodies[2:]]
    assert measured == ["hello you", [4, 5]]
    assert [len(prompt) for prompt in warm] == [2, 2] and not any(prompt in measured for prompt in warm)


def test_disconnecting_clients_are_neither_completed_nor_failed():
    async def long(generation: Generation) -> None:
        await generation.head()
        # The previous client has disconnected by now, not only at the end of the run.
        before = llm.generations[: llm.generations.index(generation)]
        for _ in range(500):
            if all(other.disconnected for other in before):
                break
            await asyncio.sleep(0.01)
        else:
            await generation.token("the previous client is still connected", "abort")
        for _ in range(4):
            await generation.token()
        await generation.wait_disconnect()

    with scripted_llm(long) as llm:
        result = run(llm, count=3, workload={"disconnect_share": 1.0, "disconnect_after": 4})
    assert result.abandoned == {"disconnected": 3}
    assert all(generation.disconnected for generation in llm.generations)
    summary = result.summary()
    assert (summary["completed"], summary["failed"], summary["errors"]) == (0, 0, {})
    assert summary["abandoned"] == {"disconnected": 3}
    assert [len(record.chunks) for record in result.records] == [4, 4, 4]


def test_stream_broken_before_the_planned_disconnect_has_failed():
    async def broken(generation: Generation) -> None:
        await generation.head()
        await generation.token()
        generation.writer.close()

    with scripted_llm(broken) as llm:
        result = run(llm, count=1, workload={"disconnect_share": 1.0, "disconnect_after": 2})
    assert result.errors == {"truncated": 1} and not result.abandoned


def test_turns_wait_for_the_response_and_the_think_time():
    with scripted_llm(stream(0.02, 0.02)) as llm:
        result = run(llm, count=2, concurrency=2, workload={"turns": 3, "think_time": 0.05, "chat": True})
    assert len(result.completed) == 6 and result.settings["prompts"] == "text"
    start = result.generator["monotonic_start"]
    for label in ("turn 1", "turn 2", "turn 3"):
        assert sum(record.label == label for record in result.records) == 2
    talks = [p.body["messages"] for p in llm.generations]
    assert sorted(map(len, talks)) == [1, 1, 3, 3, 5, 5]
    for generation in llm.generations:
        messages = generation.body["messages"]
        if len(messages) == 1:
            continue
        assert [m["content"] for m in messages[1::2]] == [" w1 w2"] * (len(messages) // 2)
        before = [p for p in llm.generations if p.body["messages"] == messages[:-2]]
        assert len(before) == 1 and generation.arrived - before[0].ended >= 0.05
    # The intended send is at the end of the think time, which counts for no latency.
    second = next(record for record in result.records if record.label == "turn 2")
    assert start + second.intended - min(p.ended for p in llm.generations) >= 0.05
    assert all(record.text is None for record in result.records)  # recorded for the next turns only


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_timed_and_not_part_of_the_response_text(field):
    async def thinks(generation: Generation) -> None:
        await generation.head()
        for part in ({field: "hm, "}, {field: "well", "content": ""}, {"content": "yes"}):
            await generation.data({"choices": [{"index": 0, "delta": part, "finish_reason": None}]})
        await generation.token(".", "stop")
        await generation.done()

    with scripted_llm(thinks) as llm:
        result = run(llm, count=1, keep_text=True, workload={"turns": 2, "chat": True})
    assert [len(record.chunks) for record in result.records] == [4, 4]
    assert [record.text for record in result.records] == ["yes."] * 2
    assert llm.bodies[1]["messages"][1] == {"role": "assistant", "content": "yes."}


def test_failed_turn_ends_its_conversation():
    async def fails(generation: Generation) -> None:
        await answer({"error": {"message": "no"}}, "500 Internal Server Error")(generation)

    with scripted_llm(full_stream, fails, full_stream) as llm:
        result = run(llm, count=2, workload={"turns": 3, "chat": True})
    assert [record.outcome for record in result.records] == ["completed", "http_500", *["completed"] * 3]


def test_turns_of_token_ids_continue_the_returned_ids():
    async def play(generation: Generation) -> None:
        await generation.head()
        await generation.token("a", token_ids=[7])
        await generation.token("b", "length", token_ids=[8, 9])
        await generation.usage(len(generation.body["prompt"]), 3)
        await generation.done()

    with scripted_llm(play, model={"owned_by": "windlass", "max_model_len": 100}) as llm:
        result = run(llm, count=1, workload={"turns": 2}, vocab_size=1000)
    first, second = llm.bodies
    assert first["return_token_ids"] is True and first["ignore_eos"] is True
    assert second["prompt"][: len(first["prompt"]) + 3] == [*first["prompt"], 7, 8, 9]
    assert [record.input_tokens for record in result.records] == [5, 13]


@pytest.mark.parametrize("tokenizes", [True, False])
def test_chats_end_before_the_template_exceeds_the_limit(tokenizes):
    """Overhead of the template per turn: from the tokenizer, otherwise from the usage of responses."""

    def counted(messages) -> int:
        return sum(len(message["content"].split()) + 4 for message in messages) + 3

    async def counts(exchange) -> None:
        body = exchange.request.json
        if "prompt" in body:
            await tokenizer(True)(exchange)
        else:
            await answer({"tokens": [1] * counted(body["messages"])})(exchange)

    async def play(generation: Generation) -> None:
        body = generation.body
        await generation.head()
        await generation.token(" ".join(["one"] * body["max_tokens"]), "length")
        await generation.usage(counted(body["messages"]), body["max_tokens"])
        await generation.done()

    others = {"/tokenize": counts} if tokenizes else {}
    with scripted_llm(play, model={"max_model_len": 200}, others=others) as llm:
        lengths = {"input_len": Lengths.parse("uniform:12:16"), "output_len": Lengths.parse("uniform:1:9")}
        result = run(llm, count=6, workload={"chat": True, "turns": 9, **lengths})
    asked_for = [counted(body["messages"]) + body["max_tokens"] for body in llm.bodies]
    assert max(asked_for) <= 200 and 6 < len(asked_for) < 54
    assert result.settings["prompts"] == ("text of known length" if tokenizes else "text")


def test_turns_of_token_ids_need_returned_ids():
    with (
        scripted_llm(full_stream, model={"owned_by": "windlass", "max_model_len": 100}) as llm,
        pytest.raises(LoadTestError, match="--text-prompts"),
    ):
        run(llm, count=1, workload={"turns": 2}, vocab_size=1000)


def test_trace_is_replayed():
    trace = [TraceEntry(line=1, max_tokens=2, prompt="hello"), TraceEntry(line=2, max_tokens=3, prompt=(4, 5))]
    with scripted_llm(full_stream) as llm:
        result = run(llm, count=2, workload={"trace": trace}, schedule=Replay([0.0, 0.1]), concurrency=None)
    assert [(body["prompt"], body["max_tokens"]) for body in llm.bodies] == [("hello", 2), ([4, 5], 3)]
    one, two = result.records
    assert (one.intended, two.intended) == (0.0, 0.1)
    assert llm.generations[1].arrived >= result.generator["monotonic_start"] + 0.0999


def test_key_and_headers_are_sent_with_every_request():
    with scripted_llm(full_stream) as llm:
        run(llm, count=1, target={"api_key": "secret", "headers": {"X-Test": "1"}})
    assert len(llm.requests) >= 4
    for request in llm.requests:
        assert request.headers["authorization"] == "Bearer secret" and request.headers["x-test"] == "1"
    assert llm.generations[0].request.headers["content-type"] == "application/json"


def test_url_may_end_in_v1():
    with scripted_llm(full_stream) as llm:
        run(llm, count=1, target={})
        result = measure(
            LoadPlan(target=Target(url=llm.url + "/v1/"), workload=WorkloadSpec(**SHORT), count=1, concurrency=1)
        )
    assert len(result.completed) == 1
    with pytest.raises(LoadTestError, match="invalid URL"):
        Target(url="localhost:8000")


def test_server_name_is_resolved_once():
    with scripted_llm(full_stream) as llm:
        url = llm.url.replace("127.0.0.1", "localhost")
        looked_up = []

        async def counted():
            loop = asyncio.get_running_loop()
            original = loop.getaddrinfo

            async def getaddrinfo(host, *arguments, **options):
                looked_up.append(host)
                return await original(host, *arguments, **options)

            loop.getaddrinfo = getaddrinfo
            return await run_load(
                LoadPlan(target=Target(url=url), workload=WorkloadSpec(**SHORT), count=6, concurrency=3)
            )

        result = asyncio.run(counted())
    assert len(result.completed) == 6
    # Once by httpx for its connection, and once for the load.
    assert looked_up.count("localhost") <= 2


def test_connections_are_reused_unless_idle_for_long(monkeypatch):
    monkeypatch.setattr(timed_requests, "KEEP_ALIVE_PROOF_SECONDS", 0.0)
    with scripted_llm(full_stream) as llm:
        run(llm, count=5)
        assert llm.connections == 2  # control and load
        monkeypatch.setattr(timed_requests, "MAX_IDLE_SECONDS", 0.0)
        run(llm, count=5)
        assert llm.connections == 2 + 6


@pytest.mark.slow
def test_connections_are_reused_once_one_has_stayed_open():
    with scripted_llm(stream(0.03, 0.03)) as llm:
        result = run(llm, count=12)
    # Connections of the first 0.1 s are not reused; then the last of them carries all further requests.
    assert len(result.completed) == 12 and 3 <= llm.connections <= 1 + 5


@pytest.mark.parametrize("late", [0.0, 0.002])
def test_closing_server_receives_each_request_once(late):
    """llama.cpp does so, although its headers keep the connection open."""

    async def closes(generation: Generation) -> None:
        await full_stream(generation)
        await asyncio.sleep(late)
        generation.writer.close()

    with scripted_llm(closes) as llm:
        result = run(llm, count=40, concurrency=4)
    assert len(result.completed) == len(llm.generations) == 40 and not result.errors
    assert llm.connections == 1 + 40


def test_closed_reused_connection_fails_one_request(monkeypatch):
    monkeypatch.setattr(timed_requests, "KEEP_ALIVE_PROOF_SECONDS", 0.0)
    seen = []

    async def hangs_up(generation: Generation) -> None:
        seen.append(generation)
        if len(seen) == 3:
            generation.writer.close()
            return
        await full_stream(generation)

    with scripted_llm(hangs_up) as llm:
        result = run(llm, count=8)
    assert result.errors == {"connection": 1} and len(llm.generations) == 8
    assert llm.connections == 2 + 5  # the others are not reused


def test_clients_back_off_from_an_absent_server(monkeypatch):
    async def refused(pool):
        raise ConnectionRefusedError(111, "nobody listens")

    monkeypatch.setattr(timed_requests.Pool, "_connect", refused)
    with scripted_llm(full_stream) as llm:
        paused = run(llm, count=None, duration_s=0.35, concurrency=2)
        bounded = run(llm, count=500, concurrency=2)  # ends soon by itself
    # Each client tries at 0, after 0.1 s, after 0.3 s and perhaps at the end, later on a slow machine.
    assert 2 <= paused.errors["connection"] <= 8
    assert bounded.errors == {"connection": 500}


def test_ignore_eos_is_sent_to_known_servers():
    for owner, choice, sent in (
        ("tests", None, False), ("vllm", None, True), ("tests", True, True), ("vllm", False, False)
    ):  # fmt: skip
        with scripted_llm(full_stream, model={"owned_by": owner}) as llm:
            run(llm, count=1, workload={"ignore_eos": choice})
        assert ("ignore_eos" in llm.bodies[0]) is sent, owner


def tokenizer(offsets: bool):
    """Each word is a token with a number of its own; special tokens are 0 to 9."""

    async def script(exchange) -> None:
        body = exchange.request.json
        text = body["prompt"] if "prompt" in body else "<s> user " + body["messages"][0]["content"] + " assistant"
        if "prompt" in body and body.get("add_special_tokens") is not False:
            text = "<s> " + text
        words = text.split(" ")
        found = {"tokens": [10 + len(word) * 7 + ord(word[0]) for word in words], "count": len(words)}
        if offsets:
            ends = list(itertools.accumulate(len(word) + 1 for word in words))
            found["offsets"] = [[max(0, end - len(w) - 2), end - 1] for w, end in zip(words, ends, strict=True)]
        await answer(found)(exchange)

    return script


def test_token_ids_of_ordinary_words():
    with scripted_llm(full_stream, others={"/tokenize": tokenizer(True)}) as llm:
        result = run(llm, count=2, workload={"input_len": Lengths.fixed(500)})
    assert result.settings["prompts"] == "token ids"
    for body in llm.bodies:
        assert len(body["prompt"]) == 500 and min(body["prompt"]) > 10 and len(set(body["prompt"])) > 20


def test_token_ids_with_llama_cpp_names():
    async def script(exchange) -> None:
        words = exchange.request.json.get("content", "").split()
        await answer({"tokens": [100 + len(word) for word in words]})(exchange)

    with scripted_llm(full_stream, model={"owned_by": "llamacpp"}, others={"/tokenize": script}) as llm:
        result = run(llm, count=1, workload={"input_len": Lengths.fixed(50)})
    (body,) = llm.bodies
    assert result.settings["prompts"] == "token ids" and body["ignore_eos"] is True
    assert len(body["prompt"]) == 50 and set(body["prompt"]) <= set(range(101, 112))


@pytest.mark.parametrize("chat", [False, True])
def test_text_lengths_are_exact_with_token_offsets(chat):
    with scripted_llm(full_stream, others={"/tokenize": tokenizer(True)}) as llm:
        result = run(llm, count=1, text_prompts=True, workload={"input_len": Lengths.fixed(40), "chat": chat})
    (body,) = llm.bodies
    text = body["messages"][0]["content"] if chat else body["prompt"]
    added = 3 if chat else 1
    assert len(text.split(" ")) + added == 40
    assert result.settings["prompts"] == "text of known length"


def words_of(text: str) -> list[str]:
    """Tokens of other tokenizers: a word with the space before it."""
    return [word if number == 0 else " " + word for number, word in enumerate(text.split(" "))]


async def vllm_tokenizer(exchange) -> None:
    body = exchange.request.json
    whole = "prompt" in body
    pieces = words_of(body["prompt"] if whole else "<s> <user> " + body["messages"][0]["content"] + " <assistant>")
    if whole and body.get("add_special_tokens") is not False:
        pieces = ["<s>", *pieces]
    texts = [piece.replace(" ", "Ġ") for piece in pieces] if body.get("return_token_strs") else None
    tokens = list(range(10, 10 + len(pieces)))
    await answer({"count": len(pieces), "max_model_len": 512, "tokens": tokens, "token_strs": texts})(exchange)


async def llama_cpp_tokenizer(exchange) -> None:
    """Supports its own field names only: with others there are no tokens."""
    body = exchange.request.json
    pieces = words_of(" " + body["content"]) if "content" in body else []
    pieces = [piece for piece in pieces if piece.strip()]
    if body.get("add_special") and pieces:
        pieces = ["<s>", *pieces]
    tokens = [{"id": i, "piece": p} if body.get("with_pieces") else i for i, p in enumerate(pieces, 10)]
    await answer({"tokens": tokens})(exchange)


async def llama_cpp_counter(exchange) -> None:
    content = exchange.request.json["messages"][0]["content"]
    await answer({"input_tokens": len(content.split(" ")) + 3, "object": "response.input_tokens"})(exchange)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("owner", ["vllm", "llamacpp"])
def test_text_lengths_are_exact_with_token_texts(owner, chat):
    others = {"/tokenize": vllm_tokenizer}
    if owner == "llamacpp":
        others = {"/tokenize": llama_cpp_tokenizer, "/v1/chat/completions/input_tokens": llama_cpp_counter}
    with scripted_llm(full_stream, model={"owned_by": owner}, others=others) as llm:
        result = run(llm, count=1, text_prompts=True, workload={"input_len": Lengths.fixed(40), "chat": chat})
    (body,) = llm.bodies
    text = body["messages"][0]["content"] if chat else body["prompt"]
    assert len(text.split(" ")) + (3 if chat else 1) == 40
    assert result.settings["prompts"] == "text of known length"


def test_inconsistent_token_texts_are_ignored():
    async def lowered(exchange) -> None:
        words = exchange.request.json["prompt"].split(" ")
        await answer({"tokens": [7] * len(words), "token_strs": [f"[{word}]" for word in words]})(exchange)

    with scripted_llm(full_stream, others={"/tokenize": lowered}) as llm:
        result = run(llm, count=1, text_prompts=True, workload={"input_len": Lengths.fixed(40)})
    assert result.settings["prompts"] == "text"


def test_text_lengths_are_approximate_without_a_tokenizer():
    with scripted_llm(full_stream, others={"/tokenize": tokenizer(False)}) as llm:
        result = run(llm, count=1, text_prompts=True, workload={"input_len": Lengths.fixed(40)})
    assert result.settings["prompts"] == "text" and len(llm.bodies[0]["prompt"].split()) == 41


@pytest.mark.parametrize("owner", ["vllm", "llamacpp"])
def test_scaling_that_the_server_ignores_is_refused(owner):
    traced = TraceEntry(line=1, max_tokens=2, prompt="hello", rope_scaling=None, has_scaling=True)
    for workload in ({"scalings": [WeightedScaling({"rope_type": "yarn", "factor": 4})]}, {"trace": [traced]}):
        with (
            scripted_llm(full_stream, model={"owned_by": owner}) as llm,
            pytest.raises(LoadTestError, match=f"{owner}.*would ignore it"),
        ):
            run(llm, workload=workload)
        assert not llm.generations


@pytest.mark.parametrize(
    ("others", "version"),
    [
        ({"/version": answer({"version": "0.32.0"})}, "0.32.0"),
        ({"/props": answer({"build_info": "b1-0c1e570"})}, "b1-0c1e570"),
        ({"/version": answer(["odd"]), "/props": answer({"build_info": 7})}, None),
        ({}, None),
    ],
)
def test_server_version(others, version):
    with scripted_llm(full_stream, others=others) as llm:
        assert run(llm, count=1).server["version"] == version


def test_volatile_model_fields_are_omitted():
    entry = {"created": 1795306709, "permission": [{"id": "modelperm-832ee5cb51cd62b7"}], "root": "/models/demo"}
    with scripted_llm(full_stream, model=entry) as llm:
        server = run(llm, count=1).server
    assert server["root"] == "/models/demo" and server["owned_by"] == "tests"
    assert not {"created", "permission"} & set(server)


def test_metric_changes_of_a_run():
    texts = iter(
        "# TYPE x_hits counter\n"
        f'x_hits_total{{kind="a"}} {hits}\nx_hits_total{{kind="b"}} 1\n'
        "# TYPE x_moves_total counter\n"
        f"x_moves_total {hits / 2}\nx_other {hits}\n"
        f"# TYPE x_running gauge\nx_running {running}\n"
        "# TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total 9\n"
        f'# TYPE x_seconds histogram\nx_seconds_bucket{{le="+Inf"}} {hits}\nx_seconds_count {hits}\nx_seconds_sum 2.5\n'
        for hits, running in ((10, 5), (17, 2))
    )

    async def metrics(exchange) -> None:
        await answer(next(texts).encode(), content_type="text/plain")(exchange)

    with scripted_llm(full_stream, others={"/metrics": metrics}) as llm:
        result = run(llm)
    assert result.server_metrics == {
        "x_hits_total": 7,
        "x_moves_total": 3.5,
        "x_running": 2,
        "x_seconds_count": 7,
        "x_seconds_sum": 0,
    }


def test_counters_of_a_restarted_server():
    before = "# TYPE a counter\na_total 100\n# TYPE b counter\nb_total 3\n# TYPE g gauge\ng 9\n"
    after = "# TYPE a counter\na_total 5\n# TYPE b counter\nb_total 4\n# TYPE g gauge\ng 2\n"
    assert metric_changes(before, after) == {"a_total": 5, "b_total": 1, "g": 2}


def test_missing_and_unreadable_metrics():
    for others in ({}, {"/metrics": answer(b"what{", content_type="text/plain")}):
        with scripted_llm(full_stream, others=others) as llm:
            assert run(llm).server_metrics == {}


def test_progress_is_reported():
    seen = []

    def progress(snapshot) -> None:
        seen.append((snapshot.phase, snapshot.total, snapshot.ended, snapshot.running))

    async def until_told(generation: Generation) -> None:
        while ("running", 2, 0, 2) not in seen:
            await asyncio.sleep(0.005)
        await full_stream(generation)

    with scripted_llm(until_told) as llm:
        result = measure(plan(llm, count=2, concurrency=2, timeout_s=60), progress)
    assert len(result.completed) == 2 and seen[0][0] == "preparing"


@pytest.mark.slow
def test_offered_rate_covers_the_requests_of_the_run():
    trace = [TraceEntry(line=line, max_tokens=1, prompt="a") for line in range(1, 7)]
    times = Replay([0.0, 0.1, 0.2, 60.0, 60.001, 60.002])
    options = {"workload": {"trace": trace}, "schedule": times, "concurrency": None}

    async def stopped():
        stop = asyncio.Event()
        task = asyncio.ensure_future(run_load(plan(llm, **options, count=6), stop=stop))
        while len(llm.generations) < 9:
            await asyncio.sleep(0.01)
        stop.set()
        return await task

    with scripted_llm(full_stream) as llm:
        results = [
            run(llm, **options, count=3),
            run(llm, **options, count=None, duration_s=0.9),
            asyncio.run(stopped()),
        ]
    assert [len(result.records) for result in results] == [3, 3, 3] and results[2].interrupted
    assert [result.offered_rate for result in results] == pytest.approx([10.0] * 3)


def test_stopped_run_has_its_earlier_records():
    async def stopped():
        stop = asyncio.Event()
        task = asyncio.ensure_future(run_load(plan(llm, count=5, concurrency=2), stop=stop))
        while len(llm.generations) < 4:
            await asyncio.sleep(0.005)
        stop.set()
        return await asyncio.wait_for(task, 5)

    async def hangs(generation: Generation) -> None:
        await generation.head()
        await generation.token()
        await generation.wait_disconnect()

    with scripted_llm(full_stream, full_stream, hangs) as llm:
        result = asyncio.run(stopped())
    assert result.interrupted and len(result.completed) == 2
    assert result.abandoned == {"interrupted": 2} and result.summary()["failed"] == 0
    assert result.duration_s > 0


def test_idle_generator_is_not_the_limit():
    for _ in range(3):  # on a busy machine, at least one of these should be idle
        with scripted_llm(stream(0.05, 0.05, 0.05)) as llm:
            generator = run(llm, count=2).generator
        if generator["busy_share"] < 0.7 and generator["cpu_share"] < 0.7:
            break
    else:
        raise AssertionError(generator)
    assert generator["chunks_per_second"] > 0
    if generator["loop_lag_ms"]["p99"] < 25:  # otherwise this machine is the limit
        assert generator["limited"] is False and generator["reasons"] == []


@pytest.mark.slow
def test_blocked_generator_is_reported_as_the_limit():
    def hog(snapshot) -> None:
        time.sleep(0.5)  # blocks the event loop

    with scripted_llm(stream(*[0.05] * 10)) as llm, asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        generator = runner.run(run_load(plan(llm, count=2), progress=hog)).generator
    assert generator["limited"] is True and "late" in generator["reasons"][0]


@pytest.mark.slow
def test_busy_generator_is_reported_as_the_limit():
    """Each chunk costs the generator as much time as on a slow machine."""
    from windlass.clients.loadtest.timed_requests import TimedResponse

    original = TimedResponse.on_data

    def slow(self, data, when):
        end = time.monotonic() + 0.004 * data.count(b"data:")
        while time.monotonic() < end:
            pass
        original(self, data, when)

    TimedResponse.on_data = slow
    try:
        for _ in range(3):  # on a busy machine the server may be slow
            with scripted_llm(stream(*[0.001] * 50)) as llm:
                generator = run(llm, count=6, concurrency=6).generator
            if generator["limited"] is True and generator["busy_share"] > 0.9:
                break
        else:
            raise AssertionError(generator)
    finally:
        TimedResponse.on_data = original


@pytest.mark.parametrize(
    "options",
    [
        {"count": None},
        {"count": 0},
        {"concurrency": 0},
        {"concurrency": None},
        {"warmup": -1},
        {"duration_s": 0.0},
        {"timeout_s": 0.0},
        {"slo": {"speed": 1.0}},
        {"slo": {"ttft": 0.0}},
        {"slo": {"ttft": float("inf")}},
    ],
)
def test_invalid_plans_are_refused(options):
    with pytest.raises(LoadTestError):
        LoadPlan(target=Target(url="http://x"), workload=WorkloadSpec(), **{"count": 1, **options})
