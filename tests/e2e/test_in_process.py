"""`windlass.LLM`: the tokens of a server, without one."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
from helpers.device import IN_PROCESS
from helpers.eventually import children, eventually
from helpers.real_server import serve

import windlass
from windlass import LLM, SamplingParams
from windlass.clients import APIConnectionError, APIError, APIStatusError, BadRequestError, Client
from windlass.engine.errors import LoadError
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.startup.llm_arguments import read_options

ROOT = Path(__file__).parents[2]
OPTIONS = ("--kv-cache-memory", "64MiB", "--deterministic")
PROMPTS = ["Once upon a time", "The king and the sea " * 40, [5, 9, 200, 31], "a"]
YARN = {"rope_type": "yarn", "factor": 4.0}
TALK = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"kv_cache_memory": "64MiB", "deterministic": True, "rope_profile": {"long": YARN}}
    with LLM("demo", **options, **IN_PROCESS) as model:
        yield model


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serve(*OPTIONS) as server, Client(server.url) as made:
        yield made


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.3, "seed": 7, "top_p": 0.9, "n": 2},
        {"temperature": 0.0, "rope_scaling": YARN},
        {"temperature": 0.0, "stop": ["e"], "prompt_logprobs": 1},
    ],
)
def test_answers_equal_those_over_http(llm: LLM, client: Client, options: dict) -> None:
    ours = llm.generate(PROMPTS, max_tokens=24, **options)
    theirs = [client.completions(prompt, max_tokens=24, return_token_ids=True, **options) for prompt in PROMPTS]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.choices == other.choices
        assert mine.choices[0].token_ids and len(mine.choices) == options.get("n", 1)
        assert (mine.rotary, mine.usage.total_tokens) == (other.rotary, other.usage.total_tokens)
    scaled = ours[1].rotary
    assert scaled is not None and scaled.rope_type == options.get("rope_scaling", {}).get("rope_type", "default")


def test_prompts_have_separate_settings(llm: LLM) -> None:
    params = [{"rope_scaling": "long", "max_tokens": 3}, {}, {"rope_scaling": YARN}, {"max_tokens": 2}]
    answers = llm.generate(PROMPTS, params, max_tokens=5, temperature=0, ignore_eos=True)
    assert [len(answer.choices[0].token_ids or ()) for answer in answers] == [3, 5, 5, 2]
    assert [answer.rotary.rope_type for answer in answers if answer.rotary] == ["yarn", "default", "yarn", "default"]
    with pytest.raises(ValueError, match="2 entries for 4 prompts"):
        llm.generate(PROMPTS, [{}, {}])


def test_sampling_parameters_equal_keywords(llm: LLM) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 6,
        "temperature": 1.2,
        "seed": 3,
        "logprobs": 2,
        "rope_scaling": YARN,
        "stop": ["zz"],
    }
    params = SamplingParams(**fields)
    by_keywords = llm.generate(PROMPTS, **fields)
    assert [answer.choices for answer in llm.generate(PROMPTS, params)] == [answer.choices for answer in by_keywords]
    one, other = llm.generate(PROMPTS[:2], [params, SamplingParams(max_tokens=2, ignore_eos=True)], seed=3)
    assert one.choices == by_keywords[0].choices and len(other.choices[0].token_ids or ()) == 2
    chat_fields = {**fields, "logprobs": True, "top_logprobs": 2}
    (chat,), (by_chat_keywords,) = llm.chat(TALK, params), llm.chat(TALK, **chat_fields)
    assert chat.choices == by_chat_keywords.choices and chat.choices[0].logprobs is not None
    with llm.stream(PROMPTS[0], params) as stream:
        assert stream.get_final().choices[0].token_ids == by_keywords[0].choices[0].token_ids
    with llm.stream_chat(TALK, params) as chat_stream:
        assert chat_stream.get_final().choices[0].token_ids == chat.choices[0].token_ids


def test_tokenizer_equals_that_of_requests(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = "Once upon a time, Élodie"
    ids = tokenizer.encode(text)
    (answer,) = llm.generate(text, max_tokens=0, echo=True)
    assert list(answer.choices[0].prompt_token_ids or ()) == ids
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == tokenizer.vocab_size == llm.info.vocab_size > max(ids)
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert rendered == llm.client.apply_template(TALK)
    assert len(tokenizer.apply_chat_template(TALK, tokenize=False)) < len(rendered)
    prompt = tokenizer.apply_chat_template(TALK, add_generation_prompt=True)
    assert prompt == tokenizer.encode(rendered, add_special_tokens=False)
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    chat, completion = llm.chat(TALK, **fields)[0].choices[0], llm.generate(prompt, **fields)[0].choices[0]
    assert completion.token_ids == chat.token_ids
    with pytest.raises(BadRequestError, match="tokens"):
        tokenizer.decode([tokenizer.vocab_size])


def test_chats_embeddings_and_scores_equal_those_over_http(llm: LLM, client: Client) -> None:
    template = {"max_tokens": 12, "temperature": 0}
    one, two = llm.chat([TALK, [*TALK, {"role": "assistant", "content": "No."}, *TALK]], **template)
    assert one.choices == client.chat(TALK, return_token_ids=True, **template).choices
    assert [two.choices[0].message.content] != [one.choices[0].message.content]
    assert llm.chat(TALK, **template)[0].choices == one.choices
    texts = [text for text in PROMPTS if isinstance(text, str)]
    assert llm.embed(texts, dimensions=16) == [item.embedding for item in client.embeddings(texts, dimensions=16).data]
    wanted = [pair.score for pair in client.score(texts[0], texts).data]
    assert llm.score(texts[0], texts) == wanted and len(wanted) == 3


def test_streams_have_pieces_and_are_aborted_when_closed(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], max_tokens=30, temperature=0, ignore_eos=True)[0].choices[0]
    with llm.stream("Once upon a time", max_tokens=30, temperature=0, ignore_eos=True) as stream:
        pieces = [chunk.text for chunk in stream]
    assert "".join(pieces) == expected.text and len([piece for piece in pieces if piece]) > 3
    assert stream.get_final().choices[0].token_ids == expected.token_ids
    with llm.stream_chat(TALK, max_tokens=5) as chat:
        assert sum(1 for _ in chat) > 1
    endless = {"max_tokens": 100_000, "ignore_eos": True, "context_overflow": "shift"}
    with llm.stream("Once", **endless) as early:
        next(iter(early))
    eventually(lambda: llm.client.metrics().value("windlass_num_requests_running") == 0, 20)


def test_many_prompts_are_answered_in_order(llm: LLM) -> None:
    prompts = [[index % 250 + 3, 9, 40] for index in range(300)]
    answers = llm.generate(prompts, max_tokens=1, echo=True, temperature=0)
    assert [list(answer.choices[0].prompt_token_ids or ()) for answer in answers] == prompts
    assert llm.generate([]) == []


def test_errors_are_those_of_the_server(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="temperature") as caught:
        llm.generate(PROMPTS, [{}, {}, {"temperature": -1}, {}], max_tokens=400)
    assert caught.value.param == "temperature" and "request 2 of 4" in caught.value.__notes__[0]
    with pytest.raises(BadRequestError, match="max_tokns"):
        llm.generate("a", max_tokns=3)
    with pytest.raises(TypeError, match="use stream"):
        llm.generate("a", stream=True)
    assert llm.generate("a", max_tokens=1, ignore_eos=True)[0].choices[0].finish_reason == "length"


def test_timeout_is_a_field_of_requests(llm: LLM) -> None:
    long = {"max_tokens": 400, "ignore_eos": True}
    with pytest.raises(APIStatusError, match="time") as cut:
        llm.generate(["In the beginning"], timeout=0.001, **long)
    assert cut.value.status == 504
    with pytest.raises(APIStatusError, match="time"), llm.stream("In the beginning", timeout=1e-9, **long) as stream:
        list(stream)
    for call in (
        lambda: llm.embed(["a"], timeout=0.0),
        lambda: llm.score("a", "b", timeout=0.0),
        lambda: llm.chat(TALK, {"timeout": 0.0}),
    ):
        with pytest.raises(BadRequestError, match="timeout"):
            call()
    assert llm.generate(["In the beginning"], timeout=60, max_tokens=1)[0].choices[0].token_ids


def test_llm_works_in_a_running_event_loop(llm: LLM) -> None:
    async def cell() -> str:
        return llm.generate("Once upon a time", max_tokens=4, temperature=0)[0].choices[0].text

    assert asyncio.run(cell())


def test_wrong_options_are_named_as_in_python() -> None:
    with pytest.raises(LoadError, match=r"^max_model_len must be at least 1"):
        LLM("demo", max_model_len=-4)
    with pytest.raises(LoadError, match=r"did you mean 'quantization'"):
        LLM("demo", quantisation="int8")
    with pytest.raises(LoadError, match="no_such_model"):
        LLM("no_such_model")
    with pytest.raises(AttributeError, match="LLN"):
        _ = windlass.LLN


def test_options_of_engine_and_answers_are_read() -> None:
    engine, server = read_options(
        {"rope_scaling": YARN, "max_num_seqs": 3, "context_overflow": "error", "chat_template": "t"}
        | {"rerank_tokens": "no,yes", "rerank_template": Path("p"), "generation_config": Path("g")}
        | {"override_generation_config": {"top_k": 9}, "default_chat_template_kwargs": {"enable_thinking": False}}
    )
    assert (engine.parse_rope_scaling(), engine.max_num_seqs) == (RopeScaling.from_dict(YARN), 3)
    assert (server.context_overflow, server.chat_template) == ("error", Path("t"))
    assert (server.rerank_tokens, server.rerank_template) == (["no,yes"], "p")
    assert (server.generation_config, server.override_generation_config) == ("g", '{"top_k": 9}')
    assert server.default_chat_template_kwargs == '{"enable_thinking": false}'


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"kv_cache_memory": -1}, "kv_cache_memory must be a size such as 4GiB"),
        (
            {"kv_cache_memory": 1e9},
            "kv_cache_memory must be a size such as 4GiB, 500MB or a number of bytes, got 1000000000.0",
        ),
        ({"max_model_len": "25.6k"}, "max_model_len must be auto or a whole number of tokens"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be a whole number, got 1.5"),
        ({"max_model_len": True}, "max_model_len must be auto or a whole number of tokens"),
        ({"prefix_caching": "maybe"}, "prefix_caching must be true or false, got 'maybe'"),
        ({"dtype": 5}, "dtype must be the name of a number type, got 5"),
        ({"chat_template": 5}, "chat_template must be a path, got 5"),
        ({"rope_scaling": [1]}, "rope_scaling must be a mapping such as"),
        ({"rope_scaling": {"factor": object()}}, "rope_scaling cannot be written as JSON"),
        ({"rope_profile": {"long": "yarn"}}, "rope_profile long.factor is missing"),
        ({"generation_config": 5}, "generation_config must be auto, none or a path, got 5"),
        ({"override_generation_config": [1]}, "override_generation_config must be a mapping such as"),
        ({"override_generation_config": {"top_p": 3}}, "override_generation_config: top_p must be a number above 0"),
        ({"default_chat_template_kwargs": {"tools": 1}}, "default_chat_template_kwargs: tools comes from each"),
        ({"target_step_ms": float("nan")}, "target_step_ms must be finite"),
        ({"attention_window": 10**9}, "attention_window and attention_sinks are 1000000000"),
        ({"threads": 10**6}, "threads must be at most 1024"),
        (
            {"attention_sinks": 4},
            "there is no option 'attention_sinks': it was removed: give it as the second number of att",
        ),
        ({"cuda_graphs": 0}, "there is no option 'cuda_graphs': set the environment variable WINDLASS_CUDA_GRAPHS"),
    ],
)
def test_option_of_a_wrong_type_is_one_line(option: dict, message: str) -> None:
    with pytest.raises(LoadError) as caught:
        LLM("demo", **option)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_values_of_python_types_are_accepted() -> None:
    engine, server = read_options(
        {"kv_cache_memory": 1 << 26, "kv_persist": Path("kept"), "target_step_ms": 5, "max_num_seqs": np.int64(3)}
        | {"deterministic": np.True_, "prefix_caching": 0, "attention_window": (256, 4), "threads": "2"}
        | {"rerank_tokens": iter(["no", "yes"]), "chat_template": PurePath("t"), "kv_host_memory": np.int64(1 << 20)}
    )
    assert (engine.kv_cache_memory, engine.kv_persist, engine.target_step_ms) == (
        1 << 26,
        str(Path("kept").absolute()),
        5,
    )
    assert (engine.max_num_seqs, engine.deterministic, engine.prefix_caching, engine.threads) == (3, True, False, 2)
    assert (server.attention_window, engine.kv_host_memory) == ((256, 4), 1 << 20)
    assert (server.rerank_tokens, server.chat_template) == (["no", "yes"], Path("t"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("reference/python.md", 3), ("start/quickstart.md", 1)])
def test_examples_of_a_page_run(capsys: pytest.CaptureFixture[str], name: str, count: int) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    examples = [block for block in blocks if "from windlass import LLM" in block]
    assert len(examples) == count
    for example in examples:
        exec(example.replace('"qwen2.5-coder-1.5b"', '"demo", kv_cache_memory="64MiB", **place'), {"place": IN_PROCESS})
        assert capsys.readouterr().out.strip()


def engines() -> set[int]:
    """Engine processes of this process."""
    return set(children(os.getpid(), b"windlass.engine"))


def test_deletion_ends_the_engine(llm: LLM) -> None:
    before = engines()
    model: LLM | None = LLM("demo", kv_cache_memory="64MiB", **IN_PROCESS)
    assert model is not None and len(engines() - before) == 1
    model = None
    gc.collect()
    assert engines() == before


def test_close_ends_the_engine_and_requests_of_other_threads(llm: LLM) -> None:
    before = engines()
    model = LLM("demo", kv_cache_memory="64MiB", **IN_PROCESS)
    assert len(engines() - before) == 1
    ended: list[BaseException] = []

    def ask(once: Callable[[], object]) -> None:
        try:
            while True:
                once()
        except BaseException as error:
            ended.append(error)

    kinds = [lambda: model.generate("Once", max_tokens=1), model.client.models, lambda: model.client.tokenize("a")]
    threads = [threading.Thread(target=ask, args=(kinds[index % 3],), daemon=True) for index in range(12)]
    broken = model.stream("Once", max_tokens=1500, ignore_eos=True)
    next(broken)
    with pytest.raises(ZeroDivisionError), model.stream("Once", max_tokens=1500, ignore_eos=True) as stream:
        next(stream)
        for thread in threads:
            thread.start()
        model.close()
        raise ZeroDivisionError
    stream.close()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(ended) == 12 and all(isinstance(error, APIError) for error in ended), ended
    with pytest.raises(APIError):
        broken.get_final()
    model.close()
    assert engines() == before
    with pytest.raises(APIConnectionError, match="create another"):
        model.generate("a")
    with pytest.raises(APIConnectionError, match="create another"):
        model.client.models()


def test_fork_has_no_model_and_ends() -> None:
    program = f"""
