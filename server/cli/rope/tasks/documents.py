"""Documents of an exact length in tokens with facts hidden in them, and questions about these. Knows a tokenizer, no model."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from windlass.engine.errors import LoadError
from windlass.server.cli.rope.tasks.kinds import TASKS, Fact, Materials, TaskQuestion
from windlass.server.cli.rope.tasks.prose import paragraphs
from windlass.server.cli.rope.tasks.vocabulary import THINGS
from windlass.server.cli.rope.texts import Encoder

_HEAD = "Below is a long text. Facts are hidden in it: remember them, they are asked for at the end."
_MAX_SEGMENT = 512
_SENTENCE_TOKENS = 20  # of generated prose, about
_MAX_FACT_SHARE = 0.5  # of a document


@dataclass(frozen=True, slots=True)
class Question:
    """ending: tokens behind the document up to where the choices part. choices: tokens of each answer, the right one first."""

    task: str
    depth: float
    ending: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """ids with any ending and choice are at most `length` tokens.

    head: leading tokens that stay where the text is cut. segment: last tokens, which hold no fact; their loss is looked at.
    digest: of everything that is read.
    """

    length: int
    number: int
    ids: tuple[int, ...]
    head: int
    segment: int
    questions: tuple[Question, ...]
    digest: str

    @property
    def tail(self) -> int:
        """Most tokens that follow the document."""
        return max((_tail(question) for question in self.questions), default=0)


def _tail(question: Question) -> int:
    return len(question.ending) + max(map(len, question.choices))


class DocumentMaker:
    """Makes document `number` of a length: the same for the same seed, tasks, texts and tokenizer.

    texts: contents by name, empty for generated prose. trained_len: how far apart generated people come back goes by it.
    """

    def __init__(
        self, encoder: Encoder, tasks: Sequence[str], texts: dict[str, str], *, seed: int, trained_len: int
    ) -> None:
        self._encoder, self._tasks, self._seed, self._trained_len = encoder, tasks, seed, trained_len
        self._texts = {name: _sentences(text) for name, text in texts.items()}
        # Tokenizers that put a space before every text get none from us.
        self._space = " " if self._encode("a b") == [*self._encode("a"), *self._encode(" b")] else ""

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False)

    def make(self, length: int, number: int) -> Document:
        """Raises LoadError where the facts have no room in such a length, or the text is too short for it."""
        rng = random.Random(f"{self._seed} {length} {number}")
        materials = Materials(rng, iter(rng.sample(THINGS, len(THINGS))))
        facts: list[Fact] = []
        questions: list[Question] = []
        for task in self._tasks:
            if task in TASKS:
                hidden = TASKS[task](materials)
                facts += hidden.facts
                questions += [self._question(task, asked) for asked in hidden.questions]
        facts.sort(key=lambda fact: fact.depth)
        encoded_facts = [self._encode(self._space + fact.text) for fact in facts]
        head = [*self._encoder.encode(""), *self._encode(_HEAD)]
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
        return Document(length, number, ids, len(head), segment, tuple(questions), digest)

    def _question(self, task: str, asked: TaskQuestion) -> Question:
        """Endings and answers are tokenized together, as a text is; where the choices part, the ending ends."""
        text = "\n\n" + asked.text
        alone = self._encode(text)
        whole = [self._encode(f"{text} {answer}.") for answer in (asked.answer, *asked.wrong)]
        same = 0
        while same < len(alone) and all(ids[same : same + 1] == [alone[same]] for ids in whole):
            same += 1
        return Question(task, asked.depth, tuple(whole[0][:same]), tuple(tuple(ids[same:]) for ids in whole))

    def _body(self, needed: int, length: int, number: int, rng: random.Random) -> list[list[int]]:
        """Sentences of exactly `needed` tokens together; the last one is cut."""
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
            f"--text {name} has no {needed:,} tokens behind the place where document {number + 1} begins: give a longer "
            "text, or smaller --lengths"
        )

    def _stream(self, length: int, number: int, rng: random.Random) -> Iterator[str]:
        if not self._texts:
            # People come back after a third of the longest distance that the model knows, on average.
            cast = max(8, min(length, self._trained_len) // 3 // _SENTENCE_TOKENS)
            return (self._lead(s) for paragraph in paragraphs(rng, cast) for s in _sentences(paragraph))
        name = list(self._texts)[number % len(self._texts)]
        sentences = self._texts[name]
        # Documents of one text begin at other places: in its first half, at random.
        start = rng.randrange(max(1, len(sentences) // 2)) if number >= len(self._texts) else 0
        return (self._lead(s) for s in sentences[start:])

    def _lead(self, sentence: str) -> str:
        return sentence if sentence.startswith("\n") else self._space + sentence


def _sentences(text: str) -> list[str]:
    """Sentences; the first of a paragraph has the empty line before it."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        parts = [part for part in re.split(r"(?<=[.!?])\s+", paragraph.strip()) if part]
        found += [f"\n\n{part}" if place == 0 else part for place, part in enumerate(parts)]
    return found


def _hide(encoded_facts: list[list[int]], depths: list[float], body: list[list[int]], segment: int) -> Iterator[int]:
    """The body's tokens with each fact behind the sentence at its depth of what stands before the segment."""
    available = sum(map(len, body)) - segment
    waiting = list(zip(depths, encoded_facts, strict=True))[::-1]
    passed = 0
    for sentence in body:
        # A fact comes before a sentence that begins at its depth or would bring the text past it into the segment.
        while waiting and (passed >= waiting[-1][0] * available or passed + len(sentence) > available):
            yield from waiting.pop()[1]
        yield from sentence
        passed += len(sentence)
    for _, ids in reversed(waiting):
        yield from ids
