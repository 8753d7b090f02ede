"""Results of a retrieval sweep: shares of right answers, losses of key tokens, paired differences and verdicts.

Shares: Wilson's interval. Differences of shares: a paired bootstrap whose resamples take the same units from both sides
(percentile interval; Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13), and McNemar's exact test on
the questions that only one side answered. Key tokens: LongPPL, 2410.23771. Verdict: the highest share of right choices over
the questions of all tasks at a length; among equals, the cheapest for the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from windlass.clients.loadtest.intervals import Interval, wilson
from windlass.lab.candidates import TaskCandidate
from windlass.lab.perplexity_results import CONFIDENCE, interval_ends, rounded
from windlass.lab.retrieval_documents import CHOICES, TASKS, Document


@dataclass(frozen=True, slots=True)
class Reading:
    """Results of one document under one candidate.

    choices: log-probability of each choice, by question. exact: whether greedy decoding writes the right one, token by token.
    segment: log-probabilities of the document's last tokens, empty if they were not requested.
    """

    choices: tuple[tuple[float, ...], ...]
    exact: tuple[bool, ...]
    segment: tuple[float, ...]


RESAMPLES = 10_000

MIN_UNITS = 6  # fewer give no meaningful interval

_SEED = 20260101


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """second - first: mean, bootstrap interval (None for too few units), McNemar's p (None for losses)."""

    mean: float
    interval: Interval | None
    p_value: float | None = None

    @property
    def is_certain(self) -> bool:
        """Whether interval and test both exclude chance."""
        passes_test = self.p_value is None or self.p_value < 1 - CONFIDENCE
        return passes_test and self.interval is not None and self.interval.excludes_zero


