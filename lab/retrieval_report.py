"""Report of the retrieval tasks as one self-contained HTML page and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator

from markupsafe import Markup

from windlass.lab.candidates import TaskCandidate
from windlass.lab.perplexity_report import (
    Table,
    candidate_table,
    format_perplexity,
    markdown_table,
    plain_text,
    render_page,
)
from windlass.lab.perplexity_results import CONFIDENCE
from windlass.lab.retrieval_documents import CHOICES, KEY_TOKENS
from windlass.lab.retrieval_results import KEY_GAIN, METRICS, PairedDifference, TaskSweep, Verdict, percent


def tables_of(result: TaskSweep, length: int, chosen: str | None) -> list[tuple[str, Table]]:
    """(title, table): shares of right answers, differences from no scaling, needles by depth."""
    found = [(f"{length:,} tokens: right answers chosen, and written", _shares(result, length, chosen))]
    if len(result.candidates) > 1:
        found.append((f"{length:,} tokens: against no scaling", _differences(result, length, chosen)))
    if "needle" in result.asked_tasks:
        found.append((f"{length:,} tokens: needles chosen by depth", _depths(result, length, chosen)))
    return found


def _shares(result: TaskSweep, length: int, chosen: str | None) -> Table:
    with_keys, plain = KEY_TOKENS in result.tasks, result.plain.name
    heads = ["scaling"]
    heads += [f"{task} (of {result.share(plain, length, task, 'chosen').total})" for task in result.asked_tasks]
    if result.asked_tasks:
        heads.append("all questions")
    if with_keys:
        heads.append(f"perplexity of key tokens (of {sum(map(len, result.key_losses(plain, length)))})")

    def cells(candidate: TaskCandidate) -> Iterator[str]:
        name = candidate.name
        for task in result.asked_tasks:
            one, other = (result.share(name, length, task, m) for m in METRICS)
            ends = "" if one.interval is None else f"{100 * one.interval.low:.0f} to {100 * one.interval.high:.0f}"
            yield f"{percent(one.value)} ({ends}), {percent(other.value)}"
        if result.asked_tasks:
            yield ", ".join(percent(result.overall(name, length, m)) for m in METRICS)
        if with_keys:
            yield format_perplexity(result.key_perplexity(name, length), 2)

    return candidate_table(heads, result.candidates, cells, chosen)


def _differences(result: TaskSweep, length: int, chosen: str | None) -> Table:
    tasks: list[str | None] = [*result.asked_tasks]
    heads = ["against no scaling, points", *result.asked_tasks]
    if result.asked_tasks:
        tasks.append(None)
        heads.append("all questions")
    if KEY_TOKENS in result.tasks:
        heads.append("nats a key token")

    def cells(candidate: TaskCandidate) -> Iterator[str]:
        pair = (result.plain.name, candidate.name, length)
        for task in tasks:
            yield _change(result.difference(*pair, task, "chosen"), 100, "+.0f")
        if KEY_TOKENS in result.tasks:
            yield _change(result.key_difference(*pair))

    others = [candidate for candidate in result.candidates if candidate is not result.plain]
    return candidate_table(heads, others, cells, chosen)


def _depths(result: TaskSweep, length: int, chosen: str | None) -> Table:
    depths = list(result.by_depth(result.plain.name, length, "needle", "chosen"))

    def cells(candidate: TaskCandidate) -> Iterator[str]:
        shares = result.by_depth(candidate.name, length, "needle", "chosen")
        return (f"{shares[depth].hits} of {shares[depth].total}" for depth in depths)

    return candidate_table(("needle at", *map(percent, depths)), result.candidates, cells, chosen)


def _change(found: PairedDifference, scale: float = 1, form: str = "+.2f") -> str:
    """Mean and interval, with a star if the difference is certain. scale: applied to each number; form: its format."""
    if math.isnan(found.mean):
        return ""
    text = f"{scale * found.mean:{form}}"
    if found.interval is None:
        return text
    low, high = scale * found.interval.low, scale * found.interval.high
    return f"{text} ({low:{form}} to {high:{form}}){'*' if found.is_certain else ''}"


def facts(result: TaskSweep) -> str:
    """One line: the trained length, the documents and their source."""
    counts = ", ".join(f"{len(result.of_length(length))} of {length:,} tokens" for length in result.lengths)
    source = f"cut from {', '.join(result.texts)}" if result.texts else "of generated prose"
    cached = "" if result.kv_cache_dtype == "auto" else f" Keys and values cached as {result.kv_cache_dtype}."
    return (
        f"Trained on {result.trained_len:,} tokens. Documents: {counts}, {source}, with facts hidden in them "
        f"(seed {result.seed}).{cached}"
    )


def notes(result: TaskSweep) -> list[str]:
    """Explanations of the tasks and the numbers."""
    found = []
    confidence = f"{100 * CONFIDENCE:.0f} %"
    if result.asked_tasks:
        found.append(
            f"An answer is chosen if it is more likely than {CHOICES - 1} wrong ones of its kind, most of "
            f"them from the same document: chance is {100 / CHOICES:.0f} %. It is written if greedy decoding generates "
            "the answer, token by token. In brackets Wilson's "
            f"{confidence} interval of the share chosen; the figure after it is the share written."
        )
        about = {
            "passkey": "one number, stated twice, among three others with other names.",
            "needle": "a number for each of nine keys, at even depths.",
            "recall": "words for twelve keys at random depths; nine are queried.",
            "multihop": "a value, and two further names that each refer to the previous one; the last name's value is queried.",
            "tally": "eleven deliveries of four items to each of four stores; the most frequent item is queried.",
            "function": "the name of a function with a given docstring, one of nine.",
            "calls": "the value of a function that calls a second one, which calls a third one.",
        }
        found.append(
            " ".join(f"{task}: {about[task]}" for task in result.asked_tasks)
            + " One document holds all facts of its kind, prose or code, and its questions share its prefill."
        )
    units = sorted({result.unit(length) for length in result.lengths})
    found.append(
        f"Every candidate reads the same documents, so differences are paired: in brackets the {confidence} percentile interval "
        f"of a bootstrap over {' or '.join(unit + 's' for unit in units)}. A star marks differences that exclude zero and, for "
        "answers, where McNemar's exact test agrees. The best of many candidates is selected by the same questions that "
        "measure it, so its lead is somewhat overestimated."
        + (
            ""
            if "question" not in units
            else " Questions of one document share its text: with few documents the intervals apply to these documents only."
        )
    )
    if KEY_TOKENS in result.tasks:
        found.append(
            f"Key tokens are those of each document's last segment that the model itself, without scaling and within its "
            f"trained length, finds {KEY_GAIN:g} nats more likely after a long context than after an eighth of it (LongPPL's "
            "rule with the model as its own judge). Their perplexity shows whether distant text still helps. For the "
            "text cut to the trained length it is the judge's own, so it is biased."
        )
    if any(candidate.kind == "dynamic" for candidate in result.candidates):
        found.append(
            "A prompt given at once runs under the frequencies of its own length, so frozen, recompute and rotate are equal "
            "for dynamic here."
        )
    if result.refused:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in result.refused)
        found.append(f"Not run on this model: {reasons}.")
    return found


def to_html(result: TaskSweep, verdicts: list[Verdict], svg: str, date: str) -> str:
    """The self-contained page. svg: a trusted element; everything else is escaped."""
    return render_page(
        "retrieval_report.html.j2",
        result=result,
        svg=Markup(svg),
        date=date,
        facts=facts(result),
        parts=[(verdict, tables_of(result, verdict.length, verdict.chosen)) for verdict in verdicts],
        notes=notes(result),
    )


def to_markdown(result: TaskSweep, verdicts: list[Verdict], picture: str | None, date: str) -> str:
    """The same as Markdown. picture: the plot's file name, in the folder of the page."""
    lines = [
        f"# Long contexts and {plain_text(result.model_name)}",
        "",
        f"{plain_text(facts(result))} Measured {date}.",
        "",
    ]
    if picture is not None:
        lines += [f"![Right answers by length, one panel per task]({picture})", ""]
    for verdict in verdicts:
        lines += [f"## {verdict.length:,} tokens", ""]
        if verdict.command is not None:
            lines += [f"**{verdict.chosen}**", "", "```sh", verdict.command, "```", ""]
        lines += [f"* {plain_text(reason)}" for reason in verdict.reasons]
        for title, table in tables_of(result, verdict.length, verdict.chosen):
            lines += ["", f"{title[0].upper()}{title[1:]}:", "", *markdown_table(table)]
        lines.append("")
    lines += ["## How to read it"]
    for paragraph in notes(result):
        lines += ["", paragraph]
    return "\n".join(lines) + "\n"
