"""Asks the questions of one document under every candidate, all in one batch. Computes each distinct reading once.

A reading is the document under one rotation and one rule of what is seen: the loss of its segment, and the log-probability of
every choice of every question. The first text of a reading is the document; what follows finds it in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.engine.api.context import ContextRule
from windlass.server.cli.rope.kept_lines import ResultLog, result_key
from windlass.server.cli.rope.sweep_progress import SweepProgress
from windlass.server.cli.rope.tasks.candidates import TaskCandidate
from windlass.server.cli.rope.tasks.documents import Document

if TYPE_CHECKING:
    from windlass.engine.offline.batch_scoring import BatchScorer, TextToScore

_SHORT_SHARE = 8  # the short context that key tokens are told by is so small a part of the long one
_VERSION = 1  # of the way texts are laid out; raise it where equal documents are read in another way


@dataclass(frozen=True, slots=True)
class Reading:
    """What one document gave. choices: by question, the log-probability of each choice; exact: whether greedy decoding writes the
    right one, token by token. segment: log-probabilities of the document's last tokens, empty where nobody asked."""

    choices: tuple[tuple[float, ...], ...]
    exact: tuple[bool, ...]
    segment: tuple[float, ...]


class ReadingLog:
    """Readings known so far; where `path` is given, they are kept in that file."""

    def __init__(self, path: Path | None = None) -> None:
        self._known: dict[str, Reading] = {}
        self._lines = ResultLog(path, self._take)

    def _take(self, entry: Any) -> None:
        choices = tuple(tuple(float(value) for value in row) for row in entry["choices"])
        exact, segment = tuple(bool(value) for value in entry["exact"]), tuple(map(float, entry["segment"]))
        self._known[str(entry["key"])] = Reading(choices, exact, segment)

    def find(self, key: str) -> Reading | None:
        return self._known.get(key)

    def add(self, key: str, reading: Reading, *, scaling: str, length: int, document: int) -> None:
        """Remember a reading, and append it to the file at once. Raises LoadError where that fails."""
        self._known[key] = reading
        self._lines.append(
            key,
            scaling=scaling,
            length=length,
            document=document,
            choices=[[round(value, 5) for value in row] for row in reading.choices],
            exact=list(reading.exact),
            segment=[round(value, 5) for value in reading.segment],
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """A reading as texts for the engine, and how to find it again."""

    key: str
    name: str
    texts: list[TextToScore]
    with_segment: bool

    @property
    def work(self) -> int:
        """Tokens that pass through the model, about: the document once, then what follows it and half a block each."""
        first = len(self.texts[0].token_ids)
        return first + sum(len(text.token_ids) - text.first + 24 for text in self.texts[1:])


class RetrievalRunner:
    """Readings of documents under candidates. with_segment: whether the loss of segments is wanted."""

    def __init__(
        self,
        scorer: BatchScorer,
        candidates: Sequence[TaskCandidate],
        trained_len: int,
        result_log: ReadingLog,
        progress: SweepProgress,
        *,
        with_segment: bool,
    ) -> None:
        self._scorer, self._candidates, self._trained_len = scorer, candidates, trained_len
        self._result_log, self._progress, self._with_segment = result_log, progress, with_segment
        self._plain = next(candidate for candidate in candidates if candidate.kind == "none")

    def announce(self, document: Document) -> None:
        """Count the readings to come, leaving out those that are known."""
        for layout in self._missing(document):
            self._progress.expect(layout.work)

    def is_known(self, document: Document) -> bool:
        """Whether every reading of it was kept."""
        return not self._missing(document)

    def __call__(self, document: Document) -> tuple[dict[str, Reading], tuple[float, ...]]:
        """By candidate; and the segment's log-probabilities after a short context, empty where nobody asked."""
        layouts = self._missing(document)
        if layouts:
            self._progress.begin(f"{document.length:,} tokens, document {document.number + 1}")
            self._run(document, layouts)
        found = {c.name: self._known(self._layout(document, c).key) for c in self._candidates}
        short = self._known(self._short(document).key).segment if self._with_segment else ()
        return found, short

    def _known(self, key: str) -> Reading:
        reading = self._result_log.find(key)
        if reading is None:
            raise RuntimeError(f"reading {key} was not made")
        return reading

    def _missing(self, document: Document) -> list[_Layout]:
        wanted = [self._layout(document, candidate) for candidate in self._candidates]
        if self._with_segment:
            wanted.append(self._short(document))
        by_key = {layout.key: layout for layout in reversed(wanted)}  # of equal ones the first gives its name
        return [layout for key, layout in reversed(by_key.items()) if self._result_log.find(key) is None]

    def _run(self, document: Document, layouts: list[_Layout]) -> None:
        owners = [(layout, index) for layout in layouts for index in range(len(layout.texts))]
        texts = [layout.texts[index] for layout, index in owners]
        left = {layout.key: len(layout.texts) for layout in layouts}
        entries: dict[str, dict[int, tuple[tuple[float, bool], ...]]] = {layout.key: {} for layout in layouts}
        before = sum(layout.work for layout in layouts)
        done = 0

        def computed(tokens: int) -> None:
            nonlocal done
            step = min(tokens, before - done)  # the announced work is about right, and a bar ends at its end
            done += step
            self._progress.computed(step)

        for place, scored in self._scorer.scores(texts, computed):
            layout, index = owners[place]
            entries[layout.key][index] = tuple((entry.logprob, entry.rank == 1) for entry in scored)
            left[layout.key] -= 1
            if not left[layout.key]:
                if layout is layouts[-1] and before > done:
                    computed(before - done)
                self._finish(document, layout, [entries[layout.key][i] for i in range(len(layout.texts))])

    def _finish(self, document: Document, layout: _Layout, scored: list[tuple[tuple[float, bool], ...]]) -> None:
        segment: tuple[float, ...] = ()
        if layout.with_segment:
            segment, scored = tuple(logprob for logprob, _ in scored[0]), scored[1:]
        choices, exact = [], []
        for question in document.questions if scored else ():
            own, scored = scored[: len(question.choices)], scored[len(question.choices) :]
            choices.append(tuple(sum(logprob for logprob, _ in entries) for entries in own))
            exact.append(all(first for _, first in own[0]))
        reading = Reading(tuple(choices), tuple(exact), segment)
        self._result_log.add(layout.key, reading, scaling=layout.name, length=document.length, document=document.number)
        right = sum(row[0] == max(row) for row in choices)
        summary = f"{right} of {len(choices)} answers chosen, {sum(exact)} written" if choices else "segment read"
        self._progress.finished(f"{layout.name}: {document.length:,} tokens, document {document.number + 1}: {summary}")

    def _layout(self, document: Document, candidate: TaskCandidate) -> _Layout:
        from windlass.engine.offline.batch_scoring import TextToScore

        as_read = self._plain if document.length <= candidate.plain_to else candidate
        ids = document.ids
        cut = as_read.cut_to
        if cut is not None:
            ids = ids[: document.head] + ids[len(ids) - (cut - document.tail - document.head) :]
        scaling, rule = as_read.parsed, as_read.context

        def text(token_ids: tuple[int, ...], first: int) -> TextToScore:
            return TextToScore(token_ids, first, scaling, as_read.policy, rule)

        texts = [text(ids, len(ids) - document.segment)] if self._with_segment else []
        for question in document.questions:
            start = (*ids, *question.ending)
            texts += [text((*start, *choice), len(start)) for choice in question.choices]
        what = [self._scorer.fingerprint(texts[0]), _rule_key(rule), cut, self._with_segment, _VERSION]
        return _Layout(self._key(document, what), candidate.name, texts, self._with_segment)

    def _short(self, document: Document) -> _Layout:
        """The segment behind an eighth of the context that the model knows, without scaling."""
        from windlass.engine.offline.batch_scoring import TextToScore

        before = min(document.length, self._trained_len) // _SHORT_SHARE
        ids = document.ids[-(before + document.segment) :]
        text = TextToScore(ids, before, self._plain.parsed)
        return _Layout(self._key(document, ["short", before, _VERSION]), "a short context", [text], True)

    def _key(self, document: Document, what: list[Any]) -> str:
        return result_key(self._scorer.identity, document.digest, what)


def _rule_key(rule: ContextRule) -> list[int | None]:
    return [rule.attention_window, rule.attention_sinks]
