"""What the tasks came to, as numbers: shares of right answers, losses of key tokens, and differences with their certainty.

Knows no model and no words. Everything derives from the readings of documents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from windlass.clients.loadtest.intervals import Interval, wilson
from windlass.server.cli.rope.sweep_results import CONFIDENCE, interval_ends, rounded
from windlass.server.cli.rope.tasks.candidates import TaskCandidate
from windlass.server.cli.rope.tasks.certainty import PairedDifference, mcnemar, paired_bootstrap
from windlass.server.cli.rope.tasks.documents import Document
from windlass.server.cli.rope.tasks.kinds import CHOICES, TASKS
from windlass.server.cli.rope.tasks.measuring import Reading

# Right: the right answer is likelier than those it is told from, or greedy decoding writes it.
Metric = Literal["chosen", "written"]
METRICS: tuple[Metric, ...] = ("chosen", "written")
# Key tokens (LongPPL, 2410.23771): a long context makes them this many nats likelier than a short one, and likely enough.
KEY_GAIN, KEY_MIN_LOGPROB = 2.0, -2.0
_CLUSTER_DOCUMENTS = 8  # so many documents of a length make documents, not questions, the units of resampling


@dataclass(frozen=True, slots=True)
class DocumentReadings:
    """One document under every candidate, by name. short: its segment's log-probabilities after a short context."""

    document: Document
    readings: dict[str, Reading]
    short: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Share:
    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else math.nan

    @property
    def interval(self) -> Interval | None:
        return wilson(self.hits, self.total, CONFIDENCE) if self.total else None


