"""The other tabs of the page in a real browser: completions, rotary scalings, attention and the cache.

Their display is compared with formulas, and with the results of scripted and real engines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from helpers.browser import Seen, violations
from helpers.live_server import Live, live_server
from helpers.real_server import serve
from helpers.rotary_formulas import by_formula
from helpers.scripted_engine import LIKELY, ROTARY, UNLIKELY
from playwright.sync_api import Browser, Page, expect

from windlass.engine.rotary.rope_scaling import RopeScaling

TABS = ("Chat", "Completion", "Rotary", "Attention", "Cache")
YARN = {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1}

CONTROLS = ("button", "input", "select", "textarea", "canvas[tabindex]")
# Scripts that run in the page. The index of the focused control of a tab, or "".
FOCUSED = """() => {
  const at = document.activeElement, kinds = "button, input, select, textarea, canvas";
  return at.matches(kinds) && at.closest(".floor") ? String([...document.querySelectorAll(kinds)].indexOf(at)) : "";
}"""
# Elements beyond the right edge.
CLIPPED = """() => [...document.querySelectorAll(".room > *, .stack > *, .panel > *, .tokens, .alternatives table, figure")]
  .filter((one) => one.offsetParent && one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.outerHTML.slice(0, 100))"""
# The colours of the first four pages.
PIXELS = """() => {
  const canvas = document.querySelector(".pages canvas"), context = canvas.getContext("2d"), side = canvas.width / 16;
  return [0, 1, 2, 3].map((cell) => [...context.getImageData(side * (cell + 0.25), side / 4, 1, 1).data].join());
}"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    profiles = {"long": RopeScaling.from_dict(YARN)}
    sampling = {"temperature": 0.2, "top_p": 0.9}
    with live_server(attention_maps=True, rope_profiles=profiles, recommended_sampling=sampling) as live:
        yield live


def enter(browser: Browser, live: Live, tab: str, **context: object) -> Seen:
    seen = Seen(browser, live, f"/#{tab.lower()}", **context)
    expect(seen.page.get_by_role("link", name=tab)).to_have_attribute("aria-current", "page")
    return seen


def table(page: Page, title: str) -> dict[str, list[str]]:
    """The numbers below a chart, by column."""
    figure = page.locator("figure.chart").filter(has=page.get_by_text(title))
    figure.get_by_text("As numbers").click()
    names = figure.locator("thead th").all_inner_texts()
    rows = [row.locator("th, td").all_inner_texts() for row in figure.locator("tbody tr").all()]
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "")) for text in texts]


# ---- completions -----------------------------------------------------------------------------------------------------
def test_tokens_show_alternatives_and_continue_from_them(browser: Browser, live: Live) -> None:
    text = live.tokenizer
    live.engine.reply = text.encode("abc", add_special_tokens=False)
    seen = enter(browser, live, "Completion")
    page = seen.page
    page.get_by_label("Text to continue").fill("once")
    page.get_by_text("Settings and rotary scaling").click()
    page.get_by_label("Longest answer").fill("6")
    page.get_by_label("Kind").select_option("linear")
    page.get_by_role("button", name="Continue the text").click()
    tokens = page.locator(".token")
    expect(tokens).to_have_count(6)
    expect(page.get_by_role("button", name="Continue the text")).to_be_visible()
    assert tokens.all_inner_texts() == ["a", "b", "c", "a", "b", "c"]
    (first,) = live.engine.requests
    assert first.rope_scaling == RopeScaling.from_dict({"rope_type": "linear", "factor": 4})
    assert (first.sampling.temperature, first.sampling.top_p) == (0.2, 0.9)  # recommended sampling
    assert first.prompt_token_ids == text.encode("once", add_special_tokens=True)

    # Arrow keys select a token, whose alternatives are shown below.
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    likely = page.get_by_role("region", name="Likely tokens")
    expect(likely.get_by_role("heading")).to_have_text("Token 2: b")
    even = live.engine.reply[1] - live.engine.reply[1] % 2
    shown = [row.locator("td").all_inner_texts()[:2] for row in likely.locator("tbody tr").all()]
    assert [name for name, _ in shown[:2]] == [text.token_text(even), text.token_text(even + 1)]
    assert [float(share.split()[0]) for _, share in shown[:2]] == pytest.approx(
        [100 * math.exp(LIKELY), 100 * math.exp(UNLIKELY)], abs=0.006
    )
    tokens.nth(4).hover()
    expect(likely.get_by_role("heading")).to_have_text("Token 5: b")

    # An alternative replaces the token. The tokens before it are sent as ids.
    other = likely.get_by_role("row").filter(has=page.get_by_role("button", name="Take this")).first
    taken = other.locator("td").first.inner_text()
    other.get_by_role("button").click()
    live.wait(lambda: len(live.engine.requests) == 2)
    replaced = even if live.engine.reply[1] != even else even + 1
    assert taken == text.token_text(replaced)
    a, _, c = live.engine.reply
    assert live.engine.requests[1].prompt_token_ids == [
        *first.prompt_token_ids,
        a,
        live.engine.reply[1],
        c,
        a,
        replaced,
    ]
    assert live.engine.requests[1].rope_scaling == first.rope_scaling
    expect(tokens).to_have_count(11)
    seen.done(page.get_by_role("button", name="Continue the text"))


