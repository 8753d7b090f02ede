"""Which way of reading wins where, by how much, with what certainty, and the command that serves it. Words and a rule.

The rule: at each length the highest share of right choices over the questions of all tasks; among equals, what asks least of
the server. Knows no model and no picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from windlass.clients.loadtest.intervals import Interval
from windlass.server.cli.rope.sweep_results import CONFIDENCE
from windlass.server.cli.rope.tasks.candidates import TaskCandidate
from windlass.server.cli.rope.tasks.certainty import PairedDifference
from windlass.server.cli.rope.tasks.results import TaskSweep


@dataclass(frozen=True, slots=True)
class Verdict:
    """One length. chosen: the candidate's name, None where only key tokens were asked for. reasons: sentences, one a task."""

    length: int
    chosen: str | None
    command: str | None
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "chosen": self.chosen,
            "command": self.command,
            "reasons": list(self.reasons),
        }


def judge(result: TaskSweep) -> list[Verdict]:
    """One verdict a length."""
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
    text = f"Over all questions {chosen.name} chooses {_percent_text(mean)} of the right answers"
    if chosen is plain:
        return text + ": no scaling is needed here."
    other = result.difference(plain.name, chosen.name, length, None, "chosen")
    return f"{text}, no scaling {_percent_text(result.overall(plain.name, length))} ({_difference_text(other)})."


def _task(result: TaskSweep, task: str, length: int) -> str:
    def value(candidate: TaskCandidate) -> float:
        return result.share(candidate.name, length, task, "chosen").value

    ranked = sorted(result.candidates, key=lambda c: (-value(c), c.cost))
    best, plain = ranked[0], result.plain
    share = result.share(best.name, length, task, "chosen")
    text = f"{task}: {best.name} chooses {share.hits} of {share.total}"
    if share.interval is not None:
        text += f" ({_percent_text(share.interval.low)} to {_percent_text(share.interval.high)})"
    if best is not plain:
        none = result.share(plain.name, length, task, "chosen")
        text += f", no scaling {none.hits}: {_difference_text(result.difference(plain.name, best.name, length, task, 'chosen'))}"
    apart = [c.name for c in ranked[1:] if result.difference(c.name, best.name, length, task, "chosen").is_certain]
    uncertain = [c.name for c in ranked[1:] if c.name not in apart]
    if not apart:
        return text + ". Its lead over no other is certain."
    if not uncertain:
        return text + ". Its lead over every other is certain."
    return text + f". Its lead is not certain over {', '.join(uncertain)}."


def _key_tokens(result: TaskSweep, length: int) -> str:
    rated = [c for c in result.candidates if not math.isnan(result.key_perplexity(c.name, length)) and c.kind != "cut"]
    if not rated:
        return "key tokens: no token here gains enough from a longer context."
    best = min(rated, key=lambda c: (result.key_perplexity(c.name, length), c.cost))
    text = f"key tokens: {best.name} has the lowest perplexity, {result.key_perplexity(best.name, length):.2f}"
    if best is result.plain:
        return text + "."
    plain = result.key_perplexity(result.plain.name, length)
    return (
        text + f", no scaling {plain:,.2f}: {_nats_text(result.key_difference(result.plain.name, best.name, length))}."
    )


def _difference_text(found: PairedDifference) -> str:
    points = f"{100 * found.mean:+.0f} points"
    p_value = "" if found.p_value is None else f", p = {_p(found.p_value)}"
    sure = "certain" if found.is_certain else "not told apart"
    if found.interval is None:
        return f"{points}{p_value}; too few for an interval"
    return f"{points}, {_span(found.interval, 100, '.0f')}{p_value}; {sure}"


def _nats_text(found: PairedDifference) -> str:
    nats = f"{found.mean:+.2f} nats a token"
    if found.interval is None:
        return f"{nats}; too few for an interval"
    return f"{nats}, {_span(found.interval, 1, '.2f')}; {'certain' if found.is_certain else 'not told apart'}"


def _span(interval: Interval, times: float, form: str) -> str:
    return f"{100 * CONFIDENCE:.0f} % interval {times * interval.low:+{form}} to {times * interval.high:+{form}}"


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _percent_text(value: float) -> str:
    return f"{100 * value:.0f} %"
