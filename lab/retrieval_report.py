"""Report of the retrieval tasks as one self-contained HTML page and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from windlass.lab.perplexity_report import Table, TableRow, markdown_table, plain_text, render_page
from windlass.lab.perplexity_results import CONFIDENCE
from windlass.lab.retrieval_documents import CHOICES, KEY_TOKENS
from windlass.lab.retrieval_results import KEY_GAIN, PairedDifference, TaskSweep, Verdict, percent


def tables_of(result: TaskSweep, length: int, chosen: str | None) -> list[tuple[str, Table]]:
    """(title, table): shares of right answers, differences from no scaling, needles by depth."""
    found = [(f"{length:,} tokens: right answers chosen, and written", _shares(result, length, chosen))]
    if len(result.candidates) > 1:
        found.append((f"{length:,} tokens: against no scaling", _differences(result, length, chosen)))
    if "needle" in result.asked_tasks:
        found.append((f"{length:,} tokens: needles chosen by depth", _depths(result, length, chosen)))
    return found


def _shares(result: TaskSweep, length: int, chosen: str | None) -> Table:
    heads = ["scaling", *(f"{task} (of {_asked(result, length, task)})" for task in result.asked_tasks)]
    if result.asked_tasks:
        heads.append("all questions")
    if KEY_TOKENS in result.tasks:
        heads.append(f"perplexity of key tokens (of {_keys(result, length)})")
    rows = []
    for candidate in result.candidates:
        name = candidate.name
        cells = [name]
        for task in result.asked_tasks:
            one, other = (result.share(name, length, task, m) for m in ("chosen", "written"))
            cells.append(f"{percent(one.value)} ({_ends(one.interval)}), {percent(other.value)}")
        if result.asked_tasks:
            both = [result.overall(name, length, m) for m in ("chosen", "written")]
            cells.append(", ".join(map(percent, both)))
        if KEY_TOKENS in result.tasks:
            value = result.key_perplexity(name, length)
            cells.append("" if math.isnan(value) else f"{value:,.2f}" if value < 1e4 else f"{value:.2g}")
        rows.append(_row(cells, name, candidate.kind, chosen))
    return Table(tuple(heads), tuple(rows))


def _differences(result: TaskSweep, length: int, chosen: str | None) -> Table:
    heads = ["against no scaling, points", *result.asked_tasks]
    if result.asked_tasks:
        heads.append("all questions")
    if KEY_TOKENS in result.tasks:
        heads.append("nats a key token")
    rows = []
    for candidate in result.candidates:
        if candidate is result.plain:
            continue
        cells = [candidate.name]
        pair = (result.plain.name, candidate.name, length)
        tasks: Sequence[str | None] = (*result.asked_tasks, *([None] if result.asked_tasks else []))
        cells += [_points(result.difference(*pair, task, "chosen")) for task in tasks]
        if KEY_TOKENS in result.tasks:
            cells.append(_nats(result.key_difference(*pair)))
        rows.append(_row(cells, candidate.name, candidate.kind, chosen))
    return Table(tuple(heads), tuple(rows))


def _depths(result: TaskSweep, length: int, chosen: str | None) -> Table:
    depths = list(result.by_depth(result.plain.name, length, "needle", "chosen"))
    rows = []
    for candidate in result.candidates:
        shares = result.by_depth(candidate.name, length, "needle", "chosen")
        cells = [candidate.name, *(f"{shares[depth].hits} of {shares[depth].total}" for depth in depths)]
        rows.append(_row(cells, candidate.name, candidate.kind, chosen))
    return Table(("needle at", *(percent(depth) for depth in depths)), tuple(rows))


def _row(cells: list[str], name: str, kind: str, chosen: str | None) -> TableRow:
    return TableRow(tuple(cells), "chosen" if name == chosen else "reference" if kind == "cut" else "")


def _asked(result: TaskSweep, length: int, task: str) -> int:
    return result.share(result.plain.name, length, task, "chosen").total


def _keys(result: TaskSweep, length: int) -> int:
    return sum(len(losses) for losses in result.key_losses(result.plain.name, length))


def _points(found: PairedDifference) -> str:
    if found.interval is None:
        return f"{100 * found.mean:+.0f}"
    ends = f"{100 * found.interval.low:+.0f} to {100 * found.interval.high:+.0f}"
    return f"{100 * found.mean:+.0f} ({ends}){'*' if found.is_certain else ''}"


def _nats(found: PairedDifference) -> str:
    if math.isnan(found.mean):
        return ""
    if found.interval is None:
        return f"{found.mean:+.2f}"
    return (
        f"{found.mean:+.2f} ({found.interval.low:+.2f} to {found.interval.high:+.2f}){'*' if found.is_certain else ''}"
    )


def _ends(interval: object) -> str:
    low, high = (getattr(interval, end) for end in ("low", "high"))
    return f"{100 * low:.0f} to {100 * high:.0f}"


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
            "the answer, token by token, with the full stop after it. In brackets Wilson's "
            f"{confidence} interval of the share chosen; the figure after it is the share written."
        )
        found.append(
            "passkey: one number, stated twice, among three others with other names. needle: a number for each of nine keys, at "
            "even depths. recall: words for twelve keys at random depths; nine are queried. multihop: a value, and two "
            "further names that each refer to the previous one; the last name's value is queried. One document holds all facts, "
            "and its questions share its prefill."
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