def test_escape_ends_a_completion_and_errors_are_shown(browser: Browser, live: Live) -> None:
    live.engine.delay = 0.02
    seen = enter(browser, live, "Completion")
    page = seen.page
    page.get_by_label("Text to continue").fill("once")
    page.get_by_role("button", name="Continue the text").click()
    expect(page.locator(".token").nth(2)).to_be_visible()
    page.keyboard.press("Escape")
    live.wait(lambda: len(live.engine.aborted) == 1)
    expect(page.get_by_role("button", name="Continue the text")).to_be_visible()
    page.get_by_text("Settings and rotary scaling").click()
    page.get_by_label("Kind").select_option("text")
    page.get_by_role("textbox", name="Scaling").fill('{"rope_type": "yarn", "facto": 4}')
    page.get_by_role("button", name="Continue the text").click()
    expect(page.get_by_role("alert")).to_contain_text("facto")
    seen.complaints.clear()  # of the browser about the 400
    seen.done(page.get_by_role("button", name="Continue the text"))


# ---- rotary ----------------------------------------------------------------------------------------------------------
def test_display_of_a_scaling_equals_the_formulas(browser: Browser, live: Live) -> None:
    base = ROTARY[0].base
    seen = enter(browser, live, "Rotary")
    page = seen.page
    page.get_by_role("slider", name="Factor").fill("8")
    page.get_by_label("First position of the maps").fill("1000")
    page.get_by_label("Length of the request").fill("2000")
    expect(page.get_by_role("figure").filter(has_text="Cosine at positions 1,000 to 1,079")).to_be_visible()
    own, _ = by_formula({"rope_type": "default"}, 2000, base)
    scaled, factor = by_formula({**YARN, "factor": 8}, 2000, base)

    turns = table(page, "Tokens per turn of each pair")
    assert numbers(turns["the server's own"]) == pytest.approx([2 * math.pi / w for w in own], rel=1e-8)
    assert numbers(turns["YaRN, factor 8"]) == pytest.approx([2 * math.pi / w for w in scaled], rel=1e-8)
    page.get_by_text("Every pair as numbers").click()
    cells = page.locator("table.pairs tbody tr")
    assert numbers([row.locator("td").first.inner_text() for row in cells.all()]) == pytest.approx(scaled, rel=1e-8)

    facts = dict(
        zip(page.locator(".figures dt").all_inner_texts(), page.locator(".figures dd").all_inner_texts(), strict=True)
    )
    slow = [sum(2 * math.pi / w > base.trained_len for w in ws) for ws in (scaled, own)]
    assert facts["Pairs that turn less than once in it"] == f"{slow[0]} of 8 ({int(100 * slow[0] / 8 + 0.5)} %)"
    assert facts["The same without this scaling"].startswith(f"{slow[1]} of 8") and slow[0] > slow[1]
    assert float(facts["Attention factor"]) == pytest.approx(factor, rel=1e-8)
    inspected = live.post("/v1/rotary/inspect", {"rope_scaling": {**YARN, "factor": 8}, "length": 2000}).json()
    expect(page.locator(".fingerprint code")).to_have_text(inspected["fingerprint"])

    # Two cells to the right and three down on the map.
    maps = page.locator("canvas")
    maps.nth(0).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    angle = 1003 * scaled[2]
    reading = f"position 1003, pair 2: cos {math.cos(angle):.6f}, sin {math.sin(angle):.6f}"
    expect(page.locator(".reading").first).to_have_text(reading)

    bound = table(page, "The most that a score can be")
    at = numbers(bound["distance in tokens"])
    assert at[0] == 1 and at[-1] == 2000 and len(at) > 15
    for ws, name in ((own, "the server's own"), (scaled, "YaRN, factor 8")):
        sums = [
            sum(abs(sum(complex(math.cos(r * w), math.sin(r * w)) for w in ws[:j])) for j in range(1, 9)) / 8 / 4.5
            for r in at
        ]
        assert numbers(bound[name]) == pytest.approx(sums, rel=1e-7)
    equal = table(page, "Score of two equal vectors")
    assert numbers(equal["YaRN, factor 8"]) == pytest.approx(
        [sum(math.cos(r * w) for w in scaled) / 8 for r in numbers(equal["distance in tokens"])], rel=1e-6, abs=1e-9
    )
    expect(page.get_by_label("JSON", exact=True)).to_have_text(
        '{"rope_type":"yarn","factor":8,"beta_fast":32,"beta_slow":1}'
    )
    seen.done(page.get_by_role("button", name="Compare in the chat"))


