"""Qwen2.5-Coder Instruct, served from its GGUF file: tool calls in many wordings, required calls, everyday questions.

`make test-real` downloads the models and runs these tests. They are skipped where the models are not downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.chat_chunks import assembled
from helpers.real_server import RealServer, serve

from windlass.server.startup.model_catalog import QWEN_CODER_0_5B, QWEN_CODER_1_5B, KnownModel, is_downloaded

# Some minutes with compiled kernels and two idle cores.
pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(3600)]

CONCURRENT = 8  # requests


def on_models(*models: KnownModel) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", models, indirect=True, scope="module", ids=lambda model: model.name)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    model: KnownModel = request.param
    if not is_downloaded(model):
        pytest.skip(f"{model.name} is not downloaded (`windlass pull {model.name}`)")
    with serve("--max-model-len", "4096", "--kv-cache-memory", "1GiB", model=model.name) as running:
        running.timeout = 1800
        yield running


# ---- tools and requests --------------------------------------------------------------------------------------------------
TEXT, NUMBER, INTEGER, YES = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
FUNCTIONS: dict[str, tuple[str, dict[str, Any], int]] = {  # description, parameters, how many of them are required
    "get_weather": ("Get the current weather in a city.", {"city": TEXT, "unit": {"enum": ["C", "F"]}}, 1),
    "get_forecast": ("Weather forecast for the next days.", {"city": TEXT, "days": INTEGER}, 2),
    "calculate": ("Evaluate an arithmetic expression.", {"expression": TEXT}, 1),
    "search_files": ("Find files whose names match a pattern.", {"pattern": TEXT, "directory": TEXT}, 1),
    "read_file": ("Read a text file.", {"path": TEXT}, 1),
    "write_file": ("Write a text file.", {"path": TEXT, "content": TEXT}, 2),
    "run_shell": ("Run a command in a shell and return its output.", {"command": TEXT}, 1),
    "create_event": (
        "Add an event to the calendar.",
        {"title": TEXT, "date": TEXT, "time": TEXT, "attendees": {"type": "array", "items": TEXT}},
        2,
    ),
    "list_events": ("List the events of a day.", {"date": TEXT}, 1),
    "send_email": ("Send an e-mail.", {"to": TEXT, "subject": TEXT, "body": TEXT}, 3),
    "web_search": ("Search the web.", {"query": TEXT, "max_results": INTEGER}, 1),
    "translate": ("Translate a text.", {"text": TEXT, "target_language": TEXT}, 2),
    "convert_currency": ("Convert an amount of money.", {"amount": NUMBER, "from": TEXT, "to": TEXT}, 3),
    "set_light": ("Switch a lamp on or off.", {"room": TEXT, "on": YES, "brightness": INTEGER}, 2),
    "query_database": ("Run an SQL query on the shop's database.", {"sql": TEXT}, 1),
    "stock_price": ("Price of a share.", {"symbol": TEXT}, 1),
    "current_time": ("The present time in a time zone.", {"timezone": TEXT}, 0),
}
HOME = ("set_light", "get_weather", "current_time")
FILES = ("search_files", "read_file", "write_file", "run_shell")
OFFICE = ("create_event", "list_events", "send_email")
WEB = ("web_search", "translate", "convert_currency", "stock_price", "get_weather")
EVERYTHING = tuple(FUNCTIONS)

BRIEF = "You are a helpful assistant. Use the tools whenever they can help."
REQUESTS: tuple[tuple[tuple[str, ...], str, str | None], ...] = (  # tools, question, system message
    (("get_weather",), "What is the weather in Rome?", None),
    (("get_weather",), "is it raining in oslo right now??", None),
    (("get_weather",), "Compare the weather in Paris and in London.", None),
    (("get_weather",), "I fly to Tokyo today. Do I need a coat? Please check.", BRIEF),
    (("get_weather", "get_forecast"), "Forecast for Berlin, next 3 days please", None),
    (("get_weather", "get_forecast"), "Temperature in Cairo in Fahrenheit?", BRIEF),
    (("get_weather", "get_forecast"), "How will the weather be in Madrid over the coming week?", None),
    (("calculate",), "What is 1234 * 5678?", None),
    (("calculate",), "Use the calculator: (17 + 4) / 3", None),
    (("calculate",), "I buy 3 books at 12.50 and one pen at 2.20. How much do I pay? Use the tool.", None),
    (("calculate", "get_weather"), "square root of 2 to the power of 10, please compute it", BRIEF),
    (("calculate", "convert_currency"), "Convert 250 USD to EUR.", None),
    (("calculate", "convert_currency"), "How many Japanese yen are 80 pounds?", BRIEF),
    (FILES, "Find all Python files in the folder src.", None),
    (FILES, "Show me what is in README.md", None),
    (FILES, 'Create a file hello.txt with the content "Hello, world!"', None),
    (FILES, "Which processes use port 8000? Run the right command.", None),
    (FILES, "Run `ls -la /tmp` for me", BRIEF),
    (FILES, "Write a Python script fib.py that prints the first 10 Fibonacci numbers.", BRIEF),
    (FILES, "Read config.yaml and then settings.json.", None),
    (FILES, "Delete all .pyc files below the current directory with a shell command.", None),
    (("run_shell",), "How much disk space is free?", "You are a shell agent. Always act through run_shell."),
    (("run_shell",), "Count the lines of all .c files here.", "You are a shell agent. Always act through run_shell."),
    (OFFICE, "Schedule a meeting with Anna on 2026-03-01 at 10:00.", None),
    (OFFICE, "What do I have on my calendar on 2026-05-12?", None),
    (OFFICE, "Send an e-mail to bob@example.org: the report is ready.", None),
    (OFFICE, 'Invite ann@example.org and joe@example.org to "Sprint review" on 2026-06-02 at 14:30', BRIEF),
    (OFFICE, "Write to the team (team@example.org) that tomorrow's stand-up is cancelled, and say sorry.", None),
    (OFFICE, "Am I free on 2026-07-01? If you need the calendar, look it up.", None),
    (WEB, "Search the web for the best pizza in Naples.", None),
    (WEB, 'Translate "good morning" into Spanish with the tool.', None),
    (WEB, "What does one Apple share cost (AAPL)?", None),
    (WEB, "Who won the chess world championship last year? Search for it, three results.", BRIEF),
    (WEB, "price of MSFT and GOOG", None),
    (WEB, "Wie ist das Wetter in Wien?", None),
    (WEB, "Traduis « merci beaucoup » en allemand avec l'outil.", None),
    (HOME, "Turn on the light in the kitchen.", None),
    (HOME, "Switch the bedroom lamp off", BRIEF),
    (HOME, "Living room light to 40 percent.", None),
    (HOME, "What time is it in New York?", None),
    (HOME, "Lights off in the kitchen, the hall and the bathroom.", None),
    (("query_database",), "How many orders are there? The table is called orders.", None),
    (("query_database",), "The five customers with the most orders (tables customers, orders).", BRIEF),
    (("query_database",), "Average price per category in the table products", None),
    (EVERYTHING, "What is the weather in Lisbon?", None),
    (EVERYTHING, "Add a dentist appointment on 2026-04-20 at 9.", BRIEF),
    (EVERYTHING, "Search my home directory for files named invoice*.pdf", None),
    (EVERYTHING, "What is 15% of 840?", None),
    (EVERYTHING, "Convert 100 CHF into USD, then send the result to max@example.org.", BRIEF),
    (EVERYTHING, "What time is it in Sydney and what is the weather there?", None),
)


def definitions(names: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        description, properties, required = FUNCTIONS[name]
        parameters = {"type": "object", "properties": properties, "required": list(properties)[:required]}
        function = {"name": name, "description": description, "parameters": parameters}
        found.append({"type": "function", "function": function})
    return found


def evident_calls(text: str, names: Sequence[str]) -> int:
    """The number of JSON objects or tags in a text that name one of these tools."""
    name = "|".join(map(re.escape, names))
    member = rf"""\\?["'](?:name|tool|tool_name|function|function_name|action)\\?["']\s*:\s*\\?["'](?:{name})\\?["']"""
    key = rf"""\{{\s*["'](?:{name})["']\s*:\s*\{{"""
    tag = rf"<[^<>\n]*\b(?:{name})\b[^<>\n]*>"
    return len(re.findall(f"{member}|{key}|{tag}", text))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request with tools. written: the model's text, with the calls. text: its content, without them."""

    question: str
    names: Sequence[str]
    written: str
    text: str
    calls: list[tuple[str, str]]
    finish_reason: str

    @property
    def evident(self) -> int:
        """The number of calls that the model evidently tried."""
        return evident_calls(self.written, self.names)

    def valid_calls(self) -> int:
        """The number of calls of a known function with the arguments that it requires and no others."""
        count = 0
        for name, written in self.calls:
            try:
                arguments = json.loads(written)
            except ValueError:
                continue
            _, properties, required = FUNCTIONS[name]
            count += set(list(properties)[:required]) <= arguments.keys() <= properties.keys()
        return count


def ask(server: RealServer, names: Sequence[str], question: str, system: str | None, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    body = {"messages": messages, "tools": definitions(names), "temperature": 0, "max_tokens": 300, **fields}
    body["return_token_ids"] = True
    if body.get("stream"):
        choice = assembled(server.stream("/v1/chat/completions", **body))
    else:
        (choice,) = server.ask("/v1/chat/completions", **body)["choices"]
    message, reason = choice["message"], choice["finish_reason"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    written = server.ask("/detokenize", tokens=choice["token_ids"])["prompt"]
    return Answer(question, names, written, message.get("content") or "", calls, reason)


def ask_all(server: RealServer, requests: Sequence[dict[str, Any]]) -> list[Answer]:
    with ThreadPoolExecutor(CONCURRENT) as pool:
        return list(pool.map(lambda fields: ask(server, **fields), requests))


# ---- tests ---------------------------------------------------------------------------------------------------------------
@on_models(QWEN_CODER_1_5B)
def test_evident_calls_are_returned(server):
    requests = [
        {"names": names, "question": question, "system": system, "stream": index % 2 == 1}
        for index, (names, question, system) in enumerate(REQUESTS)
    ]
    answers = ask_all(server, requests)
    print()
    for answer in answers:
        calls = "; ".join(f"{name} {' '.join(arguments.split())}" for name, arguments in answer.calls)
        found = f"{len(answer.calls)} of {answer.evident}"
        print(f"{found:8}{answer.question[:50]:52}{(calls or repr(answer.text))[:110]}")
    returned, tried = sum(len(answer.calls) for answer in answers), sum(answer.evident for answer in answers)
    valid, without = sum(answer.valid_calls() for answer in answers), sum(not answer.evident for answer in answers)
    print(
        f"{returned} of {tried} evident calls returned; {valid} of them fit the schema; {without} answers without a call"
    )
    assert [answer.written for answer in answers if len(answer.calls) != answer.evident] == []
    assert len(answers) - without >= 40, "the model makes fewer calls than it did: is its prompt complete?"
    assert all((answer.finish_reason == "tool_calls") == bool(answer.calls) for answer in answers)


REQUIRED = [0, 1, 4, 7, 11, 14, 24, 31, 36, 44]


@on_models(QWEN_CODER_1_5B, QWEN_CODER_0_5B)
def test_required_calls_end(server):
    requests = []
    for index in REQUIRED:
        names, question, system = REQUESTS[index]
        requests.append({"names": names, "question": question, "system": system, "tool_choice": "required"})
    answers = ask_all(server, requests)
    print()
    for answer in answers:
        print(f"{len(answer.calls)}  {answer.finish_reason:11}{answer.question[:45]:47}{answer.calls[:3]}")
    assert [answer.question for answer in answers if answer.finish_reason != "tool_calls" or answer.text] == []
    assert all(1 <= len(answer.calls) <= 3 and answer.valid_calls() == len(answer.calls) for answer in answers)


@on_models(QWEN_CODER_1_5B, QWEN_CODER_0_5B)
def test_a_named_function_is_called_once(server):
    requests = []
    for index in REQUIRED:
        names, question, system = REQUESTS[index]
        choice = {"type": "function", "function": {"name": names[-1]}}
        requests.append({"names": names, "question": question, "system": system, "tool_choice": choice})
    answers = ask_all(server, requests)
    print()
    for answer in answers:
        print(f"{answer.finish_reason:11}{answer.question[:45]:47}{answer.calls[:3]}")
    assert [answer.question for answer in answers if answer.finish_reason != "tool_calls" or answer.text] == []
    assert all([name for name, _ in answer.calls] == [answer.names[-1]] for answer in answers)
    assert all(answer.valid_calls() == 1 for answer in answers)


EVERYDAY = {
    "What is the capital of France?": "Paris",
    "What is 17 x 23?": "391",
    'How do you say "good morning" in Spanish?': "Buenos días",
    "Who wrote Hamlet?": "Shakespeare",
    "How many days are in a leap year?": "366",
    "What is the chemical symbol of gold?": "Au",
    "Write a Python function that reverses a list, without comments.": "def ",
}


@on_models(QWEN_CODER_1_5B)
@pytest.mark.parametrize("question", EVERYDAY)
def test_everyday_questions_are_answered(server, question):
    messages = [{"role": "user", "content": question}]
    answer = server.ask("/v1/chat/completions", messages=messages, temperature=0, max_tokens=120)
    assert EVERYDAY[question].lower() in answer["choices"][0]["message"]["content"].lower()


@on_models(QWEN_CODER_1_5B, QWEN_CODER_0_5B)
def test_recommended_sampling_is_the_default(server):
    (card,) = server.get("/v1/models")["data"]
    wanted = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    assert card["recommended_sampling"] == wanted and wanted.items() <= card["sampling_defaults"].items()
