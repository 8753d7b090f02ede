"""Report of a perplexity sweep as one self-contained HTML page and as Markdown.

Also the tables, the page rendering and the Markdown helpers that the retrieval report shares.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from windlass.lab.candidates import Candidate
from windlass.lab.perplexity_results import CONFIDENCE, TOLERANCE, Curve, Recommendation, ScalingSweep

C = TypeVar("C", bound=Candidate)
Mark = Literal["", "chosen", "reference"]
_REFERENCES = ("cut", "window")  # kinds for comparison, never recommended


@dataclass(frozen=True, slots=True)
class TableRow:
    """Cells of a row. mark: the recommended row, or a reference."""

    cells: tuple[str, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads and rows."""

    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]


def candidate_table(
    heads: Sequence[str],
    candidates: Iterable[C],
    cells: Callable[[C], Iterable[str]],
    chosen: str | None,
    references: Collection[str] = ("cut",),
) -> Table:
    """A row per candidate: its name and `cells`. chosen: name of the recommended one. references: kinds for comparison only."""
    rows = []
    for candidate in candidates:
        mark: Mark = "reference" if candidate.kind in references else ""
        row = (candidate.name, *cells(candidate))
        rows.append(TableRow(row, "chosen" if candidate.name == chosen else mark))
    return Table(tuple(heads), tuple(rows))


def make_table(result: ScalingSweep, chosen: str) -> Table:
    """Perplexity of every curve in every range, and the length up to which it holds."""

    def cells(curve: Curve) -> Iterator[str]:
        for low, high in result.ranges.values():
            yield format_perplexity(result.perplexity(curve, low, high), 1)
        holds = result.holds_to(curve)
        yield "" if curve.kind == "cut" or holds is None else f"{holds:,}" if holds else "nowhere"

    return candidate_table(("scaling", *result.ranges, "holds to"), result.curves, cells, chosen, _REFERENCES)


def make_changes(result: ScalingSweep, chosen: str) -> Table | None:
    """Perplexity of each curve relative to no scaling, in per cent with intervals; None if there are no intervals."""
    plain = next((curve for curve in result.curves if curve.kind == "none"), None)
    if plain is None or len(result.units) < 2:
        return None

    def cells(curve: Curve) -> Iterator[str]:
        for low, high in result.ranges.values():
            mean, interval = result.difference(curve, plain, low, high)
            if interval is None:
                yield ""
            else:
                yield f"{_percent(mean)} ({_percent(interval.low)} to {_percent(interval.high)})"

    others = [curve for curve in result.curves if curve is not plain]
    return candidate_table(("against no scaling, %", *result.ranges), others, cells, chosen, _REFERENCES)


def format_perplexity(value: float, digits: int) -> str:
    """`digits` decimals, or two significant digits from 10,000 on; empty for NaN."""
    return "" if math.isnan(value) else f"{value:,.{digits}f}" if value < 1e4 else f"{value:.2g}"


def _percent(nats: float) -> str:
    """A difference of losses as a change of perplexity: 0.0953 -> "+10"."""
    change = 100 * math.expm1(min(nats, 700.0))
    text = f"{change:+.1f}" if abs(change) < 9.95 else f"{change:+,.0f}" if abs(change) < 1e5 else f"{change:+.1g}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def facts(result: ScalingSweep) -> str:
    """One line: the lengths, the texts and their windows."""
    texts = result.texts
    names = ", ".join(f"{text.name} ({text.tokens:,} tokens)" for text in texts)
    most = max(len(text.starts) for text in texts)
    per_text = "of each " if len(texts) > 1 else ""
    cached = "" if result.kv_cache_dtype == "auto" else f" Keys and values cached as {result.kv_cache_dtype}."
    return (
        f"Trained on {result.trained_len:,} tokens, read to {result.max_len:,}. "
        f"{'Texts' if len(texts) > 1 else 'Text'}: {names}; {per_text}{most} {'windows' if most > 1 else 'window'} of "
        f"{result.max_len:,}{' spread evenly' if most > 1 else ''}{' and overlapping' if _overlap(result) else ''}.{cached}"
    )