def test_scaling_is_passed_to_the_chat(browser: Browser, live: Live) -> None:
    live.engine.eos_after = 3
    seen = enter(browser, live, "Rotary")
    page = seen.page
    page.get_by_role("button", name="Compare in the chat").click()
    expect(page.get_by_role("group", name="Right: rotary scaling").get_by_label("Kind")).to_have_value("yarn")
    seen.ask("hello")
    expect(page.locator(".message.assistant .facts")).to_have_count(2)
    assert {request.rope_scaling for request in live.engine.requests} == {None, RopeScaling.from_dict(YARN)}
    seen.done()


def test_sweep_shows_the_perplexity_of_its_parts(browser: Browser, live: Live) -> None:
    seen = enter(browser, live, "Rotary")
    page = seen.page
    text = "the quick brown fox jumps over the lazy dog " * 24
    ids = live.tokenizer.encode(text, add_special_tokens=True)[:256]
    assert len(ids) == 256  # the context length
    page.get_by_label("Text, up to 256 tokens").fill(text)
    page.get_by_role("button", name="Run the sweep").click()
    expect(page.get_by_text("768 of 768 tokens scored")).to_be_visible()  # two texts of 128 and 256
    expect(page.get_by_role("button", name="Run the sweep")).to_be_visible()
    assert [len(request.prompt_token_ids) for request in live.engine.requests] == [128, 128, 256, 256]
    kinds = [request.rope_scaling and request.rope_scaling.rope_type for request in live.engine.requests]
    assert {None, "yarn"} == set(kinds[:2]) == set(kinds[2:])
    surprise = [0.0 if i == 0 else -(UNLIKELY if token % 2 else LIKELY) for i, token in enumerate(ids)]
    parts = [
        range(0, 32),
        range(32, 64),
        range(64, 96),
        range(96, 128),
        *(range(s, s + 32) for s in range(128, 256, 32)),
    ]
    wanted = [math.exp(sum(surprise[i] for i in part) / sum(i > 0 for i in part)) for part in parts]
    shown = table(page, "Perplexity by position")
    assert numbers(shown["the server's own"]) == pytest.approx(wanted, rel=1e-8)
    overall = math.exp(sum(surprise) / 255)
    expect(page.locator(".totals span").first).to_have_text(f"the server's own: perplexity {overall:.3f}")
    trained = ROTARY[0].base.trained_len
    assert trained < 256
    verdict = "Perplexity of YaRN, factor 4 against the server's own: 0.0 % lower up to the trained length, 0.0 % lower past it."
    expect(page.locator(".verdict")).to_have_text(verdict)
    expect(page.get_by_text("A scaling costs short text")).to_contain_text(
        f"past the trained length ({trained} tokens)"
    )
    seen.done(page.get_by_role("button", name="Run the sweep"))


