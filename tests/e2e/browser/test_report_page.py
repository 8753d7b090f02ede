"""Load test reports in a real browser: no requests, no scripts from results, and interactive charts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.load_results import simulated_run
from playwright.sync_api import Browser, Page

from windlass.clients.loadtest.report import MAX_FAILURES, to_html, write_html
from windlass.clients.loadtest.results import NamedRun, RequestRecord, RunResult, SweepResult

EVIL = '</script><script>window.ran=1</script><img src="http://evil.invalid/x.png" onerror="window.ran=1"><!--{{7*7}}'


class Opened:
    """The page of a report, its requests, its console messages and its errors."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.wait_for_load_state("networkidle")

    def inked(self, figure: str) -> bool:
        """Whether the canvas of a chart has several colours."""
        return self.page.evaluate(
            """(selector) => {
                const canvas = document.querySelector(selector + " canvas");
                if (!canvas) return false;
                const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                return new Set(new Uint32Array(data.buffer)).size > 3;
            }""",
            figure,
        )


Open = Callable[..., Opened]


@pytest.fixture
def open_report(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Write and open a report. At the end, it must have requested nothing and logged nothing, unless `checked` is false."""
    opened: list[Opened] = []
    path = tmp_path / "report.html"

    def open_report(
        runs: Any = None, *, dark: bool = False, width: int = 1200, checked: bool = True, **options: Any
    ) -> Opened:
        if runs is not None:
            write_html(runs, path, **options)
        scheme = "dark" if dark else "light"
        page = Opened(browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme), path)
        if checked:
            opened.append(page)
        return page

    yield open_report
    for one in opened:
        assert one.requests == [path.as_uri()] and one.complaints == []
        one.page.close()


def kinds(page: Page) -> list[str]:
    return page.eval_on_selector_all("figure.chart", "all => all.map(one => one.dataset.kind)")


def test_headline_contains_cached_tokens():
    def text(cached: int | None, reused: int | None, prompt: int = 160) -> str:
        record = RequestRecord(
            index=0, intended=0, sent=0, chunks=(0.5,), ended=1, input_tokens=prompt, output_tokens=1,
            cached_tokens=cached, reused_tokens=reused,
        )  # fmt: skip
        return to_html(RunResult(records=(record,), duration_s=1.0))

    assert "From the cache" not in text(None, None) and "From the cache" not in text(0, 0)
    assert "equal beginnings" in text(80, 0) and "of prompt tokens" in text(80, 0)
    assert "48 tokens from elsewhere" in text(80, 48)
    assert "From the cache" not in text(80, 0, prompt=0)


def test_all_charts_of_a_run_are_drawn(open_report):
    opened = open_report(simulated_run(failing=4, slo={"ttft": 300}), title="A run")
    page = opened.page
    assert page.title() == "A run" and page.locator("h1").inner_text() == "A run"
    shown = kinds(page)
    assert {"tails", "context-ttft", "context-itl", "time-throughput", "time-open", "timeline"} <= set(shown)
    assert "rate-latency" not in shown
    for kind in shown:
        assert opened.inked(f'figure[data-kind="{kind}"]'), kind
    assert "4 of 60 requests failed" in page.locator(".warnings").inner_text()


def test_figures_equal_those_of_the_summary(open_report):
    run = simulated_run(count=40)
    page = open_report(run).page
    tiles = dict(zip(page.locator(".label").all_inner_texts(), page.locator(".value").all_inner_texts(), strict=True))
    summary = run.summary()
    assert tiles["Output"] == f"{summary['output_tokens_per_second']:.3g} tokens/s"
    assert tiles["Time to first token"] == f"{summary['ttft_ms']['p50']:.0f} ms"
    assert tiles["Completed"] == "40 of 40" and page.locator(".warnings").count() == 0
    (row,) = [text for text in page.locator("tbody tr").all_inner_texts() if text.startswith("ITL per")]
    assert row.split("\t")[1:6] == [f"{summary['itl_ms'][name]:.1f}" for name in ("mean", "p50", "p90", "p95", "p99")]
    pairs = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True))
    assert pairs["windlass_request_queue_time"] == "37.5 ms" and pairs["windlass_request_prefill_time"] == "225 ms"
    assert pairs["rotary.rope_type"] == "yarn"


def test_scripts_in_results_are_shown_as_text(open_report):
    run = simulated_run(failing=3, message=EVIL)
    evil = dataclasses.replace(
        run,
        records=tuple(dataclasses.replace(r, label=EVIL, request_id=EVIL) for r in run.records),
        settings={EVIL: EVIL, "nested": {"list": [EVIL]}},
        server={"model": EVIL},
        server_metrics={EVIL + "_sum": 1.0, EVIL + "_count": 2.0},
        generator={EVIL: EVIL, "limited": True},
        started_at=EVIL,
    )
    runs = [NamedRun(name=EVIL, result=evil), NamedRun(name="b", result=evil, series=EVIL)]
    page = open_report(runs, title=EVIL).page
    page.hover('figure[data-kind="timeline"] .u-over', position={"x": 60, "y": 20})
    page.hover('figure[data-kind="context-ttft"] .u-over', position={"x": 200, "y": 100})
    assert page.evaluate("window.ran") is None
    assert page.locator("script").count() == 4 and page.locator("img").count() == 0
    assert page.title() == EVIL.replace("  ", " ")
    assert page.locator("td.message").first.inner_text() == EVIL
    assert EVIL in page.locator(".legend").first.inner_text()
    for part in ("dt", "dd"):  # names and values of settings
        assert EVIL in page.locator(part).all_inner_texts()


def test_policy_blocks_unescaped_scripts_and_requests(open_report, tmp_path):
    page_text = to_html(simulated_run(count=5))
    forced = "<script>window.ran=1</script><img src='http://evil.invalid/x.png' onerror='window.ran=1'>"
    assert page_text.count("<footer>") == 1
    text = page_text.replace("<footer>", forced + "<footer>")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    opened = open_report(checked=False)
    assert opened.page.evaluate("window.ran") is None
    assert len(opened.complaints) >= 2 and all("Content Security Policy" in text for text in opened.complaints)
    # Chromium lists requests that the policy blocks, without a response.
    assert opened.page.evaluate("performance.getEntriesByType('resource').filter(e => e.responseStatus).length") == 0


def test_sweep_has_charts_over_rate_and_a_section_per_run(open_report):
    runs = [simulated_run(rate=rate, count=30, slo={"ttft": 200}, limited=rate == 8) for rate in (8, 1, 4)]
    opened = open_report(SweepResult(runs=tuple(runs), highest_rate=4.0))
    page = opened.page
    assert page.locator(".found").inner_text().endswith("4 requests per second")
    assert "8 req/s: The load generator" in page.locator(".warnings").inner_text()
    rows = page.locator("section table tbody").first.locator("tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["1 req/s", "4 req/s", "8 req/s"]
    for kind in ("rate-latency", "rate-throughput", "tails"):
        assert opened.inked(f'figure[data-kind="{kind}"]')
    parts = page.locator("details.run")
    assert parts.count() == 3 and page.locator("details.run[open]").count() == 1
    closed = 'details.run:nth-of-type(2) figure[data-kind="timeline"]'
    assert page.locator(closed).get_attribute("data-drawn") is None
    parts.nth(1).locator(":scope > summary").click()
    page.wait_for_selector(closed + '[data-drawn="yes"]')
    assert opened.inked(closed)


def test_measures_are_selected_and_series_hidden(open_report):
    opened = open_report([simulated_run(rate=rate, count=30) for rate in (1, 4)])
    figure = opened.page.locator('figure[data-kind="tails"]')
    shot = figure.locator("canvas").screenshot()
    figure.get_by_role("button", name="ITL").click()
    assert figure.locator('.choices [aria-pressed="true"]').all_inner_texts() == ["ITL"]
    assert figure.locator("canvas").screenshot() != shot
    before = figure.locator("canvas").screenshot()
    figure.get_by_role("button", name="4 req/s").click()
    assert figure.locator("canvas").screenshot() != before


def test_tooltip_describes_a_request(open_report):
    records = [
        RequestRecord(index=0, intended=0.0, sent=0.5, chunks=(1.0, 2.0), ended=2.0, input_tokens=9, output_tokens=2),
        RequestRecord(index=1, intended=0.0, sent=0.0, ended=1.0, outcome="http_500", message="it broke"),
    ]
    opened = open_report(RunResult(records=tuple(records), duration_s=2.0))
    over = opened.page.locator('figure[data-kind="timeline"] .u-over')
    size = over.bounding_box()
    tip = opened.page.locator('figure[data-kind="timeline"] .tip')
    over.hover(position={"x": size["width"] / 3, "y": size["height"] / 4})
    assert "request 0" in tip.inner_text() and "first token after 1000 ms" in tip.inner_text().replace(",", "")
    over.hover(position={"x": size["width"] / 3, "y": size["height"] * 3 / 4})
    assert "http_500: it broke" in tip.inner_text()
    opened.page.mouse.move(0, 0)
    assert not tip.is_visible()


@pytest.mark.parametrize("width", [360, 1400])
def test_pages_fit_narrow_and_wide_screens_in_both_colour_schemes(open_report, width):
    runs = [simulated_run(rate=rate, failing=2, message="x" * 300) for rate in (1, 2)]
    grounds = []
    for dark in (False, True):
        opened = open_report(runs, dark=dark, width=width)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        grounds.append(opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]


@pytest.mark.parametrize(
    "records",
    [(), (RequestRecord(index=0, intended=0.0, outcome="connect", message="refused"),)],
    ids=["no requests", "none sent"],
)
def test_runs_without_measurements_have_a_page(open_report, records):
    opened = open_report(RunResult(records=records, duration_s=0.0, interrupted=True))
    assert "interrupted" in opened.page.locator(".warnings").inner_text()
    assert "Nothing was measured" in opened.page.locator("body").inner_text()


def test_abandoned_requests_are_not_failures(monkeypatch):
    records = [
        RequestRecord(index=k, intended=float(k), sent=float(k), ended=k + 1.0, outcome=outcome)
        for k, outcome in enumerate(["timeout", "disconnected", "disconnected"])
    ]
    run = RunResult(records=tuple(records), duration_s=3.0)
    monkeypatch.setattr(RunResult, "errors", property(lambda self: {"timeout": 1}))
    summary = RunResult.summary
    monkeypatch.setattr(RunResult, "summary", lambda self: {**summary(self), "failed": 1})
    page = to_html(run)
    assert "1 of 3 requests failed (timeout: 1)" in page and "2 requests were given up on purpose" in page
    assert page.count('class="message"') == 1 and "given up on purpose</span>" in page


def test_number_of_listed_failures_is_limited():
    records = [RequestRecord(index=k, intended=float(k), outcome="timeout") for k in range(MAX_FAILURES + 30)]
    page = to_html(RunResult(records=tuple(records), duration_s=90.0))
    assert "and 30 more." in page and page.count('class="message"') == MAX_FAILURES


def test_report_without_runs_is_refused():
    with pytest.raises(ValueError, match="needs a run"):
        to_html([])
