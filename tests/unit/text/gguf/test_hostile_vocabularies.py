"""Hostile and damaged GGUF metadata: errors of one line that name the file, in bounded time."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from unit_helpers import gguf_vocabularies as vocabularies

from windlass.engine.errors import LoadError
from windlass.server.text.vocabularies.conversion import gguf_tokenizer_files
from windlass.server.text.vocabularies.vocabulary import MAX_TOKENS

TOKENS = vocabularies.byte_level()["tokenizer.ggml.tokens"]
COUNT = len(TOKENS)


def refused(metadata: object) -> str:
    with pytest.raises(LoadError) as caught:
        gguf_tokenizer_files(metadata, "x.gguf")
    message = str(caught.value)
    assert message.startswith("cannot make a tokenizer from x.gguf: ")
    assert "\n" not in message
    assert len(message) < 1500
    return message


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"model": None}, "it has no tokenizer"),
        ({"model": 7}, "tokenizer.ggml.model should be a str, not a int"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; gpt2, llama and gemma4 are the supported kinds"),
        ({"model": "no_vocab\n" * 99}, "; gpt2, llama and gemma4"),
        ({"pre": ["x"]}, "tokenizer.ggml.pre should be a str, not a list"),
        ({"pre": "qwen"}, "tokenizer.ggml.pre is 'qwen' (did you mean 'qwen2'?); known are a.x-4.0, afmoe, "),
        ({"pre": "x\n" * 1000}, "known are a.x-4.0"),
        ({"tokens": None}, "its vocabulary is missing"),
        ({"tokens": []}, "its vocabulary is missing"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens should be a list, not a str"),
        ({"tokens": [*TOKENS[:-1], 5]}, "has values of type int, where only str is permitted"),
        ({"tokens": [*TOKENS[:-1], b"x"]}, "has values of type bytes"),
        ({"tokens": [*TOKENS[:-1], TOKENS[0]]}, f"tokens 0 and {COUNT - 1} are the same text"),
        ({"tokens": [*TOKENS[:-1], "\ud800"]}, "tokenizer.ggml.tokens has text that is not valid UTF-8"),
        ({"tokens": [*TOKENS[:-1], "x" * 5000]}, "its tokens are too long"),
        ({"tokens": ["x"] * (MAX_TOKENS + 1)}, f"the limit is {MAX_TOKENS}"),
        ({"token_type": [1]}, f"tokenizer.ggml.token_type has 1 entries for {COUNT} tokens"),
        ({"token_type": [1.5] * COUNT}, "has values of type float, where only int"),
        ({"token_type": "x"}, "should be a list"),
        ({"merges": None}, "its merges are missing"),
        ({"merges": ["Ġt"]}, "the merge 'Ġt' is not two tokens separated by a space"),
        ({"merges": ["", "a b"]}, "the merge '' is not two tokens"),
        ({"merges": ["a "]}, "the merge 'a ' is not two tokens"),
        ({"merges": ["nowhere a"]}, "the merge of 'nowhere' and 'a' does not join two tokens"),
        ({"merges": ["< >"]}, "does not join two tokens to a third"),
        ({"merges": [1]}, "has values of type int"),
        ({"merges": ["a \udfff"]}, "tokenizer.ggml.merges has text that is not valid UTF-8"),
        ({"bos_token_id": COUNT}, f"tokenizer.ggml.bos_token_id is {COUNT}, but there are {COUNT} tokens"),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id is -1"),
        ({"padding_token_id": 10**18}, "tokenizer.ggml.padding_token_id is 1000000000000000000"),
        ({"unknown_token_id": 0.0}, "tokenizer.ggml.unknown_token_id should be a int, not a float"),
        ({"eot_token_id": True}, "tokenizer.ggml.eot_token_id should be a int, not a bool"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token should be a bool, not a int"),
        ({"bos_token_id": 2**32 - 2}, "tokenizer.ggml.bos_token_id is 4294967294"),
        ({"bos_token_id": 2**32 - 1}, "tokenizer.ggml.bos_token_id is missing"),
        ({"bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing"),
        ({"eos_token_id": None, "add_eos_token": True}, "tokenizer.ggml.eos_token_id is missing"),
    ],
)
def test_byte_level_errors(fields, part):
    assert part in refused(vocabularies.byte_level(**fields))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"scores": None}, "the scores of its tokens are missing"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries"),
        ({"scores": [float("nan")] * len(vocabularies.scored()["tokenizer.ggml.tokens"])}, "NaN"),
        ({"scores": ["1"] * 400}, "has values of type str, where only float"),
        ({"add_space_prefix": "yes"}, "tokenizer.ggml.add_space_prefix should be a bool, not a str"),
    ],
)
def test_scored_errors(fields, part):
    assert part in refused(vocabularies.scored(**fields))


def test_long_token_is_refused():
    metadata = vocabularies.scored()
    metadata["tokenizer.ggml.tokens"][300] = "x" * 4000
    assert "a token has 4000 characters; the limit is 256" in refused(metadata)


@pytest.mark.parametrize("template", [5, ["x"], {"a": "b"}])
def test_template_of_wrong_type(template):
    metadata = vocabularies.byte_level() | {"tokenizer.chat_template": template}
    assert "tokenizer.chat_template should be a str, not a" in refused(metadata)


@pytest.mark.slow
def test_many_added_tokens_of_alternating_kinds_are_fast():
    count = 100_000  # added one at a time, they would take hours
    metadata = vocabularies.byte_level()
    metadata["tokenizer.ggml.tokens"] += [f"<|{index}|>" for index in range(count)]
    metadata["tokenizer.ggml.token_type"] += [3, 4] * (count // 2)
    made = Tokenizer.from_str(gguf_tokenizer_files(metadata, "x.gguf").tokenizer)
    assert made.encode("<|99999|>a<|0|>", add_special_tokens=False).tokens == ["<|99999|>", "a", "<|0|>"]