def test_sweep_compares_selected_scalings_and_stops(browser: Browser, live: Live) -> None:
    seen = enter(browser, live, "Rotary")
    page = seen.page
    text = "the quick brown fox jumps over the lazy dog " * 24
    panel = page.locator("section").filter(has=page.get_by_role("heading", name="Quick sweep"))
    panel.get_by_label("the server's own").uncheck()
    panel.get_by_role("button", name="The sliders' as it is now").click()
    page.get_by_role("slider", name="Factor").fill("8")  # the added one still has 4
    for name in ("Linear, factor 8", "NTK-aware, factor 8", "Profile long", "Dynamic NTK, factor 8"):
        panel.get_by_role("button", name=name, exact=True).click()
    panel.get_by_role("button", name="Leave out NTK-aware, factor 8").click()
    panel.get_by_label("Text, up to 256 tokens").fill(text)
    panel.get_by_role("button", name="Run the sweep").click()
    expect(panel.get_by_text("1,920 of 1,920 tokens scored")).to_be_visible()
    names = ["YaRN, factor 8", "YaRN, factor 4", "Linear, factor 8", "long", "Dynamic NTK, factor 8"]
    expect(panel.locator(".totals span")).to_contain_text([f"{name}: perplexity" for name in names])
    expect(panel.locator("svg path[class^=line-]")).to_have_count(5)
    sent = [request.rope_scaling for request in live.engine.requests[5:]]
    yarn4 = RopeScaling.from_dict(YARN)  # also of the profile
    assert sent.count(yarn4) == 2 and len(sent) == 5
    others = [YARN | {"factor": 8}, *({"rope_type": kind, "factor": 8} for kind in ("linear", "dynamic"))]
    assert set(sent) == {yarn4, *map(RopeScaling.from_dict, others)}

    # At most six are compared. A refused one is named.
    panel.get_by_label("the server's own").check()
    expect(panel.get_by_role("button", name="No scaling")).to_be_disabled()
    page.get_by_label("Kind").select_option("text")
    page.get_by_role("textbox", name="Scaling").fill('{"rope_type": "yarn", "factr": 4}')
    panel.get_by_role("button", name="Run the sweep").click()
    expect(panel.get_by_role("alert")).to_contain_text(re.compile("^yarn: .*factr"))
    page.get_by_label("Kind").select_option("linear")
    expect(page.get_by_role("heading", name="linear")).to_be_visible()

    live.engine.first_delay = 300  # time to stop
    panel.get_by_role("button", name="Run the sweep").click()
    expect(panel.get_by_role("button", name="Stop")).to_be_visible()
    live.wait(lambda: live.engine.running == 6)  # in one batch
    panel.get_by_role("button", name="Stop").click()
    expect(panel.get_by_role("button", name="Run the sweep")).to_be_visible()
    live.wait(lambda: live.engine.running == 0)
    expect(panel.get_by_role("alert")).to_have_count(0)
    seen.complaints.clear()  # of the browser about the 400
    seen.done(panel.get_by_role("button", name="Run the sweep"))


# ---- attention and the cache -----------------------------------------------------------------------------------------
def test_attention_under_two_scalings(browser: Browser, live: Live) -> None:
    seen = enter(browser, live, "Attention")
    page = seen.page
    page.get_by_label("Text, up to 256 tokens").fill("hello you")
    page.get_by_label("Layer").fill("1")
    page.get_by_label("Head").fill("3")
    page.get_by_role("group", name="Right").get_by_label("Kind").select_option("profile:long")
    page.get_by_role("button", name="Show the attention").click()
    expect(page.locator("canvas")).to_have_count(2)
    left, right = live.engine.attention
    assert (left.layer, left.head, left.rope_scaling) == (1, 3, None)
    assert right.rope_scaling == RopeScaling.from_dict(YARN) and left.token_ids == right.token_ids
    page.locator("canvas").nth(1).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".reading").nth(1)).to_contain_text("a weight of 0.333333, score -1.000000")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".reading").nth(1)).to_contain_text("does not see")
    labels = page.locator(".labels.down").first.locator("span")
    assert labels.all_inner_texts() == [live.tokenizer.token_text(i).strip() or "␣" for i in left.token_ids]
    score = table(page, "Mean score by distance")
    assert numbers(score["long"]) == [-back for back in range(len(left.token_ids))]
    expect(page.get_by_label("Layer of 2")).to_have_attribute("max", "1")
    seen.done(page.get_by_role("button", name="Show the attention"))


