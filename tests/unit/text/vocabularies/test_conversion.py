"""Special tokens and options from the files next to a vocabulary, and inconsistent vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unit_helpers.tiktoken_files import ranked_tokens, write_tekken, write_tiktoken

from windlass.engine.errors import LoadError
from windlass.server.text.tokenizer import Tokenizer

TOKENS = ranked_tokens("qwen2", 300)
N = len(TOKENS)
QWEN = {"model_type": "qwen"}
KIMI = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.X", None]}}


def test_qwen(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(
        write_tiktoken(tmp_path / "qwen.tiktoken", TOKENS, QWEN, tokenizer_class="QWenTokenizer")
    )
    assert ours.special_tokens == {"eos_token": "<|endoftext|>"} and ours.bos_token_id is None
    expected = [N, N + 1, N + 2, N + 3, N + 207]
    assert ours.encode("<|endoftext|><|im_start|><|im_end|><|extra_0|><|extra_204|>") == expected
    assert ours.vocab_size == N + 208 and ours.encode("") == []


def test_llama3(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(write_tiktoken(tmp_path / "tokenizer.model", TOKENS, {"model_type": "llama"}))
    assert ours.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    assert ours.vocab_size == N + 256 and ours.encode("") == [N]
    names = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")
    assert ours.encode("".join(names), add_special_tokens=False) == [N + 6, N + 7, N + 8, N + 9, N + 10]
    assert ours.encode("<|reserved_special_token_246|>", add_special_tokens=False) == [N + 255]


def test_kimi_reads_names_from_its_config(tmp_path: Path) -> None:
    named = {str(N): {"content": "[BOS]", "special": True}, str(N + 9): {"content": "<think>", "special": False}}
    config = {**KIMI, "bos_token": "[BOS]", "added_tokens_decoder": named}
    ours = Tokenizer.from_directory(
        write_tiktoken(tmp_path / "tiktoken.model", TOKENS, {"model_type": "kimi_k2"}, **config)
    )
    assert ours.bos_token_id == N and ours.vocab_size == N + 256
    ids = ours.encode(f"[BOS]<think><|reserved_token_{N + 1}|>")
    assert ids == [N, N + 9, N + 1] and ours.decode(ids) == "<think>"


@pytest.mark.parametrize("given", [None, ["<unk>", "<s>", "</s>"]])
def test_tekken(tmp_path: Path, given: list[str] | None) -> None:
    ours = Tokenizer.from_directory(write_tekken(tmp_path / "tekken.json", TOKENS, given, 30))
    assert ours.vocab_size == N + 10 and ours.encode("") == [1] and ours.decode([1, 2]) == ""
    assert ours.encode("</s><SPECIAL_29>", add_special_tokens=False) == [2, 29]
    assert (ours.encode("[INST]", add_special_tokens=False) == [3]) == (given is None)
    assert ours.encode("a", add_special_tokens=False) == [30 + ord("a")]
    assert ours.special_tokens["eos_token"] == "</s>"


def test_add_bos_token_and_add_eos_token(tmp_path: Path) -> None:
    made = write_tekken(tmp_path / "tekken.json", TOKENS, None, 30, add_bos_token=False, add_eos_token=True)
    assert Tokenizer.from_directory(made).encode("a") == [30 + ord("a"), 2]


def broken(change: Any) -> Any:
    def write(file: Path) -> Path:
        directory = write_tekken(file / "tekken.json", TOKENS, None, 30)
        content = json.loads((directory / "tekken.json").read_text())
        change(content)
        (directory / "tekken.json").write_text(json.dumps(content))
        return directory

    return write


def ranks(*lines: bytes) -> Any:
    def write(file: Path) -> Path:
        directory = write_tiktoken(file / "qwen.tiktoken", TOKENS, QWEN)
        with (directory / "qwen.tiktoken").open("ab") as out:
            out.write(b"\n".join(lines))
        return directory

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (ranks(b"!!!! 700"), "not a token in base64"),
        (ranks(b"YWFhYWE= 9999999"), "ranks"),
        (ranks(b"YWFhYWE="), "not a token in base64"),
        (ranks(b"YQ== %d" % N), "are equal"),
        (lambda file: write_tiktoken(file / "qwen.tiktoken", TOKENS[1:], QWEN), "not every byte"),
        (
            lambda file: write_tiktoken(file / "tokenizer.model", TOKENS, {"model_type": "exotic"}),
            "save the tokenizer as",
        ),
        (
            lambda file: write_tiktoken(
                file / "tokenizer.model", TOKENS, {}, tokenizer_class="X", auto_map={"AutoTokenizer": ["a.X"]}
            ),
            "requires the model's own code",
        ),
        (
            lambda file: write_tiktoken(
                file / "tiktoken.model",
                TOKENS,
                {"model_type": "kimi_k2"},
                **KIMI,
                added_tokens_decoder={"999999999": {"content": "x"}},
            ),
            "far beyond",
        ),
        (
            lambda file: write_tiktoken(file / "qwen.tiktoken", TOKENS, QWEN, added_tokens_decoder=[1]),
            "tokenizer_config.json",
        ),
        (broken(lambda content: content.pop("config")), "format of tekken.json"),
        (broken(lambda content: content["config"].update(pattern="(")), "is inconsistent"),
        (broken(lambda content: content["config"].update(default_num_special_tokens=3)), "3 are permitted"),
        (broken(lambda content: content["vocab"].pop(3)), "ranks"),
        (broken(lambda content: content["vocab"][260].update(token_bytes="?")), "format of tekken.json"),
        (
            broken(lambda content: content.update(special_tokens=[{"rank": 7e300, "token_str": "x"}])),
            "are permitted|format of",
        ),
    ],
)
def test_inconsistent_vocabularies(tmp_path: Path, write: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        Tokenizer.from_directory(write(tmp_path))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_ambiguous_vocabulary_files(tmp_path: Path) -> None:
    write_tiktoken(tmp_path / "a.tiktoken", TOKENS, QWEN)
    write_tiktoken(tmp_path / "b.tiktoken", TOKENS, QWEN)
    with pytest.raises(LoadError, match=r"a\.tiktoken, b\.tiktoken"):
        Tokenizer.from_directory(tmp_path)
