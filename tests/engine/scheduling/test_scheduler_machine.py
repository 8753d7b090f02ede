"""A state machine drives scheduler and block manager with random traffic over tiny pools against a checking executor.

Every request must end with the tokens a sequential oracle gives, every read must find the right key, every counted
recompute must have happened and no other, and the books must balance once the engine is idle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from engine_helpers.fake_executor import EOS, VOCAB, FakeRotation, add, make_request, make_scheduler, oracle
from helpers.cache_invariants import assert_balanced, assert_consistent
from helpers.device import ON_A_CPU
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from windlass.engine.cache import block_manager as passages_taken
from windlass.engine.errors import DeadlineError, QueueFullError, RequestError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.scheduling import kv_restore
from windlass.engine.scheduling.scheduler_output import SchedulerOutput, StepResult

LAYOUTS = st.sampled_from(
    [
        [(None, 1.0)],
        [(None, 1.0), (5, 0.7)],
        [(3, 0.6)],
        [(None, 1.0), (None, 1.2)],
        [(7, 0.9), (None, 1.0), (2, 0.5)],
    ]
)
# Few different starts and few different tokens, so that prefixes recur.
PROMPTS = st.builds(
    lambda start, repeat, tail: (start * repeat)[:20] + tail,
    st.sampled_from([[0, 1], [0, 1, 2, 3], [1]]),
    st.integers(0, 6),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
)

# The same texts at changing positions, for passages.
TEXTS = [[0, 0, 1, 0, 1, 1, 1, 0], [2, 1, 1, 0, 0, 2, 1, 0, 2, 2], [3, 0, 1, 3, 1, 0, 3]]
COMPOSED = st.builds(
    lambda start, texts, tail: [*start, *(token for text in texts for token in text), *tail],
    st.lists(st.integers(0, 1), max_size=3),
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)

ROTATIONS = [
    FakeRotation(),
    FakeRotation(),
    FakeRotation("yarn"),
    FakeRotation("dynamic", "recompute"),
    FakeRotation("dynamic", "recompute", exact=True),
    FakeRotation("dynamic", "rotate"),
    FakeRotation("dynamic", "rotate"),
    FakeRotation("far", near=3),
    FakeRotation("far", "recompute", near=5),
]

CONTEXTS = [
    *[None] * 4,
    ContextRule("shift", 0),
    ContextRule("shift", 3),
    ContextRule("shift", 6),
    ContextRule("stop", attention_window=5),
    ContextRule("stop", attention_window=3, attention_sinks=2),
    ContextRule("shift", attention_window=7, attention_sinks=5),
]

REUSES = [
    *[None] * 3,
    NonPrefixReuseParams(0, scope="one"),  # it uses none, others may use it
    NonPrefixReuseParams(2, scope="one"),
    NonPrefixReuseParams(3, scope="one"),
    NonPrefixReuseParams(3, recompute=1, scope="one"),
    NonPrefixReuseParams(5, recompute=0.3, scope="one"),
    NonPrefixReuseParams(0, ((2, 9), (10, 18)), scope="one"),
    NonPrefixReuseParams(2, scope="other"),
]

REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.one_of(st.integers(0, 14), st.sampled_from([40])),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "seed": st.integers(0, 2),
        "priority": st.sampled_from([0, 0, 1, 2]),
        "salt": st.sampled_from([None, None, None, "s"]),
        "rotation": st.sampled_from(ROTATIONS),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.sampled_from([True, True, False]),
        "stop_token_ids": st.sampled_from([(), (), (4,)]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0, 0]),
        "prompt_logprobs_from": st.sampled_from([0, 0, 1, 2, 5, 9, 99]),
        "context": st.sampled_from(CONTEXTS),
        "reuse": st.sampled_from(REUSES),
        "lifetime": st.sampled_from([None, None, None, None, None, None, 3, 30]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        layout=LAYOUTS,
        num_blocks=st.integers(6, 30),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 5),
        max_model_len=st.integers(24, 48),
        shift_context=st.integers(10, 24),
        max_total_tokens=st.sampled_from([None, None, 30, 60]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        step_seconds=st.sampled_from([0.0, 0.0, 1.0]),
        burst_seconds=st.sampled_from([0.0, 0.0, 0.4, 1.0]),
        speculation=st.sampled_from([0, 0, 2, 5, 9]),
        drafted=st.sampled_from([0, 0, 1, 3, 8]),
        adaptive=st.booleans(),
    )
    def start(
        self,
        layout: list[tuple[int | None, float]],
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        max_model_len: int,
        shift_context: int,
        max_total_tokens: int | None,
        prefix_caching: bool,
        step_seconds: float,
        burst_seconds: float,
        speculation: int,
        drafted: int,
        adaptive: bool,
    ) -> None:
        self.scheduler, self.executor, self.clock = make_scheduler(
            groups=[(max(2, int(num_blocks * share)), window) for window, share in layout],
            block_size=block_size,
            budget=budget,
            max_num_seqs=max_num_seqs,
            max_waiting=6,
            max_model_len=max_model_len,
            shift_context=shift_context,
            max_total_tokens=max_total_tokens,
            prefix_caching=prefix_caching,
            target_step_seconds=step_seconds,
            burst_seconds=burst_seconds,
            speculation=speculation,
            drafted=drafted,
            adaptive=adaptive,
        )
        self.requests: dict[str, EngineRequest] = {}
        self.rotations: dict[str, FakeRotation] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], tuple[str, int | None]] = {}
        self.gone: set[str] = set()  # aborted or expired
        self.dropped: set[tuple[str, int]] = set()  # samples ended from outside
        self.prompt_logprobs: dict[str, object] = {}
        self.in_flight: tuple[SchedulerOutput, list[StepResult]] | None = None

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=6))
    def arrive(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.add(**request)

    @rule(
        prompts=st.lists(COMPOSED, min_size=2, max_size=4),
        rules=st.lists(st.sampled_from(REUSES[3:]), min_size=4, max_size=4),
        request=REQUESTS,
        contexts=st.lists(st.sampled_from([None, None, *CONTEXTS]), min_size=4, max_size=4),
    )
    def arrive_with_texts_in_common(
        self,
        prompts: list[list[int]],
        rules: list[NonPrefixReuseParams],
        request: dict[str, Any],
        contexts: list[ContextRule | None],
    ) -> None:
        alike = {"prompt_logprobs": None, "rotation": FakeRotation(), "salt": None}
        for prompt, reuse_rule, context in zip(prompts, rules, contexts, strict=False):
            self.add(**{**request, **alike, "prompt": prompt, "reuse": reuse_rule, "context": context})
            self.run(2)

    def add(
        self,
        prompt: list[int],
        rotation: FakeRotation,
        lifetime: int | None,
        salt: str | None,
        context: ContextRule | None,
        reuse: NonPrefixReuseParams | None,
        **options: Any,
    ) -> None:
        request_id = f"r{len(self.requests)}"
        deadline = None if lifetime is None else self.clock.now + lifetime
        windows = any(pool.window is not None for pool in self.scheduler.blocks.pools)
        if rotation.near is not None and (windows or context is not None or reuse is not None):
            rotation = FakeRotation()  # the core refuses this combination
        if reuse is not None:
            reuse = replace(reuse, scope=f"{reuse.scope} {salt}")
        request = make_request(
            request_id, prompt, cache_salt=salt, deadline=deadline, context=context, reuse=reuse, **options
        )
        try:
            if context is not None:
                longest = self.scheduler.limits.size(context).rotary_length
                rotation = replace(rotation, longest=min(len(prompt) + options["max_tokens"], longest))
            add(self.executor, request, rotation)
        except QueueFullError:
            assert self.scheduler.num_waiting >= 6
            event("queue full")
            return
        except RequestError as error:
            assert error.code in ("context_length_exceeded", "kv_cache_exceeded", "invalid_value")
            return
        self.requests[request_id] = request
        self.rotations[request_id] = rotation

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def expire_and_schedule(self) -> None:
        for output in self.scheduler.expire(self.clock.now):
            request = self.requests[output.request_id]
            assert isinstance(output.error, DeadlineError) and output.finish_reason == "timeout"
            assert request.deadline is not None and request.deadline <= self.clock.now
            self.gone.add(output.request_id)
        had_work = self.scheduler.has_work()
        plan = self.scheduler.schedule()
        config = self.scheduler.config
        assert bool(plan.sequences or plan.rerotations) == had_work, "a step without progress"
        assert plan.num_tokens <= plan.num_passes * config.max_num_batched_tokens
        if plan.num_passes > 1:
            event("a burst")
        assert len(plan.sequences) <= self.scheduler.num_running <= config.max_num_seqs
        self.in_flight = plan, self.executor.execute(plan)

    @precondition(lambda self: self.in_flight is not None)
    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def finish_step(self, seconds: float) -> None:
        assert self.in_flight is not None
        plan, results = self.in_flight
        self.in_flight = None
        self.clock.now += 1.0
        self.scheduler.observe(plan, seconds)
        for output in self.scheduler.update(plan, results):
            self.take(output)

    @rule(steps=st.integers(2, 12))
    def run(self, steps: int) -> None:
        if self.in_flight is not None:
            self.finish_step(1.0)
        for _ in range(steps):
            if not self.scheduler.has_work():
                break
            self.expire_and_schedule()
            self.finish_step(0.5)
            self.books_agree()

    @rule(plans=st.integers(1, 3))
    def lose_plans(self, plans: int) -> None:
        """Another rank misses the next plans; see `FakeExecutor.follow`."""
        self.executor.lose_plans = plans

    @rule()
    def snapshot(self) -> None:
        """A snapshot at any point between two outputs gives the state that later outputs continue from."""
        if self.executor.sequences.step:
            self.executor.heal()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted({seq.request.request_id for seq in self.scheduler.live_sequences()})
        if live and (self.in_flight or data.draw(st.integers(0, 3)) == 0):
            request_id = data.draw(st.sampled_from(live))
            self.scheduler.abort(request_id)
            self.gone.add(request_id)
            event("abort in flight" if self.in_flight else "abort between steps")
        self.scheduler.abort("nobody")

    @rule(data=st.data())
    def end_sample(self, data: st.DataObject) -> None:
        live = sorted({seq.request.request_id for seq in self.scheduler.live_sequences()})
        if not live:
            return
        request_id = data.draw(st.sampled_from(live))
        num_samples = self.requests[request_id].sampling.n
        if num_samples == 1 and data.draw(st.integers(0, 3)) > 0:
            return
        index = data.draw(st.integers(0, num_samples - 1))
        before = {seq.index: seq for seq in self.scheduler.live_sequences() if seq.request.request_id == request_id}
        forking = before[0].is_before_fork if 0 in before else False
        self.scheduler.end_sample(request_id, index)
        self.dropped.add((request_id, index))
        after = {seq.index for seq in self.scheduler.live_sequences() if seq.request.request_id == request_id}
        if forking and index == 0 and after:
            assert after == set(before), "sample 0 computes the prompt for the others"
        else:
            assert index not in after
            assert index not in before or not before[index].cache.tables
        event("sample ended before it began" if index not in before else "sample ended")
        self.scheduler.end_sample(request_id, num_samples)
        self.scheduler.end_sample("nobody", 0)

    def take(self, output: RequestOutput) -> None:
        key = (output.request_id, output.index)
        assert key not in self.ended, "an output after the last one"
        assert output.request_id not in self.gone, "an output of a request that has ended"
        assert key not in self.dropped or output.error, "an output of a sample that has ended"
        request = self.requests[output.request_id]
        assert 0 <= output.cached_tokens < len(request.prompt_token_ids)
        if request.sampling.prompt_logprobs is not None:
            assert output.cached_tokens <= max(0, request.sampling.prompt_logprobs_from - 1)
        if output.prompt_logprobs is not None:
            assert output.index == 0 and output.request_id not in self.prompt_logprobs
            assert not self.tokens[key]
            self.prompt_logprobs[output.request_id] = output.prompt_logprobs
            given_ids = [entry and entry.token_id for entry in output.prompt_logprobs]
            unknown = min(max(1, request.sampling.prompt_logprobs_from), len(given_ids))
            assert given_ids == [*[None] * unknown, *request.prompt_token_ids[unknown:]]
        self.tokens[key] += output.token_ids
        if output.finish_reason is not None:
            self.ended[key] = (output.finish_reason, output.stop_token_id)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert_consistent(self.scheduler.blocks, (seq.cache for seq in self.scheduler.live_sequences()))
        stats = self.scheduler.counters
        recomputed = stats.recomputed_tokens
        assert recomputed["preemption"] + recomputed["rope_update"] == self.executor.num_recomputed
        if stats.num_preemptions:
            event("preemption")
        else:
            assert recomputed["preemption"] == 0
        if recomputed["rope_update"]:
            event("recompute at a change of frequencies")
        # Keys outside a window are dropped and need no re-rotation.
        assert stats.key_moves >= self.executor.num_rerotated
        if self.scheduler.blocks.pools[0].window is None:
            assert stats.key_moves == self.executor.num_rerotated
        if stats.key_moves:
            event("keys re-rotated")
        if stats.dropped_tokens:
            event("tokens dropped")
            assert stats.context_shifts > 0
            assert stats.reused_tokens or stats.dropped_tokens % self.scheduler.blocks.block_size == 0
        assert self.executor.num_reused <= stats.reused_tokens
        if stats.reused_tokens:
            event("passages reused")
            assert stats.reused_passages > 0
        if recomputed["cache_reuse"]:
            event("heads of passages computed anew")
        if self.executor.num_swapped_in:
            event("parked and unparked")
        if stats.prefix_cache_hits:
            event("prefix hit")
        if any(seq.cache.second_keys is not None and seq.cache.tables for seq in self.scheduler.live_sequences()):
            event("keys kept twice")
        if self.executor.num_healed:
            event("snapshot")
        # An abort in flight leaves a proposal uncounted.
        assert stats.spec_decode_num_drafts <= self.executor.num_drafts
        assert stats.spec_decode_num_accepted_tokens <= self.executor.num_accepted
        assert stats.spec_decode_model_num_drafts <= min(self.executor.num_drafted, stats.spec_decode_num_drafts)
        assert stats.spec_decode_model_num_accepted_tokens <= stats.spec_decode_model_num_draft_tokens
        if stats.spec_decode_model_num_accepted_tokens:
            event("drafted tokens accepted")
        if stats.spec_decode_num_accepted_tokens:
            event("proposed tokens accepted")
        if stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens:
            event("proposed tokens rejected")
        if self.in_flight is None:  # blocks for proposals are freed
            for seq in self.scheduler.live_sequences():
                size = self.scheduler.blocks.block_size
                blocks = -(-seq.cache.num_slots // size)
                assert all(len(table) == blocks for table in seq.cache.block_tables)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self.finish_step(1.0)
        # Every step computes at least one token; the bound covers each sample computed alone, many times over.
        for _ in range(3000):
            if not self.scheduler.has_work():
                break
            self.expire_and_schedule()
            self.finish_step(0.5)
        assert not self.scheduler.has_work(), "requests do not finish"
        self.books_agree()
        assert_balanced(self.scheduler.blocks)
        assert not self.executor.rotary.counts
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.stats().kv_blocks_used == 0
        for request_id, request in self.requests.items():
            longest = self.scheduler.limits.size(request.context).longest
            for index in range(request.sampling.n):
                if request_id in self.executor.reused:
                    continue  # its inputs were compared token by token
                tokens, reason, stop = oracle(request, self.rotations[request_id], index, longest)
                got = self.tokens[request_id, index]
                if request_id in self.gone or ((request_id, index) in self.dropped):
                    assert got == tokens[: len(got)]
                else:
                    assert got == tokens
                    assert self.ended[request_id, index] == (reason, stop)
                    wanted = request.sampling.prompt_logprobs is not None
                    if (request_id, 0) not in self.dropped:
                        assert (request_id in self.prompt_logprobs) == wanted


@pytest.mark.parametrize(
    "examples",
    [
        25,
        pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(900), ON_A_CPU]),
        pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(8 * 3600), ON_A_CPU]),
    ],
)
def test_random_traffic_equals_the_oracle(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EOS < VOCAB
    for module in (passages_taken, kv_restore):
        monkeypatch.setattr(module, "MIN_PASSAGE_TOKENS", 2)
    monkeypatch.setattr(passages_taken, "MAX_RUNS", 6)
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
