"""Incremental detokenization, compared with decoding all tokens at once and with a brute-force stop string search."""

from __future__ import annotations

import sys
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
from helpers import toy_tokenizers as toys
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windlass.server.text.detokenizer import Detokenizer, _PieceStream
from windlass.server.text.tokenizer import Tokenizer

NAMES = sorted(toys.ALL)
TEXT = "Größe of 東京 😀 don't  stop\n\n\tthe end"


@cache
def load(name: str) -> Tokenizer:
    return Tokenizer(toys.copy_of(toys.ALL[name]()), {"eos_token": "<|eos|>"})


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def stream(
    tokenizer: Tokenizer, prompt: list[int], chunks: list[list[int]], **options
) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    parts = [detokenizer.push(chunk, final=i == len(chunks) - 1) for i, chunk in enumerate(chunks)]
    assert "".join(parts) == detokenizer.text
    return parts, detokenizer


texts = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(["hello", " ", "  ", "é", "東", "😀", "\n", "▁", "<s>", "<|eos|>", "x"]), max_size=12).map(
        "".join
    ),
)


@pytest.mark.parametrize("name", NAMES)
@given(
    prompt=texts,
    text=texts,
    cuts=st.lists(st.integers(0, 200), max_size=8),
    keep=st.integers(0, 60),
    skip=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_pushes_concatenate_to_the_decoded_text(name, prompt, text, cuts, keep, skip):
    tokenizer = load(name)
    before = tokenizer.encode(prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if (
        tokenizer.piece_decoder is None or not tokenizer.piece_decoder.byte_fallback
    ):  # otherwise see test_arbitrary_sentencepiece_ids
        ids = ids[:keep]  # may end in the middle of a character
    parts, detokenizer = stream(tokenizer, before, chunked(ids, cuts), skip_special_tokens=skip)
    whole = tokenizer.decode(before + ids, skip_special_tokens=skip)
    assert "".join(parts) == whole[len(tokenizer.decode(before, skip_special_tokens=skip)) :]
    assert detokenizer.num_tokens == len(ids)


@given(
    ids=st.lists(st.integers(0, 430), max_size=30), cuts=st.lists(st.integers(0, 40), max_size=6), skip=st.booleans()
)
@settings(max_examples=300, deadline=None)
def test_arbitrary_byte_level_ids(ids, cuts, skip):
    tokenizer = load("byte_level")
    parts, _ = stream(tokenizer, [], chunked(ids, cuts), skip_special_tokens=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


def lenient_utf8(data: bytes) -> str:
    """Decode valid characters, and replace each other byte by U+FFFD."""
    text, at = "", 0
    while at < len(data):
        for size in (1, 2, 3, 4):
            try:
                text += data[at : at + size].decode("utf-8")
            except UnicodeDecodeError:
                continue
            break
        else:
            text, size = text + "\ufffd", 1
        at += size
    return text


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["llama_style", "gemma_style", "metaspace"])
@given(data=st.data(), cuts=st.lists(st.integers(0, 40), max_size=6), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_arbitrary_sentencepiece_ids(name, data, cuts, skip):
    tokenizer = load(name)
    some_bytes = [tokenizer.backend.token_to_id(f"<0x{b:02X}>") or 5 for b in (0x20, 0xE6, 0x9D, 0xB1, 0xC3, 0xFF)]
    one_id = st.integers(0, tokenizer.vocab_size + 3) | st.sampled_from(some_bytes)
    ids = data.draw(st.lists(one_id, max_size=20))
    parts, _ = stream(tokenizer, [], chunked(ids, cuts), skip_special_tokens=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" in whole and name != "metaspace":
        # Valid characters next to invalid bytes are kept. `tokenizers` replaces all bytes of such a run.
        names = [tokenizer.backend.id_to_token(i) for i in ids if not skip or i not in tokenizer.special_token_ids]
        known = [token.replace("▁", " ") for token in names if token is not None]
        whole = lenient_utf8(b"".join(bytes([int(t[3:5], 16)]) if t.startswith("<0x") else t.encode() for t in known))
        if name == "llama_style":
            whole = whole.removeprefix(" ")
    assert "".join(parts) == whole


@pytest.mark.parametrize("name", ["byte_level", "llama_style"])
def test_characters_are_returned_when_complete(name):
    tokenizer = load(name)
    ids = tokenizer.encode("a😀b東", add_special_tokens=False)
    assert len(ids) > 5
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"))
    parts = [detokenizer.push([token_id]) for token_id in ids]
    assert "\ufffd" not in "".join(parts)
    assert [part.strip() for part in parts if part.strip()] == ["a", "😀", "b", "東"]
    assert detokenizer.push([], final=True) == ""


def test_incomplete_last_character():
    tokenizer = load("byte_level")
    ids = tokenizer.encode("ok 😀", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer, [])
    assert detokenizer.push(ids) == "ok "
    assert detokenizer.push([], final=True) == "\ufffd"
    assert detokenizer.push(ids, final=True) == ""


def test_character_that_begins_in_the_prompt():
    tokenizer = load("byte_level")
    ids = tokenizer.encode("😀!", add_special_tokens=False)
    assert Detokenizer(tokenizer, ids[:1]).push(ids[1:]) == "😀!"


def test_leading_space_of_sentencepiece():
    tokenizer = load("llama_style")
    word = tokenizer.encode("hello", add_special_tokens=False)
    bos = tokenizer.encode("")[:1]
    assert Detokenizer(tokenizer, []).push(word) == "hello"
    assert Detokenizer(tokenizer, bos).push(word) == "hello"
    assert Detokenizer(tokenizer, tokenizer.encode("hello")).push(word) == " hello"
    assert Detokenizer(tokenizer, bos, skip_special_tokens=False).push(word) == " hello"


def test_special_tokens_and_hidden_last_token():
    tokenizer = load("byte_level")
    eos = tokenizer.eos_token_id
    ids = [*tokenizer.encode("hi<tool>", add_special_tokens=False), eos]
    assert Detokenizer(tokenizer, []).push(ids, final=True) == "hi<tool>"
    shown = Detokenizer(tokenizer, [], skip_special_tokens=False)
    assert shown.push(ids, final=True) == "hi<tool><|eos|>"
    hidden = Detokenizer(tokenizer, [], skip_special_tokens=False)
    assert hidden.push(ids, hide_last=True, final=True) == "hi<tool>"
    assert hidden.num_tokens == len(ids)


def first_to_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return the shortest prefix of the text that ends with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


letters = st.text(alphabet="ab", min_size=1, max_size=5) | st.text(alphabet="b 東", min_size=1, max_size=3)


@pytest.mark.slow
@given(
    text=st.text(alphabet="ab", max_size=40) | st.text(alphabet="ab 東", max_size=40),
    stops=st.lists(letters, min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 60), max_size=10),
    include=st.booleans(),
)
@example(text="aaab", stops=["aab"], cuts=[], include=False)
@example(text="xabababc", stops=["ababc"], cuts=[1, 2, 3, 4, 5], include=False)
@example(text="xabcd", stops=["abcd", "bc"], cuts=[], include=False)
@settings(max_examples=400, deadline=None)
def test_stop_strings(text, stops, cuts, include):
    tokenizer = load("byte_level")
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts, detokenizer = stream(tokenizer, [], chunked(ids, cuts), stop=stops, include_stop=include)
    found = first_to_complete(text, stops)
    if found is None:
        assert "".join(parts) == text and detokenizer.stopped is None
    else:
        end, stop = found
        assert detokenizer.stopped == stop
        assert "".join(parts) == text[: end if include else end - len(stop)]


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1),
)
@settings(max_examples=200, deadline=None)
def test_held_back_text_is_minimal(text, stops):
    tokenizer = load("byte_level")
    detokenizer = Detokenizer(tokenizer, [], stop=stops)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        detokenizer.push([token_id])
        if detokenizer.stopped:
            break
        so_far = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[: detokenizer.num_tokens])
        held = so_far[len(detokenizer.text) :]
        prefixes = [so_far[i:] for i in range(len(so_far)) if any(stop.startswith(so_far[i:]) for stop in stops)]
        assert held == max(prefixes, key=len, default="")


