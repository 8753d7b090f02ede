"""The page at `/` and its chat, in a real browser where its display is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.browser import Seen
from helpers.live_server import Live, live_server
from playwright.sync_api import Browser, Page, expect

from windlass.server.app.web_pages import UI_PATHS

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def seen(browser: Browser, live: Live) -> Iterator[Seen]:
    """The page, which is checked for errors at the end."""
    seen = Seen(browser, live)
    yield seen
    seen.done()


def set_reply(live: Live, text: str) -> None:
    """Let the engine answer with a text, and then end."""
    live.engine.reset()
    live.engine.reply = live.tokenizer.encode(text, add_special_tokens=False)
    live.engine.eos_after = len(live.engine.reply)  # the end is a further token


def set_scaling(page: Page, text: str, group: str = "Rotary scaling") -> None:
    """Write the scaling of a column as text."""
    picker = page.get_by_role("group", name=group)
    picker.get_by_label("Kind").select_option("text")
    picker.get_by_label("Scaling", exact=True).fill(text)


def test_browsers_get_the_page_and_other_clients_links(live: Live) -> None:
    answer = live.http.get("/", headers=HTML)
    assert answer.headers["content-type"].startswith("text/html") and "accept" in answer.headers["vary"]
    assert live.http.head("/", headers=HTML).headers["content-type"] == answer.headers["content-type"]
    links = live.http.get("/").json()
    assert links.pop("name") == "windlass"
    for path in set(links.values()) - {links["chat"]}:
        assert live.http.get(path).status_code == 200, path
    assert live.http.get(links["chat"]).status_code == 405
    assert live.http.get("/ui/../page.py").status_code == live.http.get("/ui/vendor/").status_code == 404


def test_files_need_no_key_and_have_a_strict_policy() -> None:
    with live_server(api_keys=("k",)) as live:
        for path in sorted(UI_PATHS):
            answer = live.http.get(path, headers=HTML)
            assert answer.status_code == 200 and answer.content, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
        assert live.http.get("/ui/other.js").status_code == 401


def test_disabled_page_is_not_found() -> None:
    with live_server(ui=False) as live:
        assert live.http.get("/", headers=HTML).status_code == live.http.get("/ui/main.js").status_code == 404
    with live_server(ui=False, api_keys=("k",)) as live:
        assert live.http.get("/", headers=HTML).status_code == 401


def test_answer_is_shown_as_markdown_without_html(seen: Seen, live: Live) -> None:
    hostile = "**bold** <img src=x onerror=alert(1)> [bad](javascript:alert(1)) ![p](https://other.example/p.png)\n\n"
    set_reply(live, hostile + "```js\n1 < 2\n```\n")
    seen.ask("hello")
    answer = seen.page.locator(".message.assistant")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("pre")).to_have_text("1 < 2")
    expect(answer.locator(".facts")).to_contain_text(f"{len(live.engine.reply) + 1} tokens")
    assert "<img src=x onerror=alert(1)>" in answer.inner_text() and "javascript:alert(1)" in answer.inner_text()
    assert answer.locator("img, script").count() == 0
    assert [link.get_attribute("href") for link in answer.locator("a").all()] == ["https://other.example/p.png"]


def test_deeply_nested_markdown_is_shown_as_text(seen: Seen) -> None:
    draw = """async (text) => {
        const { html, render } = await import("/ui/html.js");
        const { Markdown } = await import("/ui/markdown.js");
        const place = document.body.appendChild(document.createElement("div"));
        render(html`<${Markdown} text=${text} />`, place);
        return place.innerText;
    }"""
    mixed = (
        "".join(("*a ", "**b ")[i % 2] for i in range(200)) + "end" + "".join(("** ", "* ")[i % 2] for i in range(200))
    )
    for text in ("* " * 400 + "end", "1. " * 400 + "end", "> " * 1500 + "end", "> " * 5000 + "end", mixed):
        assert "end" in seen.page.evaluate(draw, text), text[:10]
    seen.page.evaluate(draw, "> " * 20 + "- **end**")
    assert seen.page.locator("blockquote " * 20 + "li strong").last.inner_text() == "end"


def test_settings_system_prompt_and_scaling_reach_the_engine(seen: Seen, live: Live) -> None:
    set_reply(live, "yes")
    page = seen.page
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Longest answer").fill("7")
    set_scaling(page, '{"rope_type": "linear", "factor": 2}')
    seen.ask("hello")
    expect(page.locator(".message.assistant")).to_contain_text("yes")
    (request,) = live.engine.requests
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 7)
    assert request.rope_scaling is not None and request.rope_scaling.rope_type == "linear"
    assert "[system]Be brief." in live.tokenizer.decode(request.prompt_token_ids)


def test_escape_stops_the_answer_and_the_engine(seen: Seen, live: Live) -> None:
    live.engine.delay = 0.02
    seen.ask("hello")
    expect(seen.page.get_by_role("button", name="Stop")).to_be_visible()
    expect(seen.page.locator(".message.assistant .markdown")).not_to_be_empty()
    seen.page.keyboard.press("Escape")
    expect(seen.page.locator(".message.assistant .facts")).to_contain_text("stopped")
    live.wait(lambda: len(live.engine.aborted) == 1)


def test_message_is_edited_and_answer_regenerated(seen: Seen, live: Live) -> None:
    set_reply(live, "fine")
    page = seen.page
    for text in ("first", "second"):
        seen.ask(text)
        expect(page.locator(".message.assistant").last.locator(".facts")).to_be_visible()
    page.get_by_role("button", name="Retry").click()
    live.wait(lambda: len(live.engine.requests) == 3)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert live.engine.requests[2].prompt_token_ids == live.engine.requests[1].prompt_token_ids
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit the message").fill("third")
    page.keyboard.press("Enter")
    live.wait(lambda: len(live.engine.requests) == 4)
    prompt = live.tokenizer.decode(live.engine.requests[3].prompt_token_ids)
    assert "third" in prompt and "first" not in prompt and "second" not in prompt
    expect(page.locator(".message")).to_have_count(2)


def test_two_scalings_are_compared(seen: Seen, live: Live) -> None:
    set_reply(live, "both")
    seen.page.get_by_role("button", name="Compare").click()
    set_scaling(seen.page, "yarn 4", "Right: rotary scaling")
    seen.ask("hello")
    expect(seen.page.locator(".message.assistant .facts")).to_have_count(2)
    kinds = {request.rope_scaling and request.rope_scaling.rope_type for request in live.engine.requests}
    assert kinds == {None, "yarn"}


def test_refusals_are_shown_and_the_chat_continues(seen: Seen, live: Live) -> None:
    set_reply(live, "now")
    set_scaling(seen.page, "{")
    seen.ask("hello")
    expect(seen.page.get_by_role("alert")).to_contain_text("not valid JSON")
    set_scaling(seen.page, "nothing-of-this-name")
    seen.ask("hello")
    expect(seen.page.get_by_role("alert")).to_contain_text("nothing-of-this-name")
    assert live.engine.requests == []
    set_scaling(seen.page, "")
    seen.ask("hello")
    expect(seen.page.locator(".message.assistant .markdown")).to_have_text("now")
    expect(seen.page.locator(".message")).to_have_count(2)
    seen.complaints.clear()  # of the browser about the 400


def test_copied_program_sends_the_request_of_the_page(browser: Browser, live: Live) -> None:
    set_reply(live, "it's")
    seen = Seen(browser, live, permissions=["clipboard-read", "clipboard-write"])
    page = seen.page
    set_scaling(page, '{"rope_type": "linear", "factor": 2}')
    seen.ask('it\'s "quoted" \\ and\u2028more')
    expect(page.get_by_role("button", name="httpx")).to_be_visible()
    set_scaling(page, '{"rope_type": "linear", "factor": 8}')  # for the next question
    for kind in ("httpx", "openai"):
        page.get_by_role("button", name=kind).click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        shown: list[object] = []
        program = page.evaluate("navigator.clipboard.readText()")
        exec(compile(program, kind, "exec"), {"print": shown.append})
        assert shown == ["it's"], kind
        expect(page.get_by_role("button", name=kind)).to_be_visible()
        assert live.engine.requests[-1].prompt_token_ids == live.engine.requests[0].prompt_token_ids
        assert live.engine.requests[-1].rope_scaling == live.engine.requests[0].rope_scaling
    seen.done()


def test_key_is_requested_and_stored_in_the_tab_only(browser: Browser) -> None:
    with live_server(api_keys=("k",)) as live:
        set_reply(live, "open")
        seen = Seen(browser, live)
        page = seen.page
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("does not take")
        page.get_by_label("API key").fill("k")
        page.keyboard.press("Enter")
        seen.ask("hello")
        expect(page.locator(".message.assistant")).to_contain_text("open")
        page.reload()
        expect(page.get_by_label("Message", exact=True)).to_be_visible()
        stored = page.evaluate("Object.keys(localStorage)")
        assert all(key.startswith("windlass-chat:") for key in stored) and page.evaluate("document.cookie") == ""
        seen.complaints.clear()  # of the browser about the 401
        seen.done()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_the_width_of_a_phone(browser: Browser, live: Live, scheme: str) -> None:
    set_reply(live, "`" + "long" * 15 + "`\n\n| a | b |\n|---|---|\n| " + "wide" * 12 + " | 2 |\n")
    seen = Seen(browser, live, viewport={"width": 360, "height": 640}, color_scheme=scheme)
    seen.ask("hello")
    expect(seen.page.locator("table")).to_be_visible()
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")
    seen.done()
