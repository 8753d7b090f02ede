"""Workloads: exact lengths, shared parts, seeds, conversations and limits."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter

import pytest

from windlass.clients.loadtest.load_plan import Lengths, TraceEntry, WeightedScaling, WorkloadSpec
from windlass.clients.loadtest.results import RequestRecord
from windlass.clients.loadtest.target import LoadTestError, Server
from windlass.clients.loadtest.workload import Vocabulary, Workload

IDS = Vocabulary(pieces=[b"%d" % number for number in range(100, 900)], ids=True, exact=True)
WORDS = Vocabulary(pieces=[b"one", b"two", b"three"], ids=False, exact=True, overhead=3, first=b"the")


def workload(vocabulary=IDS, limit=None, seed=0, **fields) -> Workload:
    parsed = {name: Lengths.parse(value, minimum=0) for name, value in fields.items() if isinstance(value, str)}
    fields |= parsed
    server = Server(model="m", entry={"max_model_len": limit})
    return Workload(WorkloadSpec(**fields), server=server, vocabulary=vocabulary, seed=seed)


def advance(conversation, text="", token_ids=None, **counts) -> bool:
    """Advance a conversation with a response of the planned lengths, or of the given counts."""
    request = conversation.request
    counts = {"input_tokens": request.input_tokens, "output_tokens": request.output_tokens} | counts
    return conversation.advance(RequestRecord(index=0, intended=0.0, text=text, token_ids=token_ids, **counts))


def calls(load: Workload, count: int = 50):
    return [conversation.request for conversation in itertools.islice(load.conversations(), count)]


def bodies(load: Workload, count: int = 50):
    return [json.loads(call.body) for call in calls(load, count)]


def test_prompts_of_token_ids_have_the_exact_length():
    load = workload(input_len="8192", output_len="64", ignore_eos=True)
    for call in calls(load, 4):
        body = json.loads(call.body)
        assert len(body["prompt"]) == call.input_tokens == 8192
        assert set(body["prompt"]) <= set(range(100, 900)) and len(set(body["prompt"])) > 700
        assert body["max_tokens"] == call.output_tokens == 64
        assert (body["model"], body["stream"], body["temperature"], body["ignore_eos"]) == ("m", True, 0.0, True)
        assert body["stream_options"] == {"include_usage": True}
        assert call.path == "/v1/completions"


def test_drawn_lengths():
    load = workload(input_len="uniform:10:20", output_len="normal:30:5")
    drawn = calls(load, 300)
    assert all(len(json.loads(call.body)["prompt"]) == call.input_tokens for call in drawn)
    assert {call.input_tokens for call in drawn} == set(range(10, 21))
    assert len({call.output_tokens for call in drawn}) > 10


def test_requests_depend_on_the_seed_and_streams_are_independent():
    base = {"input_len": "uniform:5:50", "output_len": "uniform:5:50"}
    one = calls(workload(**base), 30)
    assert [call.body for call in one] == [call.body for call in calls(workload(**base), 30)]
    assert [call.body for call in one] != [call.body for call in calls(workload(**base, seed=1), 30)]
    changes = {"output_len": "7"}, {"disconnect_share": 0.5}, {"scalings": [WeightedScaling("a"), WeightedScaling("b")]}
    for change in changes:  # other options do not change the prompts
        other = calls(workload(**{**base, **change}), 30)
        assert [json.loads(c.body)["prompt"] for c in one] == [json.loads(c.body)["prompt"] for c in other]


def test_text_prompts_include_the_overhead():
    for call in calls(workload(WORDS, input_len="20"), 3):
        words = json.loads(call.body)["prompt"].split(" ")
        assert words[0] == "the" and len(words) == 1 + 20 - 3
        assert call.input_tokens == 20
    (call,) = calls(workload(WORDS, input_len="20", chat=True), 1)
    (message,) = json.loads(call.body)["messages"]
    assert message["role"] == "user" and len(message["content"].split(" ")) == 18
    assert call.path == "/v1/chat/completions"


def test_groups_share_their_prefix():
    prompts = [body["prompt"] for body in bodies(workload(input_len="10", prefix_groups=3, prefix_len=40), 60)]
    assert all(len(prompt) == 50 for prompt in prompts)
    groups = Counter(tuple(prompt[:40]) for prompt in prompts)
    assert len(groups) == 3 and min(groups.values()) > 5
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 60


def test_documents_are_repeated_at_other_positions():
    load = workload(input_len="10", documents=2, document_len="50", document_offset="uniform:0:30")
    drawn = calls(load, 60)
    shared = {}
    for call in drawn:
        prompt = json.loads(call.body)["prompt"]
        assert len(prompt) == call.input_tokens
        document = tuple(prompt[-60:-10])
        shared.setdefault(document, set()).add(len(prompt) - 60)
    assert len(shared) == 2
    assert all(len(offsets) > 5 and min(offsets) >= 0 and max(offsets) <= 30 for offsets in shared.values())


def test_document_offset_is_cut_to_fit():
    load = workload(
        input_len="50", output_len="10", documents=2, document_len="100", document_offset="uniform:0:1000", limit=400
    )
    drawn = [body["prompt"] for body in bodies(load, 60)]
    known = [json.loads(b"[" + text + b"]") for text, _ in load._documents]
    assert all(prompt[-150:-50] in known for prompt in drawn) and max(map(len, drawn)) == 390
    full = workload(
        input_len="290", output_len="10", documents=1, document_len="100", document_offset="uniform:0:9", limit=400
    )
    (document,) = [json.loads(b"[" + text + b"]") for text, _ in full._documents]
    for body in bodies(full, 9):
        assert len(body["prompt"]) == 390 and body["prompt"][:100] == document  # without an offset, which would not fit


def test_documents_are_in_random_order():
    load = workload(
        input_len="10", documents=4, document_len="uniform:20:60", documents_per_prompt="uniform:2:3", limit=200
    )
    known = [(json.loads(b"[" + document + b"]"), length) for document, length in load._documents]
    assert all(len(document) == length for document, length in known) and len({length for _, length in known}) > 1
    orders = set()
    for call in calls(load, 80):
        prompt = json.loads(call.body)["prompt"]
        assert len(prompt) == call.input_tokens and call.input_tokens + call.output_tokens <= 200
        order, at = [], 0
        while at < len(prompt) - 10:  # the rest is the prompt's own input
            (number,) = (n for n, (document, _) in enumerate(known) if prompt[at : at + len(document)] == document)
            order.append(number)
            at += known[number][1]
        assert at == len(prompt) - 10 and len(set(order)) == len(order)
        orders.add(tuple(order))
    assert {len(order) for order in orders} >= {2, 3} and len(orders) > 12


def test_documents_that_do_not_fit_are_omitted():
    load = workload(
        input_len="10", output_len="10", documents=5, document_len="40", documents_per_prompt="5", limit=150
    )
    assert {call.input_tokens for call in calls(load, 20)} == {130}
    alone = workload(
        input_len="10", output_len="10", documents=5, document_len="130", documents_per_prompt="5", limit=150
    )
    assert {call.input_tokens for call in calls(alone, 20)} == {140}


def test_scalings_are_drawn_by_weight_and_label_requests():
    scalings = [WeightedScaling.parse(text) for text in ('3@{"rope_type": "yarn", "factor": 4}', "null", "4@long-2")]
    drawn = calls(workload(scalings=scalings), 4000)
    seen = Counter((json.dumps(json.loads(call.body).get("rope_scaling")), call.label) for call in drawn)
    yarn, plain, named = (
        seen[('{"rope_type": "yarn", "factor": 4}', "yarn x4")],
        seen[("null", "server's scaling")],
        seen[('"long-2"', "long-2")],
    )
    assert yarn + plain + named == 4000
    assert yarn == pytest.approx(1500, abs=190) and plain == pytest.approx(500, abs=130)
    assert not any("rope_scaling" in json.loads(call.body) for call in drawn if call.label == "server's scaling")


def test_short_form_is_sent_as_it_is():
    assert WeightedScaling.parse("2@yarn 4 beta_fast=16") == WeightedScaling("yarn 4 beta_fast=16", 2.0)


@pytest.mark.parametrize(
    "text", ["{", "3", "true", "0@null", "-1@null", "x y", "[1]", "", "1e999@null", '{"factor": NaN}']
)
def test_invalid_scalings_are_refused(text):
    with pytest.raises(LoadTestError, match="--rope-scaling"):
        WeightedScaling.parse(text)


def test_ladder_doubles_up_to_the_limit():
    load = workload(ladder=True, limit=10_000, output_len="50")
    assert load.ladder_lengths() == [1024, 2048, 4096, 8192, 9950]
    drawn = calls(load, 7)
    assert [call.input_tokens for call in drawn] == [1024, 2048, 4096, 8192, 9950, 1024, 2048]
    assert drawn[1].label == "2048 tokens"
    assert workload(ladder=True, limit=512, output_len="12").ladder_lengths() == [500]


def test_share_of_clients_disconnects():
    drawn = calls(workload(disconnect_share=0.25, disconnect_after=3), 2000)
    assert {call.disconnect_after for call in drawn} == {None, 3}
    assert sum(call.disconnect_after == 3 for call in drawn) == pytest.approx(500, abs=120)


def test_extra_fields_replace_others_and_null_removes():
    extra = {"temperature": None, "max_tokens": 3, "top_k": 5}
    (body,) = bodies(workload(extra_body=extra, ignore_eos=False), 1)
    assert "temperature" not in body and "ignore_eos" not in body
    assert body["max_tokens"] == 3 and body["top_k"] == 5


def test_trace_requests_equal_the_recorded_ones():
    yarn = {"rope_type": "yarn", "factor": 2}
    trace = [
        TraceEntry(line=1, max_tokens=5, prompt=(7, 8, 9), rope_scaling=yarn, has_scaling=True),
        TraceEntry(line=2, max_tokens=6, prompt='say "hi"\n'),
        TraceEntry(line=3, max_tokens=7, input_len=30),
    ]
    one, two, three = bodies(workload(trace=trace), 10)
    assert (one["prompt"], one["max_tokens"], one["rope_scaling"]) == ([7, 8, 9], 5, yarn)
    assert (two["prompt"], two["max_tokens"]) == ('say "hi"\n', 6) and "rope_scaling" not in two
    assert (len(three["prompt"]), three["max_tokens"]) == (30, 7)


def test_other_prompts_of_a_trace():
    trace = [
        TraceEntry(line=1, max_tokens=5, prompt=(7, 8, 9)),
        TraceEntry(line=2, max_tokens=6, prompt="five words and two more"),
        TraceEntry(line=3, max_tokens=7, prompt="word " * 500),
        TraceEntry(line=4, max_tokens=8, input_len=30),
    ]
    load = workload(trace=trace, limit=100)
    mine, others = calls(load, 4), calls(load.with_other_prompts(), 4)
    assert [call.output_tokens for call in others] == [5, 6, 7, 8]
    assert [len(json.loads(call.body)["prompt"]) for call in others] == [3, 5, 93, 30]
    assert all(a.body != b.body for a, b in zip(mine, others, strict=True))


def test_turns_of_token_ids_contain_all_previous_tokens():
    load = workload(input_len="6", output_len="4", turns=3, prefix_groups=1, prefix_len=8, think_time=0.5)
    (conversation,) = itertools.islice(load.conversations(), 1)
    first = json.loads(conversation.request.body)
    assert first["return_token_ids"] is True and conversation.think_time == 0.5
    assert len(first["prompt"]) == conversation.request.input_tokens == 14
    assert advance(conversation, "ignored", (1, 2, 3, 4))
    second = json.loads(conversation.request.body)["prompt"]
    assert second[:18] == [*first["prompt"], 1, 2, 3, 4] and len(second) == conversation.request.input_tokens == 24
    assert conversation.request.label == "turn 2"
    assert advance(conversation, "", (5,))
    third = json.loads(conversation.request.body)["prompt"]
    assert third[:25] == [*second, 5] and len(third) == 31
    assert not advance(conversation, "", (1,))


def test_turns_of_a_chat():
    load = workload(WORDS, input_len="6", output_len="4", turns=2, chat=True)
    (conversation,) = itertools.islice(load.conversations(), 1)
    (message,) = json.loads(conversation.request.body)["messages"]
    assert advance(conversation, 'He said "no".\n')
    again, answered, further = json.loads(conversation.request.body)["messages"]
    assert again == message
    assert answered == {"role": "assistant", "content": 'He said "no".\n'}
    assert further["role"] == "user" and len(further["content"].split()) == 6


def test_turns_of_text_continue_the_response():
    load = workload(WORDS, input_len="6", output_len="4", turns=2)
    (conversation,) = itertools.islice(load.conversations(), 1)
    first = json.loads(conversation.request.body)["prompt"]
    assert advance(conversation, ' "so"\n')
    second = json.loads(conversation.request.body)["prompt"]
    assert second.startswith(first + ' "so"\n ') and len(second.removeprefix(first + ' "so"\n ').split()) == 6


def test_conversation_ends_before_it_exceeds_the_limit():
    load = workload(input_len="uniform:4:40", output_len="4", turns=5, limit=50)
    longest = 0
    for conversation in itertools.islice(load.conversations(), 40):
        turns = 1
        while advance(conversation, "", (1, 2, 3, 4)):
            turns += 1
        assert turns <= 5 and conversation.request.input_tokens + 4 <= 50
        longest = max(longest, turns)
    assert longest > 1


def templated(messages) -> int:
    """Token count of a server whose template adds 4 tokens to each message and 3 before the response."""
    return sum(len(message["content"].split()) + 4 for message in messages) + 3


@pytest.mark.parametrize("known", [True, False])
def test_turns_of_a_chat_leave_space_for_the_template(known):
    """An unknown overhead of the template per turn is known from the usage of the second response."""
    words = dataclasses.replace(WORDS, overhead=4 + 3 + 1, turn_overhead=8 if known else 0)
    load = workload(words, chat=True, turns=12, input_len="uniform:9:20", output_len="uniform:1:20", limit=350)
    ended = Counter()
    for conversation in itertools.islice(load.conversations(), 40):
        for turn in itertools.count(1):
            call = conversation.request
            counted = templated(json.loads(call.body)["messages"])
            assert counted + call.output_tokens <= 350
            assert counted == call.input_tokens or (turn == 2 and not known)
            text = " ".join(["one"] * call.output_tokens)
            if not advance(conversation, text, input_tokens=counted):
                break
        ended[turn] += 1
    assert min(ended) < 12 and sum(ended.values()) == 40  # some would have exceeded the limit


def test_chat_too_long_with_its_template_is_refused():
    words = dataclasses.replace(WORDS, turn_overhead=8)
    for chat, limit in ((True, 800 + 19 * 8), (False, 800)):
        workload(words, chat=chat, turns=20, input_len="20", output_len="20", limit=limit)
        with pytest.raises(LoadTestError, match=f"in 20 turns need {limit} tokens"):
            workload(words, chat=chat, turns=20, input_len="20", output_len="20", limit=limit - 1)


def test_response_without_token_ids_cannot_be_continued():
    (conversation,) = itertools.islice(workload(turns=2).conversations(), 1)
    with pytest.raises(LoadTestError, match="--text-prompts"):
        advance(conversation, "text")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_len": "500", "output_len": "13"}, "513 tokens, but the server accepts 512"),
        ({"input_len": "400", "prefix_groups": 1, "prefix_len": 100}, "--prefix-len 100"),
        ({"input_len": "400", "documents": 1, "document_len": "100"}, "--document-len 100"),
        ({"input_len": "100", "output_len": "100", "turns": 3}, "in 3 turns"),
        ({"input_len": "uniform:600:900"}, "--input-len uniform:600:900"),
        ({"ladder": True, "output_len": "600"}, "no space"),
        ({"trace": [TraceEntry(line=9, max_tokens=500, input_len=13)]}, "line 9 of the trace"),
        ({"trace": [TraceEntry(line=9, max_tokens=5, prompt=(1,))], "chat": True}, "line 9 of the trace"),
    ],
)
def test_lengths_beyond_the_limit_are_refused(fields, named):
    with pytest.raises(LoadTestError) as caught:
        workload(limit=512, **fields)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_drawn_lengths_are_cut_to_the_limit():
    drawn = calls(workload(input_len="normal:450:100", output_len="uniform:10:60", limit=512), 200)
    assert all(call.input_tokens + call.output_tokens <= 512 for call in drawn)
    assert any(call.input_tokens + call.output_tokens == 512 for call in drawn)
    drawn = calls(workload(input_len="300", output_len="normal:250:200", limit=512), 200)
    assert {call.input_tokens for call in drawn} == {300} and max(call.output_tokens for call in drawn) == 212
    drawn = calls(workload(ladder=True, output_len="normal:450:200", limit=512), 200)
    assert all(call.input_tokens >= 1 and call.input_tokens + call.output_tokens <= 512 for call in drawn)
    mixed = workload(
        input_len="uniform:1:400", documents=1, document_len="100", document_offset="uniform:0:900", limit=512
    )
    assert all(len(json.loads(c.body)["prompt"]) + c.output_tokens <= 512 for c in calls(mixed, 200))


@pytest.mark.parametrize(
    "fields",
    [
        {"prefix_groups": 2},
        {"documents": 2},
        {"document_len": "2"},
        {"documents": 2, "document_len": "9", "documents_per_prompt": "3"},
        {"documents_per_prompt": "2"},
        {"disconnect_share": 1.5},
        {"disconnect_after": 0},
        {"turns": 0},
        {"think_time": -1.0},
        {"think_time": float("nan")},
        {"temperature": float("nan")},
        {"extra_body": {"top_p": float("nan")}},
        {"ladder": True, "turns": 2},
        {"ladder": True},
        {"trace": [TraceEntry(line=1, max_tokens=1, input_len=1)], "turns": 2},
    ],
)
def test_conflicting_options_are_refused(fields):
    with pytest.raises(LoadTestError):
        workload(**fields)