def test_stop_string_details():
    tokenizer = load("byte_level")
    ids = tokenizer.encode("one\n\ntwo", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [], stop=["\n\n"])
    assert "".join(detokenizer.push([token_id]) for token_id in ids) == "one"
    assert detokenizer.stopped == "\n\n" and detokenizer.num_tokens < len(ids)
    held = Detokenizer(tokenizer, [], stop=["\n\nX"])
    assert held.push(tokenizer.encode("a\n\n", add_special_tokens=False)) == "a"
    assert held.push([], final=True) == "\n\n"
    early = Detokenizer(tokenizer, [], stop=["o"], min_tokens=len(ids) - 1)
    assert early.push(ids, final=True).startswith("one\n\n")
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(tokenizer, [], stop=["a", ""])


@pytest.mark.parametrize("name", ["byte_level", "word_piece"])
def test_constant_work_per_token(name, monkeypatch):
    tokenizer = load(name)
    text = TEXT if name == "byte_level" else "hello world quick fox "
    ids = (tokenizer.encode(text, add_special_tokens=False) * 300)[:3000]
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    detokenizer = Detokenizer(tokenizer, [], stop=["never seen", "\n\n\n\n"])

    def calls(chunk: list[int]) -> int:
        count = 0

        def profile(frame, event, arg):
            nonlocal count
            count += 1

        sys.setprofile(profile)
        try:
            for token_id in chunk:
                detokenizer.push([token_id])
        finally:
            sys.setprofile(None)
        return count

    first = calls(ids[:1000])
    calls(ids[1000:2000])
    assert calls(ids[2000:]) <= first * 1.2
    assert max(decoded, default=0) <= 12


