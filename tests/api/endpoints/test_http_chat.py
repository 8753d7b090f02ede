"""`/v1/chat/completions` over a real socket, against a scripted engine and a small template."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from helpers.eventually import in_time
from helpers.live_server import Live, live_server, server_fixture
from helpers.scripted_engine import LIKELY, UNLIKELY

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
shared = server_fixture(default_max_tokens=20)


def test_complete_answer(live: Live) -> None:
    answer = live.chat("hello", max_tokens=4)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "bcdb", "refusal": None}
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert live.prompt == "<|bos|>[user]hello\n[assistant]"
    assert answer["usage"]["prompt_tokens"] == len(live.engine.requests[-1].prompt_token_ids)


def test_the_servers_default_for_max_tokens(live: Live) -> None:
    assert live.chat()["usage"]["completion_tokens"] == 20


def test_a_stream_begins_with_the_role_and_ends_with_a_reason(live: Live) -> None:
    events = live.stream(PATH, {"messages": USER, "max_tokens": 3, "n": 2})
    assert events[-1] == "[DONE]"
    for index in (0, 1):
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "bcd"
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}
    assert len({e["id"] for e in events[:-1]}) == 1


def test_an_answer_that_is_empty_still_streams_completely(live: Live) -> None:
    live.engine.eos_after = 0
    events = live.stream(PATH, {"messages": USER})
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1] == "[DONE]"


def test_logprobs(live: Live) -> None:
    live.engine.eos_after = 1
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    content = live.chat(**body)["choices"][0]["logprobs"]["content"]
    first = {"token": "b", "logprob": UNLIKELY, "bytes": [98]}
    likelier = {"token": "a", "logprob": LIKELY, "bytes": [97]}
    assert content[0] == {**first, "top_logprobs": [likelier, first]}
    assert len(content) == 2  # the end-of-sequence token has one too
    events = live.stream(PATH, body)
    streamed = [entry for e in events[:-1] for entry in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    assert live.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert live.refuse(PATH, {"messages": USER, "top_logprobs": 2})["param"] == "top_logprobs"


def test_prompt_values_are_at_the_top_level(live: Live) -> None:
    body = {"messages": USER, "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 0}
    answer = live.chat(**body)
    ids = live.engine.requests[-1].prompt_token_ids
    assert answer["prompt_token_ids"] == ids and answer["choices"][0]["token_ids"] == [65, 66]
    assert answer["prompt_logprobs"][0] is None
    assert list(answer["prompt_logprobs"][1]) == [str(ids[1])]
    first = live.stream(PATH, body)[0]
    assert first["prompt_token_ids"] == ids and first["prompt_logprobs"] == answer["prompt_logprobs"]


def test_text_parts_null_content_and_fields_clients_copy_back(live: Live) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": None, "type": "text"},
        {"role": "user", "content": "c", "name": "me"},
    ]
    live.chat(messages=messages, max_tokens=1)
    assert live.prompt == "<|bos|>[system]be brief\n[user]a\nb\n[assistant]\n[user]c\n[assistant]"


def test_refusal_part_is_rendered_as_text(live: Live) -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no", "text": None}]}
    live.chat(messages=[*USER, refusal, *USER], max_tokens=1)
    assert live.prompt == "<|bos|>[user]hello\n[assistant]no\n[user]hello\n[assistant]"


def test_template_options(live: Live) -> None:
    live.chat(add_generation_prompt=False, chat_template_kwargs={"prefix": "P:"}, max_tokens=1)
    assert live.prompt == "<|bos|>P:[user]hello\n"
    turns = [*USER, {"role": "assistant", "content": "so far"}]
    live.chat(messages=turns, continue_final_message=True, max_tokens=1)
    assert live.prompt == "<|bos|>[user]hello\n[assistant]so far"
    live.chat(add_special_tokens=True, max_tokens=1)
    assert live.prompt.startswith("<|bos|><|bos|>[user]")
    error = live.refuse(PATH, {"messages": turns, "continue_final_message": True, "add_generation_prompt": True})
    assert error["param"] == "continue_final_message"
    assert live.refuse(PATH, {"messages": USER, "continue_final_message": True})["param"] == "continue_final_message"


@pytest.mark.parametrize("fields", [{}, {"context_overflow": "drop_turns"}])
def test_unusual_role_reaches_the_template(live: Live, fields: dict[str, Any]) -> None:
    live.chat(messages=[{"role": "critic", "content": "a"}, *USER], max_tokens=1, **fields)


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_empty_message_is_accepted(live: Live, role: str) -> None:
    live.chat(messages=[{"role": role, "content": ""}], max_tokens=1)


def test_a_chat_that_cannot_fit_is_refused_with_both_numbers(live: Live) -> None:
    # Just too long: tokenized and counted.
    error = live.refuse(PATH, {"messages": [{"role": "user", "content": "z" * 300}]})
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    counted = len(live.tokenizer.encode("<|bos|>[user]" + "z" * 300 + "\n[assistant]", add_special_tokens=False))
    assert "256" in error["message"] and f" {counted} tokens" in error["message"]
    # Much too long: not even rendered.
    longest = 256 * live.tokenizer.max_token_chars
    error = live.refuse(PATH, {"messages": [{"role": "user", "content": "z" * (longest + 1)}]})
    assert error["code"] == "context_length_exceeded" and "at least 257 tokens" in error["message"]


def test_empty_requests_for_tools_are_accepted(live: Live) -> None:
    live.chat(tools=[], tool_choice="none", parallel_tool_calls=True, response_format={"type": "text"}, max_tokens=1)
    live.chat(tools=None, tool_choice="auto", max_tokens=1)


def test_model_without_template() -> None:
    with live_server(template=None) as live:
        error = live.refuse(PATH, {"messages": USER})
        assert "no chat template" in error["message"]
        live.refuse("/tokenize", {"messages": USER})
        live.complete(max_tokens=1)


SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_slow_template_is_ended_and_delays_no_other_request() -> None:
    template = "{% if spin %}" + SLOW + "{% endif %}ok"
    with live_server(template=template, template_seconds=2.0) as live, ThreadPoolExecutor(1) as pool:
        body = {"messages": USER, "chat_template_kwargs": {"spin": True}}

        def seconds_of_others() -> float:
            begin = time.monotonic()
            slow = pool.submit(live.refuse, PATH, body)
            live.wait(lambda: live.state.in_flight == 1)
            assert live.http.get("/health").status_code == 200
            live.chat("quick", max_tokens=1)
            took = time.monotonic() - begin
            assert slow.result()["code"] == "template_timeout"
            assert 2.0 <= time.monotonic() - begin < 15
            return took

        in_time(seconds_of_others, 2.0)  # before the slow one is ended


def test_the_openai_client(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=3,
            logprobs=True,
            top_logprobs=1,
            user="me",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            extra_body={"repetition_penalty": 1.1},
        )
        assert answer.choices[0].message.content == "bcd"
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
        again = [{"role": "user", "content": "hi"}, answer.choices[0].message.model_dump()]
        again.append({"role": "user", "content": "go on"})
        client.chat.completions.create(model="toy", messages=again, max_tokens=1)  # type: ignore[arg-type]
        stream = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "bcd"


def test_the_async_openai_client_with_many_streams_at_once(live: Live) -> None:
    import asyncio

    live.engine.delay = 0.001

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model="toy", messages=[{"role": "user", "content": "x"}], max_tokens=number + 1, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(number) for number in range(12)))

    assert asyncio.run(main()) == [("bcd" * 4)[: number + 1] for number in range(12)]


def test_process_round_trips_of_a_streaming_chat() -> None:
    """One job of a text worker and one engine request; a grammar that is not cached is compiled in a second job."""
    function = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    forced = {"tools": [function], "tool_choice": "required"}
    with live_server(template="{% if tools %}{% endif %}{{ messages[-1].content }}") as live:
        for fields, jobs in (({}, 1), ({"truncate_prompt_tokens": 5}, 1), (forced, 2), (forced, 1)):
            before, requests = live.state.text._pool.jobs, len(live.engine.requests)
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, **fields}
            assert live.stream("/v1/chat/completions", body)[-1] == "[DONE]"
            assert live.state.text._pool.jobs - before == jobs, fields
            assert len(live.engine.requests) - requests == 1