@dataclass(frozen=True)
class TaskSweep:
    """A whole run. judge: the candidate whose reading tells key tokens. texts: names of files, empty for generated prose.

    refused: names of candidates that this model cannot run, with the reason.
    """

    model: str
    model_name: str
    trained_len: int
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    candidates: tuple[TaskCandidate, ...]
    documents: tuple[DocumentReadings, ...]
    judge: str
    texts: tuple[str, ...] = ()
    seed: int = 1
    kv_cache_dtype: str = "auto"
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def asked_tasks(self) -> tuple[str, ...]:
        """Those with questions."""
        return tuple(task for task in self.tasks if task in TASKS)

    @property
    def plain(self) -> TaskCandidate:
        return next(candidate for candidate in self.candidates if candidate.kind == "none")

    def of_length(self, length: int) -> list[DocumentReadings]:
        return [read for read in self.documents if read.document.length == length]

    def unit(self, length: int) -> str:
        """What differences are resampled by."""
        return "document" if len(self.of_length(length)) >= _CLUSTER_DOCUMENTS else "question"

    def right(self, name: str, length: int, task: str | None, measure: Metric) -> list[list[bool]]:
        """By document, whether each question of a task was answered; task None: of all tasks."""
        return [
            [
                _is_right(read.readings[name], index, measure)
                for index, question in enumerate(read.document.questions)
                if task in (None, question.task)
            ]
            for read in self.of_length(length)
        ]

    def share(self, name: str, length: int, task: str | None, measure: Metric) -> Share:
        answers = [right for document in self.right(name, length, task, measure) for right in document]
        return Share(sum(answers), len(answers))

    def overall(self, name: str, length: int, measure: Metric = "chosen") -> float:
        """The share over the questions of all tasks, which `difference` with task None tells the certainty of."""
        return self.share(name, length, None, measure).value

    def difference(self, first: str, second: str, length: int, task: str | None, measure: Metric) -> PairedDifference:
        """Share of `second` less that of `first`, over the same questions."""
        a, b = (self.right(name, length, task, measure) for name in (first, second))
        apart = [[float(y) - float(x) for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]
        if self.unit(length) == "question":
            apart = [[value] for document in apart for value in document]
        found = paired_bootstrap(apart)
        flat = [[right for document in side for right in document] for side in (a, b)]
        return PairedDifference(found.mean, found.interval, mcnemar(*flat))

    def by_depth(self, name: str, length: int, task: str, measure: Metric) -> dict[float, Share]:
        found: dict[float, list[bool]] = {}
        for read in self.of_length(length):
            for index, question in enumerate(read.document.questions):
                if question.task == task:
                    found.setdefault(question.depth, []).append(_is_right(read.readings[name], index, measure))
        return {depth: Share(sum(right), len(right)) for depth, right in sorted(found.items())}

    def key_losses(self, name: str, length: int) -> list[NDArray[np.float64]]:
        """By document, nats of each key token; the judge's reading and the short one say which these are."""
        found = []
        for read in self.of_length(length):
            long, short = (np.array(values) for values in (read.readings[self.judge].segment, read.short))
            key = (long - short > KEY_GAIN) & (long > KEY_MIN_LOGPROB)
            found.append(-np.array(read.readings[name].segment)[key])
        return found

    def key_perplexity(self, name: str, length: int) -> float:
        losses = np.concatenate(self.key_losses(name, length))
        return math.exp(min(float(losses.mean()), 700.0)) if losses.size else math.nan

    def key_difference(self, first: str, second: str, length: int) -> PairedDifference:
        """Nats per key token of `second` less those of `first`. Units: documents, or tokens where these are few."""
        pairs = zip(self.key_losses(first, length), self.key_losses(second, length), strict=True)
        apart = [(b - a).tolist() for a, b in pairs]
        if self.unit(length) == "question":
            apart = [[value] for document in apart for value in document]
        return paired_bootstrap(apart)

    def to_json(self) -> dict[str, Any]:
        """Every number of the report and every answer; no date."""
        return {
            "model": self.model_name,
            "trained_length": self.trained_len,
            "texts": list(self.texts),
            "seed": self.seed,
            "kv_cache_dtype": self.kv_cache_dtype,
            "confidence": CONFIDENCE,
            "choices": CHOICES,
            "tasks": list(self.tasks),
            "lengths": [self._length_json(length) for length in self.lengths],
            "refused": dict(self.refused),
            "documents": [_document_json(read) for read in self.documents],
        }

    def _length_json(self, length: int) -> dict[str, Any]:
        return {
            "length": length,
            "documents": len(self.of_length(length)),
            "resampled_by": self.unit(length),
            "candidates": [self._candidate_json(candidate, length) for candidate in self.candidates],
        }

    def _candidate_json(self, candidate: TaskCandidate, length: int) -> dict[str, Any]:
        name, plain = candidate.name, self.plain.name
        tasks: dict[str, Any] = {}
        for task in self.asked_tasks:
            tasks[task] = {
                measure: {
                    **_share_json(self.share(name, length, task, measure)),
                    "above_no_scaling": _difference_json(self.difference(plain, name, length, task, measure)),
                }
                for measure in METRICS
            }
        if "needle" in tasks:
            tasks["needle"]["chosen_by_depth"] = {
                f"{depth:g}": _share_json(share)
                for depth, share in self.by_depth(name, length, "needle", "chosen").items()
            }
        keys = None
        if len(self.tasks) > len(self.asked_tasks):
            keys = {
                "tokens": sum(len(losses) for losses in self.key_losses(name, length)),
                "perplexity": rounded(self.key_perplexity(name, length)),
                "nats_above_no_scaling": _difference_json(self.key_difference(plain, name, length)),
            }
        return {"name": name, "request": candidate.body(), "tasks": tasks, "key_tokens": keys}


def _is_right(reading: Reading, index: int, measure: Metric) -> bool:
    if measure == "written":
        return reading.exact[index]
    right, *wrong = reading.choices[index]
    return right > max(wrong)


def _document_json(read: DocumentReadings) -> dict[str, Any]:
    document = read.document
    return {
        "length": document.length,
        "number": document.number,
        "sha256": document.digest,
        "questions": [[question.task, round(question.depth, 4)] for question in document.questions],
        "right": {
            name: {
                measure: [int(_is_right(reading, i, measure)) for i in range(len(document.questions))]
                for measure in METRICS
            }
            for name, reading in read.readings.items()
        },
    }


def _share_json(share: Share) -> dict[str, Any]:
    return {"right": share.hits, "of": share.total, "interval": interval_ends(share.interval, digits=4)}


def _difference_json(found: PairedDifference) -> dict[str, Any]:
    p_value = {} if found.p_value is None else {"mcnemar_p": float(f"{found.p_value:.3g}")}
    return {"mean": rounded(found.mean), "interval": interval_ends(found.interval, digits=4), **p_value}