class Read(list):
    """Prompt that counts how often it is read."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()

    def __getitem__(self, where):
        self.times += 1
        return super().__getitem__(where)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unknown", [False, True])
def test_long_prompt_without_text_is_not_read(name, unknown, monkeypatch):
    tokenizer = load(name)
    words = tokenizer.encode("hello you", add_special_tokens=False)
    special = sorted(tokenizer.special_token_ids)[0]
    expected = Detokenizer(tokenizer, [special]).push(words, final=True)
    taken, asked = [], []
    take, ask = _PieceStream._bytes, tokenizer.backend.id_to_token
    backend = SimpleNamespace(id_to_token=lambda token_id: asked.append(token_id) or ask(token_id))
    prompt = Read([special, 10**6 if unknown else special] * 50_000)
    with monkeypatch.context() as patched:
        patched.setattr(
            _PieceStream, "_bytes", lambda stream, token_id: taken.append(token_id) or take(stream, token_id)
        )
        patched.setattr(tokenizer, "_backend", backend)
        first = Detokenizer(tokenizer, prompt)
        times = prompt.times
        second = Detokenizer(tokenizer, prompt, sibling=first)
    assert len(taken) + len(asked) < 100 and prompt.times == times < 10
    assert first.push(words, final=True) == second.push(words, final=True) == expected


@pytest.mark.parametrize("name", NAMES)
@given(prompt=texts, text=texts, cut=st.integers(0, 60))
@settings(max_examples=30, deadline=None)
def test_siblings_return_the_same_text(name, prompt, text, cut):
    tokenizer = load(name)
    before = tokenizer.encode(prompt)[:cut]
    ids = tokenizer.encode(text, add_special_tokens=False)
    first = Detokenizer(tokenizer, before)
    expected = first.push(ids, final=True)
    assert Detokenizer(tokenizer, before, sibling=first).push(ids, final=True) == expected


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        ("<|im_start|>", "a<|im_start|>b", "a"),
        ("\n<|im_start|>user", "a\n<|im_start|>user b", "a"),
        ("\n<|im_start|>user", "a\n<|im_start|>tool b", None),
        ("<|im_start|>", "ab", None),
        ("ab", "a<|im_start|>b", None),
    ],
)
def test_stop_strings_with_skipped_special_tokens(stop: str, text: str, expected: str | None, include: bool) -> None:
    """They match as if the tokens were part of the text, which does not contain them."""
    backend = toys.byte_level()
    backend.add_special_tokens(["<|im_start|>"])
    tokenizer = Tokenizer(backend, {})
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts, detokenizer = stream(tokenizer, [], [[token] for token in ids], stop=[stop], include_stop=include)
    if expected is None:
        assert detokenizer.stopped == ("ab" if stop == "ab" else None)
        assert "".join(parts) == (("ab" if include else "") if stop == "ab" else text.replace("<|im_start|>", ""))
    else:
        assert detokenizer.stopped == stop and "".join(parts) == expected + (stop if include else "")
