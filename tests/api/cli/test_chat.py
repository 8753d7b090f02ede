"""`windlass chat` in a real terminal, and without one, against real servers with the bundled model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from api_helpers.pseudo_terminal import CTRL_C, CTRL_D, ENTER, UP, PseudoTerminal, paste
from helpers.eventually import alive, children, eventually, exit_code
from helpers.live_server import live_server
from helpers.real_server import RealServer, serve

from windlass.server.cli.chat import ChatConsole
from windlass.server.config.settings import SamplingDefaults

MAIN = ("-m", "windlass.server.cli.main")
SETTINGS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PARAMS = "/params temperature=0 max_tokens=12 ignore_eos=true"


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    profile = 'long={"rope_type": "yarn", "factor": 2.0}'
    with serve("--kv-cache-memory", "64MiB", "--deterministic", "--rope-profile", profile) as running:
        yield running


@pytest.fixture
def terminal(server) -> Iterator[PseudoTerminal]:
    with PseudoTerminal(*MAIN, "chat", "--url", server.url) as opened:
        opened.wait(r"demo \(.* parameters, context of 512 tokens\)\. /help .*\n")
        yield opened


def answer(server: RealServer, *messages: tuple[str, str], **more: object) -> tuple[str, int]:
    """The API's answer to these messages, and the number of tokens of prompt and answer."""
    body = {"messages": [{"role": role, "content": text} for role, text in messages], **SETTINGS, **more}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    return found["choices"][0]["message"]["content"], found["usage"]["total_tokens"]


def read(shown: str) -> tuple[str, int]:
    """The answer and the number of context tokens shown in a terminal."""
    (text, context) = re.fullmatch(
        r"(.*)\n\d+ tokens in [\d.]+ s \(.*?\), ([\d,]+) of 512 tokens of context used.*\n", shown, re.DOTALL
    ).groups()
    return text, int(context.replace(",", ""))


@pytest.mark.slow
def test_the_conversation_and_its_commands(server, terminal):
    terminal.ask(PARAMS, r"next requests: temperature=0 max_tokens=12 ignore_eos=true\n")
    horse, dog = "What does horse mean?", "What does dog mean?"
    first, second = read(terminal.ask(horse)), read(terminal.ask(dog))
    assert first == answer(server, ("user", horse))
    both = ("user", horse), ("assistant", first[0]), ("user", dog)
    assert second == answer(server, *both) != answer(server, ("user", dog))
    assert read(terminal.ask("/retry")) == second
    terminal.ask("/undo", r"removed: What does dog mean\?\n")
    terminal.ask("/system Be brief.", r"system message: Be brief\.\n")
    third = read(terminal.ask(dog))
    assert third == answer(server, ("system", "Be brief."), *both) != second
    terminal.ask("/new", r"cleared.*\n")
    terminal.ask("/system off", r"system message: none\n")
    assert read(terminal.ask(dog)) == answer(server, ("user", dog))
    terminal.wait_prompt()
    terminal.type(CTRL_D)
    assert terminal.end() == 0


@pytest.mark.slow
def test_scalings_change_between_answers(server, terminal):
    terminal.ask(PARAMS, "ignore_eos=true\n")
    question = "What does horse mean?"
    assert "yarn" not in terminal.ask(question)
    for command, sent, shown in (
        ("/rope yarn 4", {"rope_type": "yarn", "factor": 4}, "yarn, factor 4"),
        ('/rope {"rope_type": "linear", "factor": 8}', {"rope_type": "linear", "factor": 8}, "linear, .*factor 8"),
        (
            "/rope yarn 16 beta_fast=8",
            {"rope_type": "yarn", "factor": 16, "beta_fast": 8},
            "yarn, .*factor 16, beta_fast 8",
        ),
        ("/rope long", "long", "yarn, .*factor 2"),
        ("/rope default", {"rope_type": "default"}, "default"),
        ("/rope auto", "auto", r"default, chosen for \d+ tokens"),
    ):
        terminal.ask("/new", "cleared")
        terminal.ask(command, r"next answers: .*\n")
        output = terminal.ask(question)
        assert re.search(rf"scaling {shown}\n$", output), output
        assert read(output) == answer(server, ("user", question), rope_scaling=sent)
        assert re.search(rf"last answer: .*{shown}, policy frozen", terminal.ask("/rope", r"last answer: .*\n"))
    terminal.ask("/rope off", "under the server's own scaling\n")
    assert "rope_theta" not in terminal.ask(question)


