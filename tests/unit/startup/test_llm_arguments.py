"""Arguments of `windlass.LLM`: each mistake is explained, and nothing is loaded before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import windlass
from windlass import LLM, BadRequestError, LoadError, SamplingParams
from windlass.clients.options import GenerationOptions
from windlass.server.schemas.generation import GenerationRequest
from windlass.server.startup.llm_arguments import merged_fields, read_conversations, read_prompts

TALK = [{"role": "user", "content": "hello"}]


def test_sampling_parameters_are_the_fields_of_the_api() -> None:
    fields = set(SamplingParams.model_fields)
    assert fields == set(GenerationRequest.model_fields) | {"logprobs"}
    missing = set(GenerationOptions.__annotations__) - fields
    assert missing == {"deadline", "extra_body"}  # of the client


def test_sampling_parameters_accept_values_of_python() -> None:
    given: dict[str, Any] = {"temperature": 0, "stop": ("a", "b"), "logit_bias": {3: 1}, "seed": None}
    given |= {"top_k": np.int64(4), "allowed_token_ids": np.arange(3)}
    params = SamplingParams(**given)
    assert params.fields() == {
        "temperature": 0.0,
        "stop": ["a", "b"],
        "logit_bias": {3: 1.0},
        "top_k": 4,
        "allowed_token_ids": [0, 1, 2],
    }
    assert eval(repr(params)) == params
    params.max_tokens = 9
    assert params.fields()["max_tokens"] == 9


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"max_tokns": 3}, "max_tokns", "unknown_field", "did you mean 'max_tokens'"),
        ({"max_new_tokens": 3}, "max_new_tokens", "unknown_field", "it is called max_tokens here"),
        ({"repeat_penalty": 1.1}, "repeat_penalty", "unknown_field", "repetition_penalty"),
        ({"guided_decoding": 1}, "guided_decoding", "unknown_field", "structured_outputs"),
        ({"user": "x"}, "user", "unknown_field", "remove it"),  # ignored over HTTP
        ({"tools": []}, "tools", "unknown_field", "a keyword of chat"),
        ({"temperature": -1}, "temperature", "invalid_value", "greater than or equal to 0, got -1"),
        ({"temperature": "hot"}, "temperature", "invalid_value", "a valid number, got 'hot'"),
        ({"temperature": float("nan")}, "temperature", "invalid_value", "finite"),
        ({"top_p": 0}, "top_p", "invalid_value", "set temperature to 0"),
        ({"seed": object()}, "seed", "invalid_value", "cannot be written as JSON"),
    ],
)
def test_wrong_sampling_parameters_are_named(fields: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        SamplingParams(**fields)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)


def test_fields_are_merged() -> None:
    params = SamplingParams(max_tokens=3, logprobs=2)
    assert merged_fields(params, {"max_tokens": 9, "seed": 1}, 2) == [{"max_tokens": 3, "logprobs": 2, "seed": 1}] * 2
    assert merged_fields([params, {}], {"seed": 1}, 2)[1] == {"seed": 1}
    assert merged_fields(params, {}, 1, chat=True) == [{"max_tokens": 3, "logprobs": True, "top_logprobs": 2}]
    assert merged_fields(None, {}, 0) == []


@pytest.mark.parametrize(
    ("given", "keywords", "error", "message"),
    [
        ([{}], {}, ValueError, "1 entries for 2 prompts"),
        (7, {}, TypeError, "must be SamplingParams, a mapping, or a list"),
        ([{}, 7], {}, TypeError, "must be SamplingParams"),
        (None, {"use_tqdm": False}, TypeError, "progress"),
        ({"stream": True}, {}, TypeError, "use stream"),
        (None, {"lora_request": 1}, TypeError, "lora="),
        (None, {"params": {}}, TypeError, "sampling_params"),
    ],
)
def test_wrong_forms_of_parameters_are_explained(
    given: Any, keywords: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        merged_fields(given, keywords, 2)


def test_prompts_of_every_form_are_read() -> None:
    assert read_prompts("a") == ["a"]
    assert read_prompts([3, 4]) == read_prompts(np.array([3, 4])) == [[3, 4]]
    assert read_prompts(("a", (3, 4), np.array([5]))) == ["a", [3, 4], [5]]
    assert read_prompts([]) == []
    assert read_conversations(TALK) == read_conversations([TALK]) == [TALK]
    assert read_conversations((TALK, TALK)) == [TALK, TALK]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "prompts must be a text, token ids"),
        (None, "prompts must be a text"),
        ({"prompt": "a"}, "prompts must be a text"),
        (["a", 5], r"prompts\[1\] must be a text or a list of token ids, got 5"),
        ([{"prompt_token_ids": [1]}], r"prompts\[0\] must be a text"),
        ([True], r"prompts\[0\] must be"),
    ],
)
def test_wrong_prompts_are_explained(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_prompts(given)


@pytest.mark.parametrize("given", ["hello", 5, ["hello"], [[5]], TALK[0], [[]], [TALK, "hello"]])
def test_wrong_conversations_are_explained(given: Any) -> None:
    with pytest.raises(TypeError, match="messages must be a list such as"):
        read_conversations(given)


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        # vLLM
        ("tensor_parallel_size", "use tensor_parallel"),
        ("hf_overrides", "use rope_scaling"),
        ("num_gpu_blocks_override", "use kv_cache_memory"),
        ("trust_remote_code", "code of a model is never executed: leave it out"),
        ("enforce_eager", "use WINDLASS_CUDA_GRAPHS=false"),
        ("seed", "use seed of the sampling parameters"),
        ("disable_log_stats", "leave it out"),
        # llama-cpp-python
        ("n_ctx", "use max_model_len"),
        ("n_batch", "use max_num_batched_tokens"),
        ("n_threads", "use threads"),
        ("n_gpu_layers", "a model is on one device: leave it out"),
        ("model_path", "use the first argument"),
        ("use_mlock", "leave it out"),
        # transformers
        ("device_map", "use device"),
        ("load_in_4bit", "use quantization='int4'"),
        # windlass serve
        ("host", "concerns the HTTP server"),
        ("max_num_seqz", "did you mean 'max_num_seqs'"),
        ("foo", "--help-all"),
    ],
)
def test_unknown_options_have_a_hint(keyword: str, hint: str) -> None:
    options: dict[str, Any] = {keyword: 1}
    with pytest.raises(LoadError) as caught:
        LLM("demo", **options)
    assert str(caught.value).startswith(f"there is no option {keyword!r}") and hint in str(caught.value)


@pytest.mark.parametrize("name", ["max_num_seqs", "gpu_memory_utilization", "max_model_len", "quantization", "dtype"])
def test_options_have_the_names_of_vllm(name: str) -> None:
    options: dict[str, Any] = {name: object()}
    with pytest.raises(LoadError, match=rf"^{name} must be"):
        LLM("demo", **options)


def test_every_error_is_exported() -> None:
    for name in (
        "APIError",
        "APIConnectionError",
        "BadRequestError",
        "NotFoundError",
        "RateLimitError",
        "ServerError",
        "StreamError",
        "LoadError",
    ):
        assert issubclass(getattr(windlass, name), Exception) and name in dir(windlass)
    with pytest.raises(AttributeError, match="LLN"):
        _ = windlass.LLN