def paired_bootstrap(differences: Sequence[Sequence[float]]) -> PairedDifference:
    """Mean of all differences, resampled by unit. differences: by unit, such as a document; empty units are ignored."""
    units = [unit for unit in differences if len(unit)]
    sums = np.array([float(np.sum(unit)) for unit in units])
    sizes = np.array([len(unit) for unit in units], dtype=np.float64)
    if not units:
        return PairedDifference(math.nan, None)
    mean = float(sums.sum() / sizes.sum())
    if len(units) < MIN_UNITS:
        return PairedDifference(mean, None)
    generator = np.random.default_rng(_SEED)
    resamples = generator.multinomial(len(units), np.full(len(units), 1 / len(units)), size=RESAMPLES)  # [R, U]
    means = (resamples @ sums) / (resamples @ sizes)
    rest = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [rest, 1 - rest])
    return PairedDifference(mean, Interval(float(low), float(high)))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Two-sided exact p-value of paired answers (McNemar, 1947; binomial distribution of the discordant pairs)."""
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    total = only_first + only_second
    tail = sum(math.comb(total, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, float(2 * tail / 2**total))


# chosen: the right answer is more likely than the wrong ones. written: greedy decoding writes it.
Metric = Literal["chosen", "written"]

METRICS: tuple[Metric, ...] = ("chosen", "written")

# Key tokens (LongPPL, 2410.23771): gain in nats of a long context over a short one, and lowest log-probability after it.
KEY_GAIN, KEY_MIN_LOGPROB = 2.0, -2.0

_CLUSTER_DOCUMENTS = 8  # from this many documents of a length on, documents are resampled instead of questions


@dataclass(frozen=True, slots=True)
class DocumentReadings:
    """Readings of one document, by candidate. short: log-probabilities of its segment after a short context."""

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
    """Results of one sweep. judge: name of the candidate whose readings define key tokens.

    texts: names of files, empty for generated prose. refused: (name, reason) of candidates that the model cannot run.
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
        """Tasks with questions."""
        return tuple(task for task in self.tasks if task in TASKS)

    @property
    def plain(self) -> TaskCandidate:
        return next(candidate for candidate in self.candidates if candidate.kind == "none")

    def of_length(self, length: int) -> list[DocumentReadings]:
        return [read for read in self.documents if read.document.length == length]

    def unit(self, length: int) -> str:
        """The unit by which differences are resampled."""
        return "document" if len(self.of_length(length)) >= _CLUSTER_DOCUMENTS else "question"

    def right(self, name: str, length: int, task: str | None, measure: Metric) -> list[list[bool]]:
        """Whether each question of a task was answered, by document; task None: of all tasks."""
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
        """The share over the questions of all tasks."""
        return self.share(name, length, None, measure).value

    def difference(self, first: str, second: str, length: int, task: str | None, measure: Metric) -> PairedDifference:
        """Share of `second` minus that of `first`, over the same questions."""
        a, b = (self.right(name, length, task, measure) for name in (first, second))
        differences = [[float(y) - float(x) for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]
        found = self._resample(differences, length)
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
        """Loss of each key token in nats, by document. The judge's reading and the short one define the key tokens."""
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
        """Nats per key token of `second` minus those of `first`. Units: documents, or tokens if these are few."""
        pairs = zip(self.key_losses(first, length), self.key_losses(second, length), strict=True)
        return self._resample([(b - a).tolist() for a, b in pairs], length)

    def _resample(self, differences: list[list[float]], length: int) -> PairedDifference:
        """Bootstrap of differences by document, or of single ones if the documents are few."""
        if self.unit(length) == "question":
            differences = [[value] for document in differences for value in document]
        return paired_bootstrap(differences)

    def to_json(self) -> dict[str, Any]:
        """All figures of the report and all answers, without a date."""
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
        "kind": document.kind,
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict for one length. chosen: the candidate's name, None without questions. reasons: sentences, one per task."""

    length: int
    chosen: str | None
    command: str | None
    reasons: tuple[str, ...]


def judge(result: TaskSweep) -> list[Verdict]:
    """One verdict per length."""
    return [_verdict(result, length) for length in result.lengths]


def _verdict(result: TaskSweep, length: int) -> Verdict:
    chosen, reasons = None, []
    if result.asked_tasks:
        ranked = sorted(result.candidates, key=lambda c: (-result.overall(c.name, length), c.cost))
        chosen = ranked[0]
        reasons.append(_overall(result, chosen, length))
        reasons += [_task(result, task, length) for task in result.asked_tasks]
    if len(result.tasks) > len(result.asked_tasks):
        reasons.append(_key_tokens(result, length))
    command = None if chosen is None else chosen.command(result.model, length)
    return Verdict(length, None if chosen is None else chosen.name, command, tuple(reasons))


def _overall(result: TaskSweep, chosen: TaskCandidate, length: int) -> str:
    mean, plain = result.overall(chosen.name, length), result.plain
    text = f"Over all questions {chosen.name} chooses {percent(mean)} of the right answers"
    if chosen is plain:
        return text + ": no scaling is needed here."
    other = result.difference(plain.name, chosen.name, length, None, "chosen")
    return f"{text}, no scaling {percent(result.overall(plain.name, length))} ({_change_text(other, 'points', 100, '+.0f')})."


def _task(result: TaskSweep, task: str, length: int) -> str:
    def value(candidate: TaskCandidate) -> float:
        return result.share(candidate.name, length, task, "chosen").value

    ranked = sorted(result.candidates, key=lambda c: (-value(c), c.cost))
    best, plain = ranked[0], result.plain
    share = result.share(best.name, length, task, "chosen")
    text = f"{task}: {best.name} chooses {share.hits} of {share.total}"
    if share.interval is not None:
        text += f" ({percent(share.interval.low)} to {percent(share.interval.high)})"
    if best is not plain:
        none = result.share(plain.name, length, task, "chosen")
        lead = result.difference(plain.name, best.name, length, task, "chosen")
        text += f", no scaling {none.hits}: {_change_text(lead, 'points', 100, '+.0f')}"
    apart = [c.name for c in ranked[1:] if result.difference(c.name, best.name, length, task, "chosen").is_certain]
    uncertain = [c.name for c in ranked[1:] if c.name not in apart]
    if not apart:
        return text + ". Its lead is certain over none."
    if not uncertain:
        return text + ". Its lead is certain over all others."
    return text + f". Its lead is not certain over {', '.join(uncertain)}."


def _key_tokens(result: TaskSweep, length: int) -> str:
    rated = [c for c in result.candidates if not math.isnan(result.key_perplexity(c.name, length)) and c.kind != "cut"]
    if not rated:
        return "key tokens: no token gains enough from a longer context."
    best = min(rated, key=lambda c: (result.key_perplexity(c.name, length), c.cost))
    text = f"key tokens: {best.name} has the lowest perplexity, {result.key_perplexity(best.name, length):.2f}"
    if best is result.plain:
        return text + "."
    plain = result.plain.name
    lead = _change_text(result.key_difference(plain, best.name, length), "nats a token")
    return text + f", no scaling {result.key_perplexity(plain, length):,.2f}: {lead}."


def _change_text(found: PairedDifference, unit: str, scale: float = 1, form: str = "+.2f") -> str:
    """Mean, interval and certainty in words. unit: of the mean times `scale`; form: the format of a number."""
    p = found.p_value
    p_text = "" if p is None else f", p = {p:.2f}" if p >= 0.1 else f", p = {p:.2g}"
    text = f"{scale * found.mean:{form}} {unit}"
    if found.interval is None:
        return f"{text}{p_text}; too few for an interval"
    low, high = scale * found.interval.low, scale * found.interval.high
    certainty = "certain" if found.is_certain else "not significant"
    return f"{text}, {100 * CONFIDENCE:.0f} % interval {low:{form}} to {high:{form}}{p_text}; {certainty}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"
