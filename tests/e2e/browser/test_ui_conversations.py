"""Conversations of the page in a real browser: storage, export and import, comparison, attachments and shortcuts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import Seen, violations
from helpers.live_server import Live, live_server
from playwright.sync_api import Browser, Locator, Page, expect

from windlass.engine.rotary.rope_scaling import RopeScaling

DESK = {"width": 1280, "height": 800}
YARN = RopeScaling.from_dict({"rope_type": "yarn", "factor": 4})
PICKED = RopeScaling.from_dict({"rope_type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1})

# Drop a file on the message.
DROP = """() => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File(["dropped"], "more.txt"));
  document.querySelector(".composer").dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true}));
}"""
WRONG = (
    "no json",
    "{}",
    '{"conversations": [{"columns": [{"messages": [{"role": "system"}]}]}]}',
    "<!-- windlass: {} -->\nx",
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    with live_server(rope_profiles={"long": YARN}, other_model_names=("other",)) as live:
        yield live


@pytest.fixture
def seen(browser: Browser, live: Live) -> Iterator[Seen]:
    """The page, which is checked for errors at the end."""
    seen = Seen(browser, live, viewport=DESK)
    yield seen
    seen.done()


def facts(page: Page) -> Locator:
    return page.locator(".message.assistant > .tools .facts")


def ask(seen: Seen, text: str, answers: int) -> None:
    """Ask, and wait until the page has this number of finished answers."""
    seen.ask(text)
    expect(facts(seen.page)).to_have_count(answers)
    expect(seen.page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def titles(page: Page) -> Locator:
    return page.get_by_role("complementary", name="Conversations").locator("button.conversation")


# ---- storage ---------------------------------------------------------------------------------------------------------
def test_conversation_and_its_settings_survive_a_reload(seen: Seen, live: Live) -> None:
    live.generate("first answer")
    page = seen.page
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("combobox", name="Model").select_option("other")
    page.get_by_label("Kind").select_option("yarn")
    page.get_by_label("Factor").fill("8")
    ask(seen, "hello there", 1)
    page.reload()
    expect(page.locator(".message.assistant .markdown")).to_have_text("first answer")
    expect(titles(page)).to_have_text(["hello there"])
    expect(page.get_by_role("combobox", name="Model")).to_have_value("other")
    live.generate("long\n\n" * 50)
    ask(seen, "again", 2)
    first, second = live.engine.requests
    page.reload()
    expect(facts(page).last).to_be_in_viewport()  # a stored conversation is shown at its end
    assert first.rope_scaling == second.rope_scaling == PICKED
    assert second.sampling.temperature == 0.5
    for text in ("[system]Be brief.", "hello there", "first answer", "again"):
        assert text in live.prompt


def test_list_opens_renames_and_deletes(seen: Seen, live: Live) -> None:
    live.generate("fine")
    page = seen.page
    ask(seen, "one", 1)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    ask(seen, "two", 1)
    expect(titles(page)).to_have_text(["two", "one"])
    titles(page).nth(1).click()
    expect(page.locator(".message.user .plain")).to_have_text("one")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("My first")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text(["two", "My first"])
    ask(seen, "more", 2)
    expect(titles(page)).to_have_text(["My first", "two"])  # the name remains
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(titles(page)).to_have_text(["two"])
    page.reload()
    expect(titles(page)).to_have_text(["two"])
    assert len(page.evaluate("Object.keys(localStorage)")) == 1


def test_many_conversations_are_searched(seen: Seen, tmp_path: Path) -> None:
    page = seen.page
    search = page.get_by_label("Search conversations")
    expect(search).to_have_count(0)
    columns = [
        [{"messages": [{"role": "user", "content": f"Question {number}, about KNOTS{number}"}]}] for number in range(6)
    ]
    stored = [{"title": f"Talk {number}", "columns": columns[number]} for number in range(6)]
    file = tmp_path / "many.json"
    file.write_text(json.dumps({"conversations": stored}))
    page.get_by_label("Files to import").set_input_files(file)
    expect(titles(page)).to_have_count(6)
    search.fill("talk 3")
    expect(titles(page)).to_have_text(["Talk 3"])
    search.fill("knots4")
    expect(titles(page)).to_have_text(["Talk 4"])
    search.fill("none such")
    expect(page.get_by_text("No conversation contains this text.")).to_be_visible()
    search.fill("")
    expect(titles(page)).to_have_count(6)


@pytest.mark.parametrize("kind", ["JSON", "Markdown"])
def test_export_is_imported_again(seen: Seen, live: Live, tmp_path: Path, kind: str) -> None:
    answer = "# Title\n\n```\n<!-- code -->\n```\n\n* last"
    live.generate(answer)
    page = seen.page
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("group", name="Right: rotary scaling").get_by_label("Kind").select_option("profile:long")
    ask(seen, "what -- is\n\nthis?", 2)
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("My comparison")
    page.keyboard.press("Enter")
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Export {kind}").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    written = file.read_text()
    if kind == "JSON":
        written = json.loads(written)["conversations"][0]["columns"][0]["messages"][1]["content"]
    assert answer in written
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_label("Files to import").set_input_files(file)
    expect(page.locator(".message")).to_have_count(4)
    expect(titles(page)).to_have_count(1)
    ask(seen, "next", 4 if kind == "JSON" else 2)  # Markdown has no figures of earlier answers
    scalings = {request.rope_scaling for request in live.engine.requests[2:]}
    assert scalings == {None, YARN} and answer in live.prompt and "what -- is\n\nthis?" in live.prompt
    expect(titles(page)).to_have_text(["My comparison"])


def test_files_that_are_no_export_are_refused(seen: Seen, tmp_path: Path) -> None:
    page = seen.page
    for number, text in enumerate(WRONG):
        file = tmp_path / f"wrong{number}.json"
        file.write_text(text)
        page.get_by_label("Files to import").set_input_files(file)
        expect(page.get_by_role("alert")).to_contain_text(f"wrong{number}.json is no export")
    expect(titles(page)).to_have_count(0)


def test_full_storage_is_reported(seen: Seen, live: Live) -> None:
    live.generate("kept in memory")
    page = seen.page
    page.evaluate("localStorage.setItem('windlass-chat:full', ' '.repeat(4_000_000))")
    ask(seen, "x", 1)
    expect(page.get_by_role("alert")).to_contain_text("no more space")
    page.evaluate("localStorage.removeItem('windlass-chat:full')")
    ask(seen, "y", 2)
    expect(page.get_by_role("alert")).to_have_count(0)


# ---- comparison ------------------------------------------------------------------------------------------------------
def test_comparison_copies_the_history_and_uses_one_seed(seen: Seen, live: Live) -> None:
    live.generate("same")
    page = seen.page
    ask(seen, "earlier", 1)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".message")).to_have_count(4)
    page.get_by_role("group", name="Right: rotary scaling").get_by_label("Kind").select_option("linear")
    ask(seen, "now", 4)
    left, right = live.engine.requests[1:]
    assert left.prompt_token_ids == right.prompt_token_ids and "earlier" in live.prompt
    assert left.sampling.seed == right.sampling.seed is not None and left.rope_scaling != right.rope_scaling
    expect(facts(page).last).to_contain_text(f"seed {left.sampling.seed}")
    expect(page.locator("mark")).to_have_count(0)  # the answers are equal


def test_first_difference_is_marked(browser: Browser, live: Live) -> None:
    texts = {True: "The capital is Lyon.", False: "The capital is Paris, I think."}
    encode = lambda text: live.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    live.engine.answer = lambda request: encode(texts[request.rope_scaling is None])
    seen = Seen(browser, live, viewport=DESK)
    page = seen.page
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("group", name="Right: rotary scaling").get_by_label("Kind").select_option("linear")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Temperature").fill("0")
    ask(seen, "Where?", 2)
    assert [request.sampling.seed for request in live.engine.requests] == [None, None]  # needed only for sampling
    ids = [encode(texts[own]) for own in (True, False)]
    index = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    for column, own in (("Left", True), ("Right", False)):
        region = page.get_by_role("region", name=column)
        token = live.tokenizer.token_text(ids[not own][index])
        expect(region.locator("mark")).to_have_text(token)
        expect(region.get_by_text(f"differs from token {index + 1}")).to_be_visible()
        expect(region.locator(".markdown")).to_have_text(texts[own])
    seen.done()


def test_empty_answer_is_labelled(seen: Seen, live: Live) -> None:
    live.engine.eos_after = 0
    ask(seen, "hello", 1)
    expect(facts(seen.page)).to_contain_text("empty answer: the model ended at once")


# ---- messages --------------------------------------------------------------------------------------------------------
def test_progress_of_a_long_prompt(browser: Browser) -> None:
    with live_server(model={"max_model_len": 8192}) as live:
        live.generate("answer")
        live.engine.cached_tokens, live.engine.held = 7, True
        seen = Seen(browser, live, viewport=DESK)
        seen.ask("word " * 1200)
        reading, waiting = seen.page.locator(".reading"), seen.page.locator(".waiting")
        expect(reading).to_contain_text("Reading: 7 of ")
        expect(reading.get_by_role("progressbar")).to_have_attribute("value", "7")
        expect(waiting).to_have_count(0)
        live.engine.held = False
        expect(facts(seen.page)).to_have_count(1)
        expect(reading).to_have_count(0)
        seen.done()


def test_answer_that_was_cut_is_continued(seen: Seen, live: Live) -> None:
    live.engine.reply = live.tokenizer.encode("abc", add_special_tokens=False)
    page = seen.page
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Longest answer").fill("3")
    ask(seen, "go", 1)
    expect(facts(page)).to_contain_text("cut at the longest answer")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".message.assistant .markdown")).to_have_text("abcabc")
    expect(facts(page)).to_contain_text("6 tokens")
    assert live.prompt.endswith("[assistant]abc")
    expect(page.locator(".message")).to_have_count(2)


def test_full_context_is_reported_and_its_oldest_turns_can_be_dropped(seen: Seen, live: Live) -> None:
    page = seen.page
    expect(page.get_by_role("heading", name="Chat with toy")).to_be_visible()
    expect(page.get_by_text("Loading.")).to_have_count(0)
    live.generate("fine")
    ask(seen, "first question", 1)
    used = len(live.engine.requests[0].prompt_token_ids) + len(live.engine.reply) + 1
    expect(facts(page)).to_contain_text(f"{used} of 256 tokens of context used")
    live.reset()  # an engine that never ends an answer
    ask(seen, "second question", 2)
    expect(facts(page).last).to_contain_text("the context is full")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    live.generate("fine")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("When the context is full").select_option("drop_turns")
    page.get_by_label("Longest answer").fill("20")
    ask(seen, "third question", 3)
    assert "third question" in live.prompt and "first question" not in live.prompt
    page.reload()
    expect(page.get_by_label("When the context is full")).to_have_value("drop_turns")


def test_text_files_are_attached(seen: Seen, live: Live, tmp_path: Path) -> None:
    live.generate("read")
    page = seen.page
    file, binary, large = (tmp_path / name for name in ("notes.py", "picture.bin", "large.txt"))
    file.write_text("x = '```'\n")
    binary.write_bytes(b"\x00\xff")
    large.write_text("a" * 300_000)
    page.get_by_label("Text files").set_input_files([file])
    expect(page.get_by_role("list", name="Attached files")).to_contain_text("notes.py")
    for wrong, reason in ((binary, "no text in UTF-8"), (large, "at most 256 KiB")):
        page.get_by_label("Text files").set_input_files([wrong])
        expect(page.get_by_role("alert")).to_contain_text(f"{wrong.name}")
        expect(page.get_by_role("alert")).to_contain_text(reason)
    page.evaluate(DROP)
    expect(page.get_by_role("listitem").filter(has_text="more.txt")).to_be_visible()
    ask(seen, "what is it?", 1)
    assert "notes.py:\n````py\nx = '```'\n````\n\nmore.txt:\n```txt\ndropped\n```\n\nwhat is it?" in live.prompt
    expect(page.get_by_role("list", name="Attached files")).to_have_count(0)


def test_code_is_highlighted_without_html(seen: Seen, live: Live) -> None:
    live.generate('```python\ndef f(): return "<b onclick=x>"\n```')
    ask(seen, "code", 1)
    code = seen.page.locator("pre code")
    expect(code.locator(".hl-keyword").first).to_have_text("def")
    expect(code.locator(".hl-string")).to_have_text('"<b onclick=x>"')
    expect(code).to_have_text('def f(): return "<b onclick=x>"')
    assert code.locator("b").count() == 0


def test_shortcuts_and_their_sheet(seen: Seen, live: Live) -> None:
    live.generate("fine")
    page = seen.page
    ask(seen, "one?", 1)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    sheet = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(sheet).to_contain_text("generate the last answer again")
    page.keyboard.press("Escape")
    expect(sheet).to_have_count(0)
    page.keyboard.press("r")
    live.wait(lambda: len(live.engine.requests) == 2)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    page.keyboard.press("c")
    expect(page.get_by_role("button", name="Compare")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("c")
    page.keyboard.press("l")
    expect(titles(page)).to_have_count(0)
    page.keyboard.press("e")
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    expect(page.locator(".message")).to_have_count(0)
    page.keyboard.type("n?")  # text, in the focused field
    expect(page.get_by_label("Message", exact=True)).to_have_value("n?")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_part_of_the_chat_is_accessible(
    browser: Browser, live: Live, width: int, scheme: str, tmp_path: Path
) -> None:
    code = "\n\n```python\n# why\n@wraps\ndef f(x: int = 1): return f'{x}' + \"s\"\n```\n"
    texts = {True: f"Paris.{code}", False: f"Lyon, `or` **not**.{code}"}
    live.engine.answer = lambda request: live.tokenizer.encode(
        texts[request.rope_scaling is None], add_special_tokens=False
    )
    phone = width < 1000
    seen = Seen(
        browser, live, viewport={"width": width, "height": 844}, color_scheme=scheme, is_mobile=phone, has_touch=phone
    )
    page = seen.page
    assert violations(page) == []
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("group", name="Right: rotary scaling").get_by_label("Kind").select_option("yarn")
    ask(seen, "Where? " * 12, 2)
    sides = [page.get_by_role("region", name=name).locator(".message").first for name in ("Left", "Right")]
    tops = [(side.bounding_box() or {})["y"] for side in sides]
    assert phone or tops[0] == tops[1]  # although the right column has more sliders
    expect(page.locator(".hl-keyword")).to_have_count(4)
    (tmp_path / "notes.txt").write_text("text")
    page.get_by_label("Text files").set_input_files([tmp_path / "notes.txt"])
    if phone:
        page.get_by_role("button", name="Conversations").click()
        heights = page.locator("button:visible").evaluate_all("all => all.map((one) => one.offsetHeight)")
        assert min(heights) >= 40  # for fingers
    page.get_by_role("button", name="Rename").click()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="Keyboard shortcuts").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    seen.done()
