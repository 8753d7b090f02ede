"""Retrieval documents: texts of an exact length in tokens with hidden facts, and questions about them.

Tasks are plain completions that a small base model can continue. A document is prose, or Python code for the tasks about code.
passkey: one number, stated twice, among others with other names (Mohtashami and Jaggi, "Landmark attention", 2305.16300).
needle: a number for each of several keys, at even depths (Kamradt's test, with RULER's wording, 2404.06654).
recall: words for many keys at random depths (key-value retrieval as in "Lost in the middle", 2307.03172).
multihop: a value, and names that each refer to the previous one (RULER's variable tracking); the last name's value is queried.
tally: deliveries to several stores; the item that was delivered most often to a store (RULER's frequent words extraction).
function: the name of the function with a described purpose, as in RepoQA (2406.06025).
calls: the value that a function returns, which calls a function that calls another one (multihop, in code).
Generated prose, used if no text is given, repeats each person's trade and town, so predicting these words needs distant text.
Generated code is functions of random names.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

from windlass.engine.errors import LoadError
from windlass.lab.sweep_texts import Encoder

# Keys, values and names of facts. No two tasks of a document share one.
THINGS = tuple(
    """
    anchor apple arrow autumn badge bamboo banjo barrel basket beacon bottle branch bridge bronze bucket button cabin
    candle canyon carpet castle cedar cherry circle cobalt coffee comet copper coral cotton cradle crane crystal curtain
    daisy desert diamond dragon drum eagle ember engine falcon feather fiddle flame forest fossil fountain garden garlic
    ginger glacier globe granite guitar hammer harbor harvest hazel helmet hickory honey horizon island ivory jacket
    jasmine jungle kernel kettle ladder lagoon lantern laurel lemon leopard lily lion lizard lotus magnet mango maple
    marble meadow melon mirror monkey mountain museum needle nickel nutmeg oak ocean olive onion orange orchid otter
    oyster paddle palace panther parrot peach pebble pepper piano pillow pine planet plaza pocket pony poppy prairie
    puzzle pyramid quartz rabbit raven ribbon river rocket saddle saffron salmon sapphire scarf shadow shell silver
    spider spring spruce statue stone summer sunset swan temple thunder tiger timber tower trumpet tulip tunnel turtle
    valley velvet violet walnut whale willow window winter wolf zebra
    """.split()
)

FIRST_NAMES = tuple(
    """
    Adam Alice Anna Arthur Beth Carl Clara David Diana Edward Ellen Emma Eric Ethan Frank George Grace Hannah Harold
    Helen Henry Irene Jack James Jane Julia Karen Kevin Laura Lewis Lucy Maria Martin Mary Nancy Oliver Oscar Paul Peter
    Rachel Robert Rose Ruth Samuel Sarah Simon Susan Thomas Victor Walter
    """.split()
)

LAST_NAMES = tuple(
    """
    Baker Barnes Bell Bennett Brooks Burton Carter Clark Cole Collins Cooper Cross Davis Dixon Evans Fisher Foster Gibson
    Grant Gray Green Hall Harris Hill Holmes Hughes Hunt Jenkins Johnson Kelly King Lane Lewis Marsh Mason Mills Moore
    Morgan Murray Nelson Parker Porter Price Reed Rogers Shaw Stone Turner Walker Young
    """.split()
)

TRADES = tuple(
    """
    actor architect artist baker barber builder butcher captain carpenter chemist clerk cook dancer doctor driver editor
    farmer fisherman gardener guard hunter judge lawyer librarian merchant miller miner nurse painter pilot poet priest
    printer sailor singer soldier surgeon tailor teacher writer
    """.split()
)

TOWNS = tuple(
    """
    Aberdeen Athens Berlin Boston Bristol Cairo Cardiff Chester Chicago Dallas Delhi Denver Dover Dublin Durham Florence
    Geneva Glasgow Hamburg Houston Kingston Lima Lisbon London Madrid Milan Moscow Munich Naples Oslo Oxford Paris
    Phoenix Prague Quebec Rome Salem Sydney Tokyo Toronto Vienna Warsaw York Zurich
    """.split()
)

EVENTS = tuple(
    """
    asked about the price of bread in the market|came home late because the road was closed|lost a letter on the way to
    the station|bought a small boat from an old friend|spent the whole morning in the library|told a long story about
    the war|watched the rain from the kitchen window|planted a row of trees behind the house|wrote to the council about
    the broken bridge|waited for the train with two heavy bags|found a coin under the floor of the barn|read the paper
    twice and said nothing|invited the neighbours to supper|walked along the river until it was dark|painted the door of
    the shop again|slept badly and rose before the sun|carried the chairs into the hall|sold the last of the winter
    apples|counted the money and locked the drawer|heard the bells from the other side of town
    """.replace("\n", " ").split("|")
)

_SENTENCES_PER_PARAGRAPH = 5


def paragraphs(rng: random.Random, cast: int) -> Iterator[str]:
    """Endless paragraphs about random people. cast: their number, the mean distance of repetitions in sentences."""
    names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    people = [(name, rng.choice(TRADES), rng.choice(TOWNS)) for name in rng.sample(names, min(cast, len(names)))]
    while True:
        sentences = []
        for _ in range(_SENTENCES_PER_PARAGRAPH):
            name, trade, town = rng.choice(people)
            event = " ".join(rng.choice(EVENTS).split())
            sentences.append(f"{name}, the {trade} from {town}, {event}.")
        yield " ".join(sentences)


_PARAMETERS = ("count", "items", "limit", "name", "offset", "path", "rate", "size", "total", "value")

_STATEMENTS = tuple(
    """
    if {a} is None:
        return {b}
    |{a} = max({a}, {n})
    |for index in range({n}):
        {a} += index * {b}
    |{thing} = {a} - {b} * {n}
    |if {a} > {n}:
        {b} = {a} // {n}
    |while {a} < {b}:
        {a} += {n}
    |{thing} = [{a} + index for index in range({n})]
    |{b} = ({a} + {n}) % 97
    |assert {a} != {b}, "{thing}"
    |print(f"{thing}: {{{a}}} of {n}")
    """.strip().split("|")
)


def functions(rng: random.Random) -> Iterator[str]:
    """Endless Python functions, each with an empty line before it."""
    while True:
        name, thing = rng.sample(THINGS, 2)
        a, b = rng.sample(_PARAMETERS, 2)
        lines = [f"def {rng.choice(('check', 'load', 'merge', 'scan', 'split', 'update'))}_{name}_{thing}({a}, {b}):"]
        for statement in rng.sample(_STATEMENTS, rng.randrange(2, 6)):
            lines.append("    " + statement.rstrip().format(a=a, b=b, n=rng.randrange(2, 90), thing=rng.choice(THINGS)))
        yield "\n\n\n" + "\n".join([*lines, f"    return {rng.choice((a, b))}"])


DIGITS = 5

CHOICES = 4  # the right answer and wrong ones

_OTHER_NUMBERS = ("order", "house", "phone")  # distractors of the pass key

_NEEDLES = 9

_RECORDS, _ASKED_RECORDS = 12, 9

_CHAINS, _HOPS = 6, 2

_STORES, _DELIVERIES = 4, (5, 2, 2, 2)  # of each item to a store

_DESCRIBED = 9


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence hidden at a depth of the document: 0 the beginning, 1 the end."""

    depth: float
    text: str


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """One question as text. text: follows the document, up to the answer. wrong: answers of the same kind.

    depth: of the fact that contains the answer.
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
    """Random things and numbers for the tasks of one document, each used once."""

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
        """Other values of the document, then numbers that are not in it."""
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


def tally(materials: Materials) -> TaskContent:
    """The depth of a question is that of its first delivery."""
    facts, questions = [], []

    def deliveries(store: str, items: list[str]) -> list[str]:
        return [
            f"Delivery to the {store} store: {item}."
            for item, times in zip(items, _DELIVERIES, strict=True)
            for _ in range(times)
        ]

    def question(store: str) -> str:
        return f"The item that was delivered most often to the {store} store is:"

    shown, *stores = ((materials.thing(), [materials.thing() for _ in _DELIVERIES]) for _ in range(_STORES + 1))
    example = materials.rng.sample(deliveries(*shown), sum(_DELIVERIES))
    before = f"{' '.join(example)} {question(shown[0])} {shown[1][0]}.\n"
    for store, items in stores:
        found = [Fact(materials.rng.random(), text) for text in deliveries(store, items)]
        facts += found
        depth = min(fact.depth for fact in found)
        questions.append(TaskQuestion(depth, before + question(store), items[0], tuple(items[1:])))
    return TaskContent(facts, questions)


def function(materials: Materials) -> TaskContent:
    described = [(materials.rng.random(), materials.thing(), *_named_function(materials)) for _ in range(_DESCRIBED)]
    names = [name for *_, name, _ in described]

    def purpose(thing: str) -> str:
        return f"Return the price of one {thing}."

    def definition(thing: str, name: str, number: str) -> str:
        return f'def {name}(count):\n    """{purpose(thing)}"""\n    return count * {number}'

    shown, (name, number) = materials.thing(), _named_function(materials)
    before = "# Which function has the docstring {!r}? Its name is"
    example = f"{definition(shown, name, number)}\n\n\n{before.format(purpose(shown))} {name}.\n"
    return TaskContent(
        [Fact(depth, definition(thing, name, number)) for depth, thing, name, number in described],
        [
            TaskQuestion(depth, example + before.format(purpose(thing)), name, materials.wrong(names, name))
            for depth, thing, name, _ in described
        ],
    )


def _named_function(materials: Materials) -> tuple[str, str]:
    """A function name without a meaning, and a number."""
    return f"{materials.thing()}_{materials.thing()}", materials.number()


def calls(materials: Materials) -> TaskContent:
    facts, ends = [], []
    for _ in range(_CHAINS):
        depths = sorted(materials.rng.random() for _ in range(_HOPS + 1))
        names, value = [materials.thing() for _ in depths], materials.number()
        facts += [Fact(depth, text) for depth, text in zip(depths, _call_chain(names, value), strict=True)]
        ends.append((depths[0], names[-1], value))
    values = [value for *_, value in ends]
    names, shown = [materials.thing() for _ in range(_HOPS + 1)], materials.number()
    example = "\n\n\n".join(_call_chain(names, shown)) + f"\n\n\n# {names[-1]}() returns {shown}.\n"
    return TaskContent(
        facts,
        [
            TaskQuestion(depth, f"{example}# {name}() returns", value, materials.wrong(values, value))
            for depth, name, value in ends
        ],
    )


def _call_chain(names: list[str], value: str) -> list[str]:
    returned = [value, *(f"{name}()" for name in names[:-1])]
    return [f"def {name}():\n    return {what}" for name, what in zip(names, returned, strict=True)]


PROSE_TASKS: dict[str, Callable[[Materials], TaskContent]] = {
    "passkey": passkey,
    "needle": needle,
    "recall": recall,
    "multihop": multihop,
    "tally": tally,
}

CODE_TASKS: dict[str, Callable[[Materials], TaskContent]] = {"function": function, "calls": calls}

TASKS = PROSE_TASKS | CODE_TASKS

# The loss of tokens that a long context makes more likely; it needs no facts and no questions.
KEY_TOKENS = "key-tokens"

ALL_TASKS = (*TASKS, KEY_TOKENS)

DocumentKind = Literal["prose", "code"]

_HEADS: dict[DocumentKind, str] = {
    "prose": "Below is a long text. Facts are hidden in it: remember them, they are asked for at the end.",
    "code": "# Below is a long program. Remember its functions: they are asked for at the end.",
}

_MAX_SEGMENT = 512

_SENTENCE_TOKENS = 20  # estimate for generated prose

_MAX_FACT_SHARE = 0.5  # of a document


@dataclass(frozen=True, slots=True)
class Question:
    """ending: tokens after the document, up to where the choices differ. choices: tokens of each answer with a full stop, the
    right one first. answer_len: number of tokens of the right one without the full stop, which some models join to a line break.
    """

    task: str
    depth: float
    ending: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer_len: int


@dataclass(frozen=True, slots=True)
class Document:
    """A document and its questions; ids with any ending and choice are at most `length` tokens. number: among those of its kind.

    head: number of leading tokens that remain when the text is cut. segment: number of last tokens, which contain no fact and
    whose loss is measured. digest: of all tokens.
    """

    length: int
    number: int
    ids: tuple[int, ...]
    head: int
    segment: int
    questions: tuple[Question, ...]
    digest: str
    kind: DocumentKind = "prose"

    @property
    def label(self) -> str:
        return f"{self.length:,} tokens, {self.kind} {self.number + 1}"

    @property
    def tail(self) -> int:
        """Largest number of tokens after the document."""
        return max((_tail(question) for question in self.questions), default=0)


def _tail(question: Question) -> int:
    return len(question.ending) + max(map(len, question.choices))


class DocumentMaker:
    """Makes documents of one kind, which are determined by length, number, seed, tasks, texts and tokenizer.

    texts: contents by name, empty for generated ones. trained_len: determines the distance of repetitions in generated prose.
    """

    def __init__(
        self,
        encoder: Encoder,
        tasks: Sequence[str],
        texts: dict[str, str],
        *,
        seed: int,
        trained_len: int,
        kind: DocumentKind = "prose",
    ) -> None:
        self._encoder, self._seed, self._trained_len, self._kind = encoder, seed, trained_len, kind
        made = PROSE_TASKS if kind == "prose" else CODE_TASKS
        self._tasks = {task: made[task] for task in tasks if task in made}
        split = _sentences if kind == "prose" else _definitions
        self._texts = {name: split(text) for name, text in texts.items()}
        # Before a fact. No space for tokenizers that put one before every text.
        space = " " if self._encode("a b") == [*self._encode("a"), *self._encode(" b")] else ""
        self._space = space if kind == "prose" else "\n\n\n"

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False)

    def make(self, length: int, number: int) -> Document:
        """Document `number` of a length. Raises LoadError if the facts do not fit, or the text is too short."""
        rng = random.Random(f"{self._seed} {length} {number}" + ("" if self._kind == "prose" else " code"))
        materials = Materials(rng, iter(rng.sample(THINGS, len(THINGS))))
        facts: list[Fact] = []
        questions: list[Question] = []
        for task, make in self._tasks.items():
            hidden = make(materials)
            facts += hidden.facts
            questions += [self._question(task, asked) for asked in hidden.questions]
        facts.sort(key=lambda fact: fact.depth)
        encoded_facts = [self._encode(self._space + fact.text) for fact in facts]
        head = [*self._encoder.encode(""), *self._encode(_HEADS[self._kind])]
        longest = max(map(_tail, questions), default=0)
        available = length - longest - len(head)
        fact_tokens = sum(map(len, encoded_facts))
        segment = min(_MAX_SEGMENT, length // 8)
        if available - segment < fact_tokens / _MAX_FACT_SHARE:
            least = int((longest + len(head) + fact_tokens / _MAX_FACT_SHARE) * 8 / 7) + 8
            raise LoadError(
                f"--lengths {length}: the facts of {', '.join(self._tasks)} need documents of about {least} tokens and more"
            )
        body = self._body(available - fact_tokens, length, number, rng)
        ids = tuple(chain(head, _hide(encoded_facts, [fact.depth for fact in facts], body, segment)))
        seen = json.dumps([ids, segment, [(q.ending, q.choices) for q in questions]])
        digest = hashlib.sha256(seen.encode()).hexdigest()
        return Document(length, number, ids, len(head), segment, tuple(questions), digest, self._kind)

    def _question(self, task: str, asked: TaskQuestion) -> Question:
        """Tokenize endings together with answers, as in a text; the ending ends where the choices differ."""
        text = "\n\n" + asked.text
        alone = self._encode(text)
        answered = [self._encode(f"{text} {answer}.") for answer in (asked.answer, *asked.wrong)]
        same = 0
        while same < len(alone) and all(ids[same : same + 1] == [alone[same]] for ids in answered):
            same += 1
        choices = tuple(tuple(ids[same:]) for ids in answered)
        open_ended = tuple(self._encode(f"{text} {asked.answer}")[same:])
        answer_len = len(open_ended) if choices[0][: len(open_ended)] == open_ended else len(choices[0])
        return Question(task, asked.depth, tuple(answered[0][:same]), choices, answer_len)

    def _body(self, needed: int, length: int, number: int, rng: random.Random) -> list[list[int]]:
        """Sentences of exactly `needed` tokens in total; the last one is cut."""
        found: list[list[int]] = []
        total = 0
        for sentence in self._stream(length, number, rng):
            ids = self._encode(sentence)
            found.append(ids[: needed - total])
            total += len(found[-1])
            if total == needed:
                return found
        name = list(self._texts)[number % len(self._texts)]
        raise LoadError(
            f"--text {name} has fewer than {needed:,} tokens after the start of document {number + 1}: give a longer "
            "text, or smaller --lengths"
        )

    def _stream(self, length: int, number: int, rng: random.Random) -> Iterator[str]:
        if not self._texts and self._kind == "code":
            return functions(rng)
        if not self._texts:
            # People are repeated after a third of the longest trained distance, on average.
            cast = max(8, min(length, self._trained_len) // 3 // _SENTENCE_TOKENS)
            return (self._lead(s) for paragraph in paragraphs(rng, cast) for s in _sentences(paragraph))
        name = list(self._texts)[number % len(self._texts)]
        sentences = self._texts[name]
        # Further documents of one text start at random sentences of its first half.
        start = rng.randrange(max(1, len(sentences) // 2)) if number >= len(self._texts) else 0
        return (self._lead(s) for s in sentences[start:])

    def _lead(self, sentence: str) -> str:
        return sentence if sentence.startswith("\n") else self._space + sentence


def _sentences(text: str) -> list[str]:
    """Sentences; the first of a paragraph begins with an empty line."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        parts = [part for part in re.split(r"(?<=[.!?])\s+", paragraph.strip()) if part]
        found += [f"\n\n{part}" if place == 0 else part for place, part in enumerate(parts)]
    return found


def _definitions(text: str) -> list[str]:
    """Parts of a Python file, which begin with an empty line and a function, a class or their decorators."""
    return ["\n\n" + part for part in re.split(r"\n\n+(?=[ \t]*(?:@|def |async def |class ))", text.strip())]


def _hide(encoded_facts: list[list[int]], depths: list[float], body: list[list[int]], segment: int) -> Iterator[int]:
    """Tokens of the body with each fact after the sentence at its depth; depths are relative to the part before the segment."""
    available = sum(map(len, body)) - segment
    waiting = list(zip(depths, encoded_facts, strict=True))[::-1]
    passed = 0
    for sentence in body:
        # A fact comes before a sentence that begins at its depth, or that would reach into the segment.
        while waiting and (passed >= waiting[-1][0] * available or passed + len(sentence) > available):
            yield from waiting.pop()[1]
        yield from sentence
        passed += len(sentence)
    for _, ids in reversed(waiting):
        yield from ids