import os, sys
from windlass import LLM
from windlass.clients import APIConnectionError
with LLM('demo', kv_cache_memory='64MiB', **{IN_PROCESS}) as llm:
    stream = llm.stream('Once', max_tokens=1000, ignore_eos=True)
    next(stream)
    for leaves in (False, True):
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            continue
        for ask in (lambda: llm.generate('a'), llm.client.models, stream.until_done):
            try:
                ask()
            except APIConnectionError as error:
                assert 'in the process that uses it' in error.message, error
            else:
                raise AssertionError
        stream.close()
        if leaves:
            llm.close()
        sys.exit()
    next(stream)
    print(llm.generate('Once', max_tokens=2, ignore_eos=True)[0].usage.completion_tokens)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", ""), done.stderr


def test_program_without_close_ends() -> None:
    program = (
        "from windlass import LLM; import gc, sys\n"
        f"llm = LLM('demo', kv_cache_memory='64MiB', **{IN_PROCESS})\n"
        "print(llm.generate('Once', max_tokens=2, ignore_eos=True)[0].usage.completion_tokens)\n"
        "assert 'torch' not in sys.modules\n"
        "assert gc.isenabled() and gc.get_freeze_count() == 0"  # the settings of the program are unchanged
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_program_without_standard_error_gets_answers() -> None:
    program = (
        "from windlass import LLM\n"
        f"with LLM('demo', kv_cache_memory='64MiB', **{IN_PROCESS}) as llm:\n"
        "    print(llm.generate('Once', max_tokens=2, ignore_eos=True)[0].usage.completion_tokens)\n"
    )
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n")
