"""The tasks: which facts each hides in a document, and what it asks for at the end. Knows no tokens and no model.

Formats are plain completions in words that stand in the text before or in an example, which a small base model can go on with.

passkey: one number, told twice, among others of other names (Mohtashami and Jaggi, "Landmark attention", 2305.16300).
needle: a number for each of several keys, at even depths (Kamradt's test, with RULER's wording, 2404.06654).
recall: words for many keys, scattered (key-value retrieval as in "Lost in the middle", 2307.03172).
multihop: a value, and names that each stand for the one before (RULER's variable tracking): only the last name is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

DIGITS = 5
CHOICES = 4  # the right one and what it is told from
_OTHER_NUMBERS = ("order", "house", "phone")  # what the pass key is told from
_NEEDLES = 9
_RECORDS, _ASKED_RECORDS = 12, 9
_CHAINS, _HOPS = 6, 2


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence that stands at a depth of the document: 0 the beginning, 1 the end."""

    depth: float
    text: str


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """One question. text: what follows the document, up to the answer. wrong: answers of the same kind.

    depth: of the fact that has the answer.
    """

    depth: float
    text: str
    answer: str
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TaskContent:
    facts: list[Fact]
    questions: list[TaskQuestion]


class Materials:
    """What one document's tasks draw from: things and numbers, each handed out once."""

    def __init__(self, rng: random.Random, things: Iterator[str]) -> None:
        self.rng, self._things = rng, things
        self._numbers: set[str] = set()

    def thing(self) -> str:
        return next(self._things)

    def number(self) -> str:
        while True:
            number = str(self.rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
            if number not in self._numbers:
                self._numbers.add(number)
                return number

    def wrong(self, among: list[str], right: str) -> tuple[str, ...]:
        """Other values of the document, then numbers that it does not have."""
        others = [value for value in among if value != right]
        chosen = self.rng.sample(others, min(len(others), CHOICES - 1))
        return (*chosen, *(self.number() for _ in range(CHOICES - 1 - len(chosen))))


def passkey(materials: Materials) -> TaskContent:
    key, depth = materials.number(), materials.rng.random()
    others = [materials.number() for _ in _OTHER_NUMBERS]
    facts = [Fact(depth, f"The pass key is {key}. Remember it. {key} is the pass key.")]
    for name, number in zip(_OTHER_NUMBERS, others, strict=True):
        facts.append(Fact(materials.rng.random(), f"The {name} number is {number}."))
    return TaskContent(
        facts, [TaskQuestion(depth, "What is the pass key? The pass key is", key, materials.wrong(others, key))]
    )


def needle(materials: Materials) -> TaskContent:
    needles = [(place / (_NEEDLES - 1), materials.thing(), materials.number()) for place in range(_NEEDLES)]
    values = [value for _, _, value in needles]

    def statement(key: str) -> str:
        return f"The special magic number for {key} is:"

    return TaskContent(
        [Fact(depth, f"{statement(key)} {value}.") for depth, key, value in needles],
        [
            TaskQuestion(
                depth,
                f"What is the special magic number for {key} mentioned in the text above? {statement(key)}",
                value,
                materials.wrong(values, value),
            )
            for depth, key, value in needles
        ],
    )


def recall(materials: Materials) -> TaskContent:
    records = [(materials.rng.random(), materials.thing(), materials.thing()) for _ in range(_RECORDS)]
    (_, *example), asked, values = records[0], records[1 : 1 + _ASKED_RECORDS], [value for *_, value in records[1:]]
    return TaskContent(
        [Fact(depth, f"Entry: {key} means {value}.") for depth, key, value in records],
        [
            TaskQuestion(
                depth,
                f"Entry: {example[0]} means {example[1]}.\nEntry: {key} means",
                value,
                materials.wrong(values, value),
            )
            for depth, key, value in asked
        ],
    )


def multihop(materials: Materials) -> TaskContent:
    facts, ends = [], []
    for _ in range(_CHAINS):
        depths = sorted(materials.rng.random() for _ in range(_HOPS + 1))
        names, value = [materials.thing() for _ in depths], materials.number()
        facts += _chain(names, value, depths)
        ends.append((depths[0], names[-1], value))
    values = [value for *_, value in ends]
    names, shown = [materials.thing() for _ in range(_HOPS + 1)], materials.number()
    example = " ".join(fact.text for fact in _chain(names, shown, [0.0] * len(names)))
    example += f" So the value of {names[-1]} is {shown}.\n"
    return TaskContent(
        facts,
        [
            TaskQuestion(depth, f"{example}So the value of {name} is", value, materials.wrong(values, value))
            for depth, name, value in ends
        ],
    )


def _chain(names: list[str], value: str, depths: list[float]) -> list[Fact]:
    sentences = [f"Let {names[0]} be {value}."]
    sentences += [f"Let {name} be the same as {before}." for before, name in pairwise(names)]
    return [Fact(depth, text) for depth, text in zip(depths, sentences, strict=True)]


TASKS: dict[str, Callable[[Materials], TaskContent]] = {
    "passkey": passkey,
    "needle": needle,
    "recall": recall,
    "multihop": multihop,
}
# The loss of tokens that a long context helps with: nothing is hidden for it and nothing asked.
KEY_TOKENS = "key-tokens"
ALL_TASKS = (*TASKS, KEY_TOKENS)
