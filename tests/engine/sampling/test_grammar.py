"""Constrained samples match their grammar, and the rest of sampling does not change."""

from __future__ import annotations

import gc
import json
import math
import random
import re
import threading
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
from helpers.engines import Finished, greedy, make_core, run
from helpers.tiny_models import make_model
from llguidance import LLMatcher
from tokenizers import Tokenizer

import windlass
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import EngineError, QueueFullError, RequestError
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rotary_policy import RotaryPlan
from windlass.engine.sampling import grammar as compiler
from windlass.engine.sampling.grammar import GrammarCompiler, GrammarMasks
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.scheduling import request_queue as requests
from windlass.kernels import select_backend
from windlass.kernels.backend import BackendOptions
from windlass.kernels.token_sampling import Filters, LogitsChanges, Penalties, SamplingStatus
from windlass.kernels.torch.torch_backend import TorchBackend

DEMO = Path(windlass.__file__).parent / "models" / "demo"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
VOCAB, EOS = 4096, 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
OBJECT = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
DATE = LLMatcher.grammar_from_regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# Repeated words, so that tokens are proposed and some of them accepted.
LOOP = LLMatcher.grammar_from_lark('start: ("red" | "green" | "blue") (" and " ("red" | "green" | "blue")){20}')


def ask(name: str, grammar: str | None, prompt: str = "The colours of the flags are", **fields: Any) -> EngineRequest:
    fields = {"ignore_eos": False, "max_tokens": 160, "grammar": grammar, **fields}
    return greedy(name, TOKENIZER.encode(prompt).ids, **fields)


def text(sample: Finished) -> str:
    assert sample.outputs[-1].error is None and sample.finish_reason == "stop"
    assert sample.token_ids[-1] == EOS and EOS not in sample.token_ids[:-1]
    decoded: str = TOKENIZER.decode(sample.token_ids[:-1], skip_special_tokens=False)
    return decoded


def check_object(said: str) -> None:
    found = json.loads(said)
    assert set(found) == {"name", "count", "tags"} and len(found["name"]) <= 12
    assert 0 <= found["count"] <= 99 and set(found["tags"]) <= {"red", "green", "blue"}


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return make_core(DEMO)


def test_samples_match_their_grammar_and_do_not_depend_on_others(core: EngineCore) -> None:
    """Greedy and random samples, several of one prompt, with filters and penalties, and streams without a grammar."""

    def requests() -> list[EngineRequest]:
        return [
            ask("greedy", OBJECT),
            ask("drawn", OBJECT, temperature=1.0, seed=1, n=4),
            ask("narrow", OBJECT, temperature=0.8, seed=2, top_k=5, top_p=0.9, repetition_penalty=1.1, logprobs=2),
            ask("date", DATE, temperature=1.5, seed=3, min_p=0.01),
            ask("free", None, temperature=1.0, seed=4, max_tokens=30, ignore_eos=True),
        ]

    together = run(core, requests())
    for (name, _), sample in together.items():
        if name == "date":
            assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", text(sample))
        elif name != "free":
            check_object(text(sample))
    assert len({text(together["drawn", i]) for i in range(4)}) > 1
    # Log-probabilities are those of the model, including alternatives that the grammar forbids.
    entries = [entry for output in together["narrow", 0].outputs for entry in output.logprobs or ()]
    assert any(entry.rank > 5 for entry in entries)
    for request in requests():
        alone = run(core, [request])
        for key, sample in alone.items():
            assert sample.token_ids == together[key].token_ids, key


