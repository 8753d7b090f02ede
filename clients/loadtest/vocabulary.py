"""What prompts are made of: ids of ordinary tokens where the server tells them, else words.

A prompt is put together as the bytes of its JSON, so that building one takes next to no time. Knows nothing of
requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from windlass.clients.loadtest.errors import LoadTestError
from windlass.clients.loadtest.target import Control, Server

WORDS = (
    "the of and to in that is was he for it with as his on be at by had not are but from or have an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said what its about than "
    "into them can only other time new some could these two may first then do any like my now over such our man me even "
    "most made after also did many before must through back years where much your way well down should because each "
    "just those people how too little state good very make world still own see men work long get here between both life "
    "being under never day same another know while last might us great old year off come since against go came right "
    "used take three house water light hand part place number name side form head under city land story word sound"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Pieces to draw prompts from.

    ids: whether the pieces are token ids, else words. exact: whether a prompt of n pieces is known to be n + `overhead`
    tokens. overhead: tokens that the server adds around a prompt (a template's, a beginning-of-text). first: the word
    every text begins with; its place at the start is counted in `overhead`. turn_overhead: tokens that a chat's template
    adds around each further answer and message; 0 where that is not known.
    """

    pieces: Sequence[bytes]
    ids: bool
    exact: bool
    overhead: int = 0
    first: bytes = b""
    turn_overhead: int = 0

    def draw(self, random: Random, count: int) -> bytes:
        """`count` pieces at random, joined."""
        return self._glue.join(random.choices(self.pieces, k=count))

    def join(self, *parts: bytes) -> bytes:
        """Parts one after the other; empty ones leave no trace."""
        return self._glue.join([part for part in parts if part])

    def prompt(self, joined: bytes) -> bytes:
        """The JSON value of a whole prompt."""
        return b"[" + joined + b"]" if self.ids else b'"' + self.opening(joined) + b'"'

    def opening(self, joined: bytes) -> bytes:
        """The text of a prompt, with its first word; nothing is to be escaped in it."""
        return self.join(self.first, joined)

    def from_ids(self, token_ids: Sequence[int]) -> bytes:
        """Known token ids as a part of a prompt."""
        return b",".join(b"%d" % token_id for token_id in token_ids)

    @property
    def _glue(self) -> bytes:
        return b"," if self.ids else b" "


async def find_vocabulary(control: Control, server: Server, *, chat: bool, text: bool, size: int | None) -> Vocabulary:
    """The best vocabulary for this server. text: prompts must be text, even where ids would do.

    size: number of tokens of the vocabulary, as the person knows it. Where the server tokenizes, ids are those of
    ordinary words and syllables, so no special token is among them.
    """
    if not (chat or text):
        if size is not None:
            return _middle_of(size)
        answer = await control.tokenize(model=server.model, prompt=_sample_text(), add_special_tokens=False)
        if answer is not None:
            return Vocabulary(pieces=[b"%d" % item for item in sorted(set(answer["tokens"]))], ids=True, exact=True)
    return await _words(control, server, chat)


def _middle_of(size: int) -> Vocabulary:
    """Ids from the middle half: special tokens stand at the beginning and at the end."""
    if size < 8:
        raise LoadTestError(f"--vocab-size should be the number of tokens the model knows, got {size}")
    return Vocabulary(pieces=[b"%d" % item for item in range(size // 4, 3 * size // 4)], ids=True, exact=True)


def _sample_text() -> str:
    """Words, syllables and numbers: what a tokenizer splits into many different tokens."""
    random = Random("vocabulary")
    vowels, others = "aeiou", "bcdfghjklmnprstvwz"
    syllables = [
        "".join(random.choice(others) + random.choice(vowels) + random.choice(others) for _ in range(count))
        for count in (1, 2, 3)
        for _ in range(1500)
    ]
    numbers = [str(random.randrange(10_000)) for _ in range(200)]
    return " ".join([*WORDS, *(word.capitalize() for word in WORDS), *syllables, *numbers])


async def _words(control: Control, server: Server, chat: bool) -> Vocabulary:
    """Words that are one token each after a space, as far as the server tells."""
    first, *others = WORDS
    everything = Vocabulary(pieces=[word.encode() for word in others], ids=False, exact=False, first=first.encode())
    words: dict[str, Any] = {"model": server.model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    answer = await control.tokenize(**words)
    if answer is not None and "offsets" not in answer:
        answer = await control.tokenize(**words, return_token_strs=True)
    single = _single_tokens(answer) if answer is not None else []
    if len(single) < 8:
        return everything
    # The tokens around a prompt, measured on one of known length: the first word may be several tokens.
    probe = 8
    text = " ".join([first, *single[:probe]])
    asked: dict[str, Any] = {"prompt": text}
    if chat:
        asked = {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
    counted = await control.count(model=server.model, **asked)
    if counted is None:
        return everything
    turn = 0
    if chat:
        further = " ".join(single[:probe])
        asked["messages"] += [{"role": role, "content": further} for role in ("assistant", "user")]
        turn = max(0, (await control.count(model=server.model, **asked) or 0) - counted - 2 * probe)
    return Vocabulary(
        pieces=[word.encode() for word in single],
        ids=False,
        exact=True,
        overhead=counted - probe,
        first=first.encode(),
        turn_overhead=turn,
    )


def _single_tokens(answer: Mapping[str, Any]) -> list[str]:
    """The words of WORDS but the first that one token each covers, its space included."""
    try:
        spans = _spans(answer)
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    found, start = [], 0
    for word in WORDS:
        end = start + len(word)
        if start and (start - 1, end) in spans:
            found.append(word)
        start = end + 1
    return list(dict.fromkeys(found))


def _spans(answer: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Where each token of the joined WORDS begins and ends, by the server's offsets, else by the tokens' texts."""
    if "offsets" in answer:
        return {(int(start), int(end)) for start, end in answer["offsets"]}
    # Tokenizers write the space as one of these; some put one before the text.
    pieces = [piece.replace("Ġ", " ").replace("▁", " ") for piece in answer["token_strs"]]
    text, joined = " ".join(WORDS), "".join(pieces)
    if joined not in (text, " " + text):
        raise ValueError
    ends = list(itertools.accumulate(map(len, pieces), initial=len(text) - len(joined)))
    return set(itertools.pairwise(ends))