def test_failed_commands_are_one_line_and_change_nothing(server, terminal):
    terminal.ask(PARAMS, "ignore_eos=true\n")
    terminal.ask("/rope yarn 4", "next answers: yarn, factor 4\n")
    for line, reason in (
        ("/rop yarn 4", r"there is no /rop \(did you mean 'rope'\?\)"),
        ("/rope yarn", r"factor is missing"),
        ("/rope linear x", r"factor must be a number"),
        ("/rope bogus", r"neither a kind of scaling .* nor a profile"),
        ("/rope yarm", r"neither a kind of scaling .* nor a profile here \(did you mean 'yarn'\?\)"),
        ("/rope yarm 4", r"rope_type 'yarm' is not known \(did you mean 'yarn'\?\)"),
        ('/rope {"rope_type": "yarm"}', r"rope_type 'yarm' is not known \(did you mean 'yarn'\?\)"),
        ("/rope {", r"not valid JSON"),
        ("/params temprature=1", r"'temprature' is not a field that a chat can set \(did you mean 'temperature'\?\)"),
        ("/params wings=2", r"a chat can set: those are add_generation_prompt, .*, temperature, .*, xtc_threshold"),
        ("/params temperature", r"write name=value"),
        ("/params temperature=hot", r"temperature should be a valid number"),
        ("/params top_p=0.9 temperature=900", r"temperature should be less than or equal to 100"),
        ("/params seed=1.5", r"seed should be a valid integer"),
        ("/context window=wide", r"attention_window should be a valid integer"),
        ("/context roll", r"'roll' is not a context setting: write stop, error, shift, drop_turns, keep=NUMBER"),
        ("/context shift bytes=3", r"'bytes=3' is not a context setting"),
        ("/undo", r"there is no question yet"),
        ("/retry", r"there is no question yet"),
    ):
        output = terminal.ask(line, ".*\n")
        assert re.fullmatch(f"error: .*{reason}.*\n", output) and "docs/" not in output, line
    terminal.ask("/params thinking_budget=5", r"thinking_budget=5\n")  # refused only because of the model
    terminal.ask("hello", r"error: .*does not separate thinking.*\n")
    terminal.ask("/params thinking_budget=", r"ignore_eos=true\n")
    output = terminal.ask("What does horse mean?")  # the failed question is not part of the conversation
    assert "yarn" in output
    sent = {"rope_type": "yarn", "factor": 4}
    assert read(output) == answer(server, ("user", "What does horse mean?"), rope_scaling=sent)


@pytest.mark.slow
def test_ctrl_c_stops_only_the_answer(server, terminal):
    terminal.ask("/params max_tokens=100000 ignore_eos=true temperature=0", "ignore_eos=true")
    terminal.ask("/context shift", "context_overflow=shift\n")
    terminal.wait_prompt()
    terminal.type("What does horse mean?" + ENTER)
    terminal.wait(r"horse mean\?\n.*\w{3}")
    terminal.type(CTRL_C)
    terminal.wait(r"stopped after about \d+ tokens.*\n")
    eventually(lambda: server.metric("windlass_num_requests_running") == 0, 30)
    terminal.wait_prompt()
    terminal.type("half a li" + CTRL_C)  # discards the line
    terminal.wait("ctrl-D or /quit ends the chat\n")
    # The stopped answer may be of any length.
    terminal.ask("/params max_tokens=5 truncate_prompt_tokens=400", "max_tokens=5")
    context = read(terminal.ask("What does dog mean?"))[1]
    assert (
        context > answer(server, ("user", "What does dog mean?"), max_tokens=5)[1]
    )  # the stopped answer is part of the conversation
    terminal.wait_prompt()
    terminal.type("/quit" + ENTER)
    assert terminal.end() == 0