def bits_of(mask: bytes) -> set[int]:
    return {i for i in range(VOCAB) if mask[i // 8] >> (i % 8) & 1}


def test_masks_equal_those_of_a_new_matcher() -> None:
    """Compare after every token of a text, forwards and backwards, with a matcher that has read exactly that text."""
    compiler = GrammarCompiler(DEMO, VOCAB, [EOS])
    masks = GrammarMasks(compiler)
    said = TOKENIZER.encode('{"name":"ab","count":42,"tags":["red"]}', add_special_tokens=False).ids
    request = ask("x", OBJECT)
    prompt = list(request.prompt_token_ids)
    slot = SampleSlot(0, 0, request.sampling, 0, len(prompt), prompt + said, (EOS,))
    expected = []
    for count in range(len(said) + 1):
        oracle = compiler.begin(OBJECT)[0]
        assert oracle.consume_tokens(said[:count])
        expected.append(bits_of(oracle.compute_bitmask()))
        # Tokens that the mask allows are consumed, and the mask allows the next token of the text.
        assert all(oracle.validate_tokens([i]) == 1 for i in expected[-1] - {EOS})
        assert (said[count] if count < len(said) else EOS) in expected[-1]
    assert expected[-1] == {EOS}
    order = [*range(len(said) + 1), *random.Random(0).sample(range(len(said) + 1), len(said) + 1)]
    for count in order:
        at = SampleSlot(0, 0, request.sampling, 0, len(prompt), prompt + said[:count], (EOS,))
        masks.prepare([at])
        mask = masks.mask(at)
        assert bits_of(mask.bits.numpy().tobytes()) == expected[count], count
        assert mask.complete == (expected[count] == {EOS})
    # Proposed tokens that the grammar forbids give an empty mask and leave the matcher unchanged.
    wrong = slot.after([EOS, 7])
    masks.prepare([slot, slot.after([7]), wrong])
    assert not masks.mask(wrong).bits.any() and not masks.mask(slot.after([7])).bits.any()
    masks.prepare([slot])
    assert masks.mask(slot).complete
    masks.forget(0)
    assert len(masks) == 0


class Watched:
    """Records the thread of each mask and the number of tokens before it, in one list for all copies."""

    def __init__(self, inner: Any, notes: list[tuple[str, int]]) -> None:
        self._inner, self._notes, self._taken = inner, notes, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self._notes.append((threading.current_thread().name, self._taken))
        self._inner.unsafe_compute_mask_ptr(address, size)

    def consume_tokens(self, token_ids: list[int]) -> bool:
        self._taken += len(token_ids)
        taken: bool = self._inner.consume_tokens(token_ids)
        return taken

    def deep_copy(self) -> Watched:
        return Watched(self._inner.deep_copy(), self._notes)


def test_the_first_mask_is_computed_with_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[tuple[str, int]] = []
    monkeypatch.setattr(llguidance, "LLMatcher", lambda *a, **fields: Watched(LLMatcher(*a, **fields), notes))
    core = make_core(DEMO)
    found = run(core, [ask("x", DATE, n=2, temperature=1.0, seed=5), ask("y", DATE, temperature=1.0, seed=6)])
    assert all(re.fullmatch(r"\d{4}-\d{2}-\d{2}", text(sample)) for sample in found.values())
    first = [thread for thread, taken in notes if taken == 0]
    later = [thread for thread, taken in notes if taken > 0]
    assert len(first) == 1 and first[0].startswith("engine-grammar")
    assert len(later) >= 3 * 2 and all(thread.startswith("engine-masks") for thread in later)


def test_a_slow_grammar_does_not_delay_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(DEMO, VOCAB, [EOS])
    masks, request = GrammarMasks(compiler), ask("x", DATE)
    compiler.begin(DATE)[0]
    begun, may_end = threading.Event(), threading.Event()

    def slow(*arguments: Any, **fields: Any) -> LLMatcher:
        begun.set()
        assert may_end.wait(30)
        return LLMatcher(*arguments, **fields)

    monkeypatch.setattr(llguidance, "LLMatcher", slow)
    compiled = compiler.compile_in_background(OBJECT)
    assert begun.wait(30) and compiler.known(DATE) and not compiler.known(OBJECT)
    prompt = list(request.prompt_token_ids)
    masks.prepare([SampleSlot(0, 0, request.sampling, 0, len(prompt), prompt, (EOS,))])
    waiting = threading.Thread(target=masks._wait, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive() and not compiled.done()
    may_end.set()
    compiled.result(30)
    assert compiler.known(OBJECT)


def test_grammars_of_callers_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one caller one after another, short ones first."""
    compiler = GrammarCompiler(DEMO, VOCAB, [EOS])
    long, middle, short = (LLMatcher.grammar_from_regex("a" * length) for length in (90, 60, 30))
    order, begun, may_end = list[str](), threading.Event(), threading.Event()

    def slow(vocabulary: Any, grammar: str, **fields: Any) -> LLMatcher:
        order.append(grammar)
        if grammar == long:
            begun.set()
            assert may_end.wait(30)
        return LLMatcher(vocabulary, grammar, **fields)

    monkeypatch.setattr(llguidance, "LLMatcher", slow)
    first = compiler.compile_in_background(long, "many")
    assert begun.wait(30)
    waiting = [compiler.compile_in_background(grammar, "many") for grammar in (middle, short, DATE)]
    waiting[2].cancel()
    compiler.compile_in_background(OBJECT, "one").result(30)
    assert not first.done() and order == [long, OBJECT]
    may_end.set()
    for each in (first, *waiting[:2]):
        each.result(30)
    assert order == [long, OBJECT, short, middle]


def test_no_step_compiles_grammars_of_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more grammars than the cache holds. Each is referenced only by its request."""
    threads: list[str] = []

    def counted(*arguments: Any, **fields: Any) -> LLMatcher:
        threads.append(threading.current_thread().name)
        return LLMatcher(*arguments, **fields)

    monkeypatch.setattr(llguidance, "LLMatcher", counted)
    core, count = make_core(DEMO, max_num_seqs=1), 70
    core.add(ask("before", None, max_tokens=20, ignore_eos=True))
    core.step()
    for i in range(count):
        core.add(ask(f"r{i}", LLMatcher.grammar_from_regex(f"{i:03}[a-z]"), max_tokens=10, n=1 + (i == 7)))
    for _, compiled in core._grammar_queue._waiting.values():
        compiled.result(30)
    core.step()
    assert core.scheduler.num_running == 1 and core.scheduler.num_waiting == count and len(threads) == count
    core.abort("r0")
    found = run(core, [], every_logit=False)
    assert all(re.fullmatch(f"{i:03}[a-z]", text(found[f"r{i}", 0])) for i in range(1, count))
    assert len(threads) == count and all(name.startswith("engine-grammar") for name in threads)
    assert len(core._grammars._compiled) == 64


def test_the_number_of_grammars_of_waiting_requests_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars that were dropped in the meantime are compiled again."""
    monkeypatch.setattr(requests, "MAX_RETAINED", 3)
    monkeypatch.setattr(compiler, "_MAX_CACHED", 2)
    core = make_core(DEMO, max_num_seqs=1)
    for i in range(9):
        core.add(ask(f"r{i}", LLMatcher.grammar_from_regex(f"{i:03}[a-z]"), max_tokens=10))
    for _, compiled in core._grammar_queue._waiting.values():
        compiled.result(30)
    core.step()
    gc.collect()
    assert core.scheduler.num_waiting == 8 and len(core._grammars._compiled) <= 3 + 2 + 1
    found = run(core, [], every_logit=False)
    assert all(re.fullmatch(f"{i:03}[a-z]", text(found[f"r{i}", 0])) for i in range(1, 9))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9, "seed": 7}, {"presence_penalty": 0.1, "logprobs": 1}])
@pytest.mark.parametrize(
    "proposing", [{"speculative_ngram": 6}, {"speculative_model": str(DEMO), "speculative_adaptive": False}]
)
def test_speculation_changes_nothing(proposing: dict[str, Any], fields: dict[str, Any]) -> None:
    def requests() -> list[EngineRequest]:
        return [ask("loop", LOOP, **fields), ask("object", OBJECT, **fields), ask("two", LOOP, n=2, **fields)]

    want = run(make_core(DEMO, deterministic=True), requests())
    core = make_core(DEMO, deterministic=True, **proposing)
    got = run(core, requests())
    assert {key: sample.token_ids for key, sample in got.items()} == {k: s.token_ids for k, s in want.items()}
    assert core.stats().spec_decode_num_accepted_tokens > 10
    assert re.fullmatch(r"(\w+ and ){20}\w+", text(got["loop", 0]))


def test_preempted_samples_continue() -> None:
    def requests() -> list[EngineRequest]:
        return [ask(f"r{i}", LOOP, temperature=1.0, seed=i) for i in range(6)]

    core = make_core(DEMO, deterministic=True)
    want = run(core, requests())
    memory = 14 * core.info.kv_bytes_per_token * core.info.block_size
    tight = make_core(DEMO, deterministic=True, kv_cache_memory=memory, max_model_len=200)
    got = run(tight, requests())
    assert tight.stats().num_preemptions > 0
    assert {key: text(sample) for key, sample in got.items()} == {key: text(sample) for key, sample in want.items()}


def test_samples_end_with_their_grammar(core: EngineCore) -> None:
    """Other stop conditions of the request do not matter. A length that is reached earlier is reported."""
    for fields in ({"ignore_eos": True}, {"min_tokens": 100}, {"ignore_eos": True, "min_tokens": 100}):
        found = run(core, [ask("x", DATE, **fields)])["x", 0]
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", text(found)), fields
    # Where the grammar allows more, min_tokens applies.
    digits = LLMatcher.grammar_from_regex("[0-9]+")
    found = run(core, [ask("x", digits, min_tokens=12, max_tokens=40, temperature=1.0, seed=1)])["x", 0]
    assert len(found.token_ids) >= 12 and re.fullmatch("[0-9]+", TOKENIZER.decode(found.token_ids))
    found = run(core, [ask("x", OBJECT, max_tokens=3)])["x", 0]
    assert found.finish_reason == "length" and len(found.token_ids) == 3


def test_an_empty_mask_ends_only_its_sample(core: EngineCore) -> None:
    forbidden = tuple(i for i in range(VOCAB) if not any(c.isdigit() for c in TOKENIZER.decode([i])))
    found = run(core, [ask("none", DATE, allowed_token_ids=forbidden), ask("date", DATE)])
    error = found["none", 0].outputs[-1].error
    assert isinstance(error, EngineError) and "the grammar" in str(error)
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", text(found["date", 0]))


def test_an_invalid_grammar_fails_only_its_request() -> None:
    core = make_core(DEMO, max_waiting=3)
    found = run(core, [ask("bad", '{"grammars": [{"regex": "("}]}'), ask("free", None)])
    error = found["bad", 0].outputs[-1].error
    assert isinstance(error, RequestError) and error.param == "grammar" and "cannot be used" in str(error)
    assert found["free", 0].outputs[-1].error is None


def test_requests_in_the_grammar_queue_are_counted_limited_and_can_be_aborted() -> None:
    core = make_core(DEMO, max_waiting=2)
    core.add(ask("a", DATE))
    core.add(ask("b", OBJECT))
    assert core.has_work() and core.stats().num_waiting == 2
    with pytest.raises(RequestError, match="in use"):
        core.add(ask("a", DATE))
    with pytest.raises(QueueFullError, match="grammars"):
        core.add(ask("c", LOOP))
    core.abort("b")
    found = run(core, [])
    assert set(found) == {("a", 0)} and text(found["a", 0])
    core.add(ask("d", DATE))  # compiled before
    assert core.stats().num_waiting == 1 and len(core._grammar_queue) == 0
    core.abort("d")
    assert not core.has_work()


def test_an_error_after_compilation_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(DEMO)
    core.add(ask("bad", DATE))
    core.add(ask("good", OBJECT))
    core.add(ask("free", None, max_tokens=40, ignore_eos=True))
    plan_rotation = core.plan_rotation

    def failing(request: EngineRequest) -> RotaryPlan:
        if request.request_id == "bad":
            raise MemoryError("no memory for it")
        return plan_rotation(request)

    monkeypatch.setattr(core, "plan_rotation", failing)
    found = run(core, [])
    error = found["bad", 0].outputs[-1].error
    assert type(error) is EngineError and "no memory for it" in str(error)
    check_object(text(found["good", 0]))
    assert len(found["free", 0].token_ids) == 40 and not core.has_work()


def test_tokens_in_the_grammar_queue_are_counted() -> None:
    core = make_core(DEMO, max_waiting_tokens=20)

    def long(name: str, count: int, grammar: str | None) -> EngineRequest:
        return greedy(name, [5] * count, max_tokens=3, grammar=grammar)

    core.add(long("longer than all may be, with nothing before it", 30, DATE))
    for grammar in (OBJECT, None):
        with pytest.raises(QueueFullError, match="30 prompt tokens"):
            core.add(long("b", 1, grammar))
    assert len(run(core, [])) == 1
    core.add(long("plain", 8, None))
    core.add(long("beside it", 12, LOOP))
    for grammar in (OBJECT, DATE, None):
        with pytest.raises(QueueFullError, match="20 prompt tokens"):
            core.add(long("c", 1, grammar))
    assert all(sample.outputs[-1].error is None for sample in run(core, []).values())
    core.add(long("fits again", 20, OBJECT))
    core.abort("fits again")
    assert not core.has_work()


def test_a_model_without_a_tokenizer_is_reported(tmp_path: Path) -> None:
    core = make_core(make_model("llama", tmp_path / "m"))
    found = run(core, [greedy("x", [5, 6], grammar=DATE)])
    error = found["x", 0].outputs[-1].error
    assert isinstance(error, RequestError) and "tokenizer.json" in str(error)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 4096, 5001])
@pytest.mark.parametrize("filters", [Filters(temperature=0.0), Filters(), Filters(top_k=5, top_p=0.9)])
def test_compiled_and_plain_draws_apply_the_same_mask(vocab: int, filters: Filters) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(4, vocab) * 3
    none = torch.zeros(0, dtype=torch.int64)
    numbers = torch.zeros(0)
    rows = [torch.rand(vocab) < share for share in (0.0, 0.03, 0.5, 1.0)]
    results = []
    for backend in (select_backend("cpu"), TorchBackend(BackendOptions(torch.device("cpu")))):
        token_sampler = backend.token_sampler(vocab)
        draws = []
        for row, kept in enumerate(rows):
            words = torch.zeros(-(-vocab // 32), dtype=torch.int64)
            for i in kept.nonzero()[:, 0].tolist():
                words[i // 32] |= 1 << (i % 32)
            one = token_sampler.new(filters, Penalties())
            one.row, one.uniform = row, 0.37
            bits = torch.where(words >= 2**31, words - 2**32, words).int()
            one.change(LogitsChanges(None, none, none, numbers, none, numbers, none, numbers, bits))
            draws.append(one)
        token_sampler.sample(logits, draws)
        results.append([(one.token, one.status) for one in draws])
    assert results[0] == results[1]
    for (token, status), kept in zip(results[0], rows, strict=True):
        assert (status == SamplingStatus.OK) == bool(kept.any())
        assert status != SamplingStatus.OK or kept[token]
    if filters.temperature == 0 and rows[2].any():
        assert results[0][2][0] == int(logits[2].masked_fill(~rows[2], -math.inf).argmax())