def test_disabled_attention_names_its_option(browser: Browser) -> None:
    with live_server() as live:
        seen = enter(browser, live, "Attention")
        expect(seen.page.get_by_text("starting the server with --attention-maps")).to_be_visible()
        expect(seen.page.get_by_role("button", name="Show the attention")).to_be_disabled()
        seen.done(seen.page.get_by_role("button", name="Show the attention"))


def test_errors_do_not_advise_options_that_the_page_cannot_set(browser: Browser, live: Live) -> None:
    seen = enter(browser, live, "Chat")
    page, alert = seen.page, seen.page.get_by_role("alert")
    page.get_by_label("Kind").select_option("linear")  # the server's error then names one of its options
    seen.ask("too long " * 200)
    expect(alert).to_contain_text("context holds 256 tokens")
    expect(alert).to_contain_text(
        "tokens: start a new chat, edit an earlier message, or let the oldest turns be dropped"
    )
    assert not {"--", "truncate_prompt_tokens"} & set(alert.inner_text().split())
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Top p").fill("2")
    seen.ask("hello")
    expect(alert).to_have_text("Top p should be less than or equal to 1")
    page.get_by_label("Top p").fill("")
    page.get_by_label("Kind").select_option("text")
    page.get_by_label("Scaling", exact=True).fill("bogus")
    seen.ask("hello")
    expect(alert).to_contain_text("'bogus' is neither a kind of scaling nor a profile of this server")
    assert "--rope-profile" not in alert.inner_text()
    page.get_by_label("Scaling", exact=True).fill("")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    seen.ask("hello")
    expect(alert).to_contain_text("The server does not answer: it has stopped, or the connection is lost.")
    advised = """async (message) => (await import("/ui/api.js")).advised({ message })"""
    assert page.evaluate(advised, "start it with --max-model-len 4").endswith(
        "(--max-model-len is an option of the server: only its operator can set it, at the next start.)"
    )
    assert page.evaluate(advised, "shorten it") == "shorten it"
    seen.complaints.clear()  # of the browser about the refused requests
    seen.done()


def test_cache_display_is_updated(browser: Browser, live: Live) -> None:
    live.engine.engine_stats = live.engine.engine_stats.__class__(
        num_running=1, num_waiting=2, prefix_cache_queries=8, prefix_cache_hits=2
    )
    seen = enter(browser, live, "Cache")
    page = seen.page
    figures = page.locator(".figures > div")
    expect(figures.filter(has_text="Waiting")).to_contain_text("2")
    expect(figures.filter(has_text="Prompt tokens found")).to_contain_text("2 of 8 (25 %)")
    expect(figures.filter(has_text="Blocks in use")).to_contain_text("2 of 64")
    expect(page.get_by_role("img", name="1 used by one request, 1 by several, 1 cached, of 64")).to_be_visible()
    colours = page.evaluate(PIXELS)
    assert colours[0] == colours[1] and len(set(colours)) == 3  # held twice, cached, free
    live.engine.engine_stats = live.engine.engine_stats.__class__(num_running=7)
    expect(figures.filter(has_text="Running")).to_contain_text("7")
    page.get_by_role("button", name="Pause").click()
    assert all("willReadFrequently" in line for line in seen.complaints)  # because this test reads the canvas
    seen.complaints.clear()
    seen.done(page.get_by_role("button", name="Resume"))