def test_further_ctrl_c_are_ignored():
    before = signal.getsignal(signal.SIGINT)
    try:
        console = ChatConsole()
        for _ in range(2):
            with console.interrupt_stops_answer():
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # between two contexts it is ignored
        with console.interrupt_exits():
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_history_and_messages_of_several_lines(server, terminal):
    terminal.ask(PARAMS, "ignore_eos=true\n")
    shown = read(terminal.ask("What does dog mean?"))
    terminal.ask("/new", "cleared")
    assert read(terminal.ask(UP + UP)) == shown
    terminal.ask("/new", "cleared")
    lines = answer(server, ("user", "one\ntwo\nthree"))
    terminal.wait_prompt()
    terminal.type(paste("one\ntwo\nthree") + ENTER)
    output = terminal.wait(r"of 512 tokens of context used\n")
    assert f"\n{lines[0]}\n12 tokens in" in output and output.endswith(f" {lines[1]} of 512 tokens of context used\n")
    terminal.ask("/new", "cleared")
    terminal.wait_prompt()
    for line in ('"""one', "two"):
        terminal.type(line + ENTER)
        terminal.wait(r"\.\.\. ")
    terminal.type('three"""' + ENTER)
    terminal.wait("\n")
    assert read(terminal.wait(r".* of context used.*\n")) == lines