def notes(result: ScalingSweep) -> list[str]:
    """Explanations of the columns and the policies."""
    half = result.trained_len // 2
    kinds = {curve.kind for curve in result.curves}
    over = f"each {result.unit_name}'s mean loss" if len(result.texts) > 1 else "all windows"
    found = [
        "Perplexity is e to the mean loss per token: lower is better, and the vocabulary's size is chance. Each "
        f"column averages {over} in that range; columns at a mark cover the {half:,} tokens before it. "
        "Columns cover different text, so compare within a column."
    ]
    if len(result.units) > 1:
        found.append(
            f"Changes against no scaling are means over {len(result.units)} {result.unit_name}s, in brackets the "
            f"{100 * CONFIDENCE:.0f} % interval of Student's t. They are paired: every scaling reads the same text, so "
            f"differences between {result.unit_name}s cancel out."
            + ("" if len(result.texts) > 1 else " Windows of one text do not represent other texts.")
        )
    if "cut" in kinds:
        found.append(
            "The grey line, text cut to the trained length, is the same model without scaling that reads each token after only "
            f"the last {half:,} to {result.trained_len:,} tokens. A longer context is useful where a scaling is "
            f"below that line. A scaling holds up to the length where it is first more than {100 * (TOLERANCE - 1):.0f} % "
            "above it."
        )
    if "window" in kinds:
        found.append(
            "Under a window each token sees a number of previous tokens and the sinks, the first few tokens, which are moved to "
            "its edge. Nothing is scaled, and tokens between are not visible. Perplexity hardly depends on them, so it is no "
            "reason to recommend a window."
        )
    if any(curve.policy for curve in result.curves):
        found.append(
            "dynamic changes its frequencies with the length of the text. Under frozen they are those of the longest length "
            "from the first token on. Under recompute the preceding text is computed again whenever they change, so every row is "
            "that of a model without a cache at that length. Under rotate the cached keys are re-rotated to the new "
            "frequencies and nothing is computed again. The rows of recompute and rotate are computed as if the tokens had been "
            "generated one after another."
        )
    exact = result.exact
    if exact is not None:
        parts = [
            f"{policy} {value:+.4f} ± {exact.error[policy]:.4f}" for policy, value in sorted(exact.difference.items())
        ]
        found.append(
            f"Frequencies change at lengths on the grid M·2^(k/4). At {exact.rows:,} sampled rows the text was also computed "
            f"for the exact length of each ({exact.name}; the diamonds, with one standard error). Nats per token above that, "
            f"mean and standard error: {'; '.join(parts)}."
        )
    return found


def to_html(result: ScalingSweep, recommendation: Recommendation, svg: str, date: str) -> str:
    """The self-contained page. svg: a trusted element; everything else is escaped."""
    return render_page(
        "perplexity_report.html.j2",
        result=result,
        recommendation=recommendation,
        svg=Markup(svg),
        date=date,
        facts=facts(result),
        table=make_table(result, recommendation.curve),
        changes=make_changes(result, recommendation.curve),
        notes=notes(result),
    )


def render_page(template: str, **values: object) -> str:
    """Render a template of this folder in the common style. Values other than Markup are escaped."""
    folder = importlib.resources.files("windlass.lab")
    style, source = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("report_style.css.j2", template))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(source).render(style=Markup(style), **values)


def to_markdown(result: ScalingSweep, recommendation: Recommendation, picture: str | None, date: str) -> str:
    """The same as Markdown. picture: the plot's file name, in the folder of the page."""
    table = make_table(result, recommendation.curve)
    lines = [
        f"# Rotary scalings of {plain_text(result.model_name)}",
        "",
        f"{plain_text(facts(result))} Measured {date}.",
        "",
    ]
    lines += [f"**For contexts of {recommendation.target_len:,} tokens: {recommendation.curve}.**"]
    lines += [" ".join(recommendation.reasons), "", "```sh", recommendation.command, "```", ""]
    if recommendation.body:
        lines += ["Or, for one request to a server whose context is long enough:", "", "```json"]
        lines += [recommendation.body, "```", ""]
    if picture is not None:
        lines += [f"![Perplexity by position for each scaling]({picture})", ""]
    lines += markdown_table(table)
    changes = make_changes(result, recommendation.curve)
    if changes is not None:
        lines += ["", *markdown_table(changes)]
    for paragraph in notes(result):
        lines += ["", paragraph]
    return "\n".join(lines) + "\n"


def markdown_table(table: Table) -> list[str]:
    lines = ["| " + " | ".join(table.heads) + " |", "|---" + "|--:" * (len(table.heads) - 1) + "|"]
    for row in table.rows:
        cells = [f"**{c}**" if row.mark == "chosen" and c else f"*{c}*" if row.mark and c else c for c in row.cells]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _overlap(result: ScalingSweep) -> bool:
    return any(b - a < result.max_len for text in result.texts for a, b in pairwise(text.starts))


def plain_text(text: str) -> str:
    """Escape Markdown characters in file and directory names."""
    return "".join("\\" + c if c in "\\`*_[]<>#|" else c for c in text)