# ---- all tabs -----------------------------------------------------------------------------------------------------
def use(seen: Seen, tab: str) -> None:
    """Show all parts of a tab."""
    page = seen.page
    if tab == "Chat":
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("Settings", exact=True).click()
        seen.ask("hello")
        expect(page.locator(".message.assistant .facts")).to_have_count(2)
    elif tab == "Completion":
        page.get_by_label("Text to continue").fill("once upon a time " * 8)
        page.get_by_text("Settings and rotary scaling").click()
        page.get_by_label("Kind").select_option("yarn")
        page.get_by_role("button", name="Continue the text").click()
        expect(page.locator(".token")).to_have_count(60)
        page.locator(".token").nth(5).hover()
        expect(page.get_by_role("region", name="Likely tokens")).to_be_visible()
    elif tab == "Rotary":
        page.get_by_text("Every pair as numbers").click()
        page.get_by_label("Text, up to 256 tokens").fill("the quick brown fox " * 10)
        page.get_by_role("button", name="Run the sweep").click()
        expect(page.get_by_role("figure").filter(has_text="Perplexity by position")).to_be_visible()
    elif tab == "Attention":
        page.get_by_role("button", name="Show the attention").click()
        expect(page.locator("canvas")).to_have_count(2)
    else:
        expect(page.locator(".pages canvas")).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    if tab == "Cache":
        page.get_by_role("button", name="Pause").click()  # axe takes a while


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("tab", TABS)
def test_tab_is_accessible_and_fits(browser: Browser, live: Live, tab: str, width: int) -> None:
    """Colour schemes alternate by tab and width."""
    scheme = ("light", "dark")[(TABS.index(tab) + (width > 390)) % 2]
    live.engine.eos_after = None if tab == "Completion" else 12
    view = {"viewport": {"width": width, "height": 844}, "is_mobile": width == 390, "has_touch": width == 390}
    seen = enter(browser, live, tab, color_scheme=scheme, **view)
    use(seen, tab)
    assert violations(seen.page) == []
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    clipped = seen.page.evaluate(CLIPPED)
    assert clipped == []
    seen.done(seen.page.get_by_role("link", name=tab))


def test_every_control_of_a_tab_is_reached_by_the_keyboard(browser: Browser, live: Live) -> None:
    for tab in TABS[1:]:
        seen = enter(browser, live, tab)
        use(seen, tab)
        page = seen.page
        wanted = page.locator(
            ", ".join(f".floor:not([hidden]) {kind}:visible:not(:disabled)" for kind in CONTROLS)
        ).count()
        reached: set[str] = set()
        page.get_by_role("link", name="API").focus()
        for _ in range(wanted + 30):
            page.keyboard.press("Tab")
            reached.add(page.evaluate(FOCUSED))
            if len(reached - {""}) == wanted:
                break
        assert len(reached - {""}) == wanted, tab
        seen.done(page.get_by_role("link", name=tab))


# ---- a real engine -------------------------------------------------------------------------------------------------------
TEXT = "The wind rose, and the old sailor told the children about the storm. " * 24
SCALINGS = {
    "the server's own": None,
    "YaRN, factor 4": {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1},
    "Linear, factor 4": {"rope_type": "linear", "factor": 4},
    "NTK-aware, factor 4": {"rope_type": "ntk", "factor": 4},
}


@pytest.mark.slow
def test_sweep_equals_the_perplexity_of_separate_requests(browser: Browser) -> None:
    with serve() as server:
        ids = server.ask("/tokenize", prompt=TEXT)["tokens"]
        assert len(ids) > 256

        seen = Seen(browser, server, "/#rotary")
        page = seen.page
        for name in ("Linear, factor 4", "NTK-aware, factor 4"):
            page.get_by_role("button", name=name, exact=True).click()
        page.get_by_label(re.compile("^Text, up to ")).fill(TEXT)
        page.get_by_role("button", name="Run the sweep").click()
        expect(page.get_by_role("button", name="Run the sweep")).to_be_visible(timeout=60_000)
        shown = dict(text.split(": perplexity ") for text in page.locator(".totals span").all_inner_texts())
        assert list(shown) == list(SCALINGS)

        # Each part of the text, up to 128, 256, … tokens and the end, is scored after the previous ones.
        bounds = [0, *(length for length in (128, 256, 512, 1024) if length < len(ids)), len(ids)]
        for name, scaling in SCALINGS.items():
            surprise: list[float] = []
            for begin, end in pairwise(bounds):
                fields = {"rope_scaling": scaling} if scaling else {}
                answer = server.complete(ids[:end], max_tokens=0, echo=True, logprobs=0, **fields)
                surprise += [-p for p in answer["choices"][0]["logprobs"]["token_logprobs"][begin:] if p is not None]
            assert float(shown[name]) == pytest.approx(math.exp(sum(surprise) / len(surprise)), rel=2e-3), name
        assert len(set(shown.values())) == len(SCALINGS)
        seen.done(page.get_by_role("button", name="Run the sweep"))