def piped(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *MAIN, "chat", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_without_a_terminal(server):
    result = piped(f"{PARAMS}\n\nWhat does horse mean?\n", "--url", server.url)
    assert result.returncode == 0
    assert result.stdout == answer(server, ("user", "What does horse mean?"))[0] + "\n"
    assert "\x1b" not in result.stderr and "12 tokens" in result.stderr
    result = piped("/rope bogus\n", "--url", server.url)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_end_of_the_input_ends_an_open_block(server):
    result = piped(f'{PARAMS}\n"""What does\nhorse mean?\n', "--url", server.url)
    assert result.returncode == 0, result.stderr
    assert result.stdout == answer(server, ("user", "What does\nhorse mean?"))[0] + "\n"
    assert piped('"""\n', "--url", server.url).stdout == ""


@pytest.mark.slow
def test_recommended_sampling_is_the_default():
    sampling = SamplingDefaults(temperature=0.2, top_p=0.9)
    with live_server(sampling=sampling, recommended_sampling={"temperature": 0.2, "top_p": 0.9}) as live:
        live.engine.eos_after = 3
        lines = "hello\n/params temperature=1\nhello\n/params temperature=\nhello\n"
        run = piped(lines, "--url", live.url)
        assert run.returncode == 0, run.stderr
        drawn = [(request.sampling.temperature, request.sampling.top_p) for request in live.engine.requests]
        assert drawn == [(0.2, 0.9), (1.0, 0.9), (0.2, 0.9)]
        with PseudoTerminal(*MAIN, "chat", "--url", live.url) as terminal:
            terminal.wait(r"Sampling as the model's authors recommend: temperature 0\.2, top_p 0\.9\. /params .*\n")
            terminal.ask("/params temperature=0", r"next requests: temperature=0\n")


@pytest.mark.slow
def test_a_model_without_a_template_is_refused_first():
    with live_server(template=None) as live:
        result = piped("hello\n", "--url", live.url)
        assert (result.returncode, result.stdout, live.engine.requests) == (2, "", [])
        assert "toy has no chat template: continue texts with `windlass generate`, or give it one with" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_unreachable_server():
    result = piped("hello\n", "--url", "http://127.0.0.1:9")
    assert result.returncode == 2
    assert result.stderr.startswith("error: cannot reach http://127.0.0.1:9/v1/models: Connection refused; ")


@pytest.mark.slow
def test_an_unknown_model_is_refused_first(server):
    result = piped("", "other", "--url", server.url)
    assert result.returncode == 2 and result.stderr.startswith(
        f"error: {server.url}: the model 'other' does not exist here"
    )


@pytest.mark.slow
def test_an_api_key():
    with serve("--kv-cache-memory", "64MiB", "--api-key", "secret") as locked:
        refused = piped("hi\n", "--url", locked.url)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1
        assert refused.stderr.endswith(": give one with --api-key\n")
        given = piped("/params max_tokens=3\nhi\n", "--url", locked.url, "--api-key", "secret")
        assert given.returncode == 0 and given.stdout


@pytest.mark.slow
def test_an_invalid_model_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = piped("hello\n", str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and "config.json" in result.stderr


OWN = (*MAIN, "chat", "demo", "--kv-cache-memory", "64MiB", "--max-model-len", "64", "--threads", "1")


def family(pid: int) -> set[int]:
    """All descendants of a process."""
    below = set(children(pid))
    return below.union(*(family(child) for child in below))


def test_a_managed_server_and_a_full_context():
    with PseudoTerminal(*OWN, environment={"WINDLASS_PORT": "1", "WINDLASS_API_KEY": "theirs"}) as terminal:
        terminal.wait(r"demo \(.* context of 64 tokens\)")
        below = family(terminal.process.pid)
        assert len(below) >= 2
        terminal.ask("/params ignore_eos=true", "ignore_eos=true\n")
        full = r"the context is full: /new starts a new chat, .*/context drop_turns .*\n"
        terminal.ask("What does horse mean?", rf" 64 of 64 tokens of context used\n{full}")
        terminal.ask("What does horse mean?", rf"error: .*64 tokens.*\n{full}")
        terminal.ask("/params truncate_prompt_tokens=30 max_tokens=4", "max_tokens=4\n")
        terminal.ask("What does horse mean?", r" 34 of 64 tokens of context used\n")
        terminal.ask("/params truncate_prompt_tokens= max_tokens=12", "max_tokens=12\n")
        terminal.ask("/context drop_turns", "next answers: context_overflow=drop_turns\n")
        terminal.ask("What does horse mean?", r" of 64 tokens of context used, \d+ turns? dropped\n")
        terminal.ask("/context", r"context_overflow=drop_turns\n.*last answer: \d+ turns? dropped\n")
        terminal.ask("/new", "cleared")
        terminal.ask("/params max_tokens=200", "max_tokens=200 ")
        terminal.ask("/context shift keep=0", "next answers: context_overflow=shift keep_tokens=0\n")
        terminal.ask(
            "What does horse mean?", r"200 tokens.* [1-6]\d of 64 tokens of context used, \d+ tokens dropped\n"
        )
        terminal.ask("/context off", "next answers: the server's default\n")
        terminal.wait_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        eventually(lambda: not any(map(alive, below)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_the_managed_server_ends_with_the_chat(number):
    with PseudoTerminal(*OWN) as terminal:
        terminal.wait(r"demo \(.* context of 64 tokens\)")
        below = family(terminal.process.pid)
        os.kill(terminal.process.pid, number)
        exit_code(terminal.process)
        eventually(lambda: not any(map(alive, below)))


@pytest.mark.slow
def test_the_managed_server_dies():
    with PseudoTerminal(*OWN) as terminal:
        terminal.wait(r"demo \(.* context of 64 tokens\)")
        below = family(terminal.process.pid)
        for pid in below:
            os.kill(pid, signal.SIGKILL)
        terminal.ask("hello", r"error: the server ended.*\n")
        assert terminal.end() == 2
