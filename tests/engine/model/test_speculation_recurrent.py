"""Recurrent models with proposed tokens, compared with the same engine without proposals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers.persisting import keeping
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.every_request import Results, prompt, run_checked, same
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.scheduling.scheduler_output import ScheduledSequence

# One family for each operation: short convolutions, Gated DeltaNet, a parallel state space; small cache sizes in bytes.
FAMILIES = {"lfm2": 180 << 10, "qwen3_5": 240 << 10, "falcon_h1": 540 << 10}
LITTLE = {"max_num_seqs": 6, "max_model_len": 96, "max_total_tokens": 400, "deterministic": True}
ROOMY: dict[str, Any] = {"max_model_len": 256}
PROPOSING = {"speculative_ngram": 5, "speculative_ngram_min": 1}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("models") / request.param)


def traffic() -> list[EngineRequest]:
    """Repetitive and other texts: prompts of several steps, single tokens and proposals in one batch."""
    fields: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"temperature": 0.5, "seed": 5},
        {"repetition_penalty": 1.2},
        {"allowed_token_ids": (20, 21, 22)},
        {"temperature": 0.6, "seed": 7, "n": 2, "allowed_token_ids": (20, 21)},
        {"stop_token_ids": tuple(range(30, 50)), "min_tokens": 9},
        {"prompt_logprobs": 1, "max_tokens": 12},
        {"allowed_token_ids": (40, 41), "temperature": 0.9, "seed": 3},
    ]
    return [
        greedy(f"{i}", prompt(i, 7 + 11 * i, period=None if i % 3 == 2 else 4), **{"max_tokens": 45, **given})
        for i, given in enumerate(fields)
    ]


def both(
    model: Path, sent: Callable[[], list[EngineRequest]], proposing: dict[str, Any], **options: Any
) -> tuple[EngineCore, Results]:
    """Return the engine with proposals and its answers, which equal those of an engine without proposals."""
    options = {"max_model_len": 256, "max_num_batched_tokens": 40, **options}
    want = run(make_core(model, **options), sent())
    core = make_core(model, **proposing, **options)
    got = run_checked(core, sent())
    same(got, want, 0.0 if options.get("deterministic") else 1e-5)
    stats = core.stats()
    assert 20 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens - 20
    return core, got


@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True, "prefix_caching": False}], ids=lambda options: next(iter(options), "plain")
)
def test_proposals_do_not_change_answers(model: Path, options: dict[str, Any]) -> None:
    core, _ = both(model, traffic, PROPOSING, **options)
    assert core.info.num_states == 8 + 1 + 8 * (not options) + 8 * 5
    if core.runner.replay.obstacle is None:
        assert core.runner.replay.num_replayed > 0


def test_next_turn_continues_from_cached_states(model: Path) -> None:
    """The end of a block may be anywhere in a step of proposed tokens."""
    few = {"allowed_token_ids": (20, 21, 22)}
    first = [prompt(i, 20 + i, period=3) for i in range(6)]
    plain, core = make_core(model, max_model_len=256), make_core(model, max_model_len=256, **PROPOSING)
    found = []
    for one in (plain, core):
        got = run(one, [greedy(f"{i}", text, 40 + i, **few) for i, text in enumerate(first)])
        turns = [[*text, *got[f"{i}", 0].token_ids, 9, 8, 7] for i, text in enumerate(first)]
        found.append((got, run(one, [greedy(f"{i}", turn, 20, **few) for i, turn in enumerate(turns)])))
    for got, want in zip(found[1], found[0], strict=True):
        same(got, want)
    for i, text in enumerate(first):  # everything computed: all tokens except the last sampled one
        cached = [got[f"{i}", 0].outputs[-1].cached_tokens for _, got in found]
        assert cached == [(len(text) + 40 + i - 1) // 16 * 16] * 2
    assert core.stats().spec_decode_num_accepted_tokens > 60


@ON_A_CPU
def test_states_after_accepted_tokens_are_restored_from_files(model: Path, tmp_path: Path) -> None:
    """Of the model and of a draft model."""
    text, few = prompt(1, 30, period=3), {"allowed_token_ids": (20, 21, 22)}
    plain = make_core(model, deterministic=True, **ROOMY)
    want = run(plain, [greedy("first", text, 60, **few)])
    turn = [*text, *want["first", 0].token_ids, 5]
    then = run(plain, [greedy("turn", turn, 20)])
    drafted = {"speculative_model": str(model), "speculative_adaptive": False}
    for proposing in (PROPOSING, drafted):
        folder = tmp_path / next(iter(proposing))
        with keeping(model, folder, **ROOMY, **proposing) as core:
            same(run(core, [greedy("first", text, 60, **few)]), want, 0.0)
            assert core.stats().spec_decode_num_draft_tokens > 10
        with keeping(model, folder, **ROOMY, **proposing) as core:
            found = run(core, [greedy("turn", turn, 20)])
            stats = core.stats()
        assert found["turn", 0].outputs[-1].cached_tokens == 80
        same(found, then, 0.0)
    assert 10 < stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens


def test_preempted_and_shifted_streams_equal_unspeculated_ones(model: Path) -> None:
    def sent() -> list[EngineRequest]:
        shift, few = (
            ContextRule(overflow="shift", keep_tokens=16),
            {"allowed_token_ids": (40, 41, 42), "temperature": 0.8},
        )
        rules = [
            (shift, few),
            (ContextRule(), few),
            (shift, {}),
            (ContextRule(), {}),
            (shift, few),
            (ContextRule(), few),
        ]
        return [
            greedy(
                f"{i}",
                prompt(i, 20, period=5),
                150 if rule is shift else 70,
                priority=-i,
                seed=i,
                context=rule,
                **fields,
            )
            for i, (rule, fields) in enumerate(rules)
        ]

    core, _ = both(model, sent, PROPOSING, **LITTLE, kv_cache_memory=FAMILIES[model.name])
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.context_shifts > 5


def test_few_states_limit_proposals(model: Path) -> None:
    info = make_core(model).info
    memory = 128 * info.kv_bytes_per_token + 4 * info.state_bytes
    core, _ = both(model, traffic, PROPOSING, kv_cache_memory=memory, max_model_len=128, max_num_seqs=2)
    stats = core.stats()
    assert 2 <= core.info.num_states <= 4
    assert stats.spec_decode_num_draft_tokens <= (core.info.num_states - 1) * stats.spec_decode_num_drafts


def guess(core: EngineCore, answers: Results) -> None:
    """Let the draft model propose these answers, with every fifth token replaced."""
    proposer = core.runner.proposer
    assert proposer is not None
    compute, by_id = proposer._draft, proposer.input_batch.by_id
    prompts = {request.request_id: request.prompt_token_ids for request in traffic()}

    def draft(drafting: list[tuple[ScheduledSequence, int]]) -> dict[int, list[int]]:
        found = compute(drafting)
        for item, _ in drafting:
            slot, drafted = by_id[item.seq_id].slot, found[item.seq_id]
            prompted = list(slot.token_ids[: slot.num_prompt_tokens])
            right = next(
                one.token_ids for (name, i), one in answers.items() if (prompts[name], i) == (prompted, slot.index)
            )
            first = item.start + 1 - slot.num_prompt_tokens
            tokens = right[first : first + len(drafted)]  # fewer at the end of an answer
            tokens = [token ^ (i % 5 == 3) for i, token in enumerate(tokens, start=first)]
            found[item.seq_id] = [*tokens, *drafted[len(tokens) :]]
        return found

    proposer._draft = draft  # type: ignore[method-assign]


def park_some(core: EngineCore, swapped_out: list[int]) -> None:
    """Preempt a stream that has dropped tokens, every few steps. Its blocks are swapped out."""
    shifted = [seq for seq in core.scheduler.running if seq.cache.num_shifts]
    if shifted and core.scheduler.counters.num_steps % 7 == 0:
        core.scheduler._queues.preempt(shifted[-1])
        swapped_out += [shifted[-1].seq_id] * shifted[-1].cache.is_swapped_out


def test_draft_model_without_states_proposes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not swap or copy blocks of states."""
    drafting = {"speculative_model": str(make_model("llama", tmp_path / "draft")), "speculative_adaptive": False}
    little = {**LITTLE, "kv_cache_memory": 2 * FAMILIES[model.name]}
    shift, swapped_out = ContextRule(overflow="shift", keep_tokens=16), list[int]()
    shifting = [
        replace(one, context=shift, sampling=replace(one.sampling, max_tokens=120), priority=-i)
        for i, one in enumerate(traffic())
    ]
    for sent, options in ((traffic(), ROOMY), (shifting, little), (traffic()[:1], ROOMY)):
        want = run(make_core(model, **options), sent)
        core = make_core(model, **drafting, speculative_tokens=3, **options)
        guess(core, want)
        plan = core.scheduler.schedule
        monkeypatch.setattr(
            core.scheduler, "schedule", lambda core=core, plan=plan: (park_some(core, swapped_out), plan())[1]
        )
        same(run_checked(core, sent), want, 0.0 if "deterministic" in options else 1e-5)
        stats = core.stats()
        accepted, drafted = stats.spec_decode_model_num_accepted_tokens, stats.spec_decode_model_num_draft_tokens
        assert 12 * len(sent) < accepted < drafted - 5 * len(sent)
        assert bool(swapped_out) == (sent is shifting)
        swapped_out.clear()
    if core.runner.replay.obstacle is None:
        assert core.runner.replay.num_replayed > 8, "steps with proposals are decode steps and may be repeated"


def test_model_as_its_own_draft_model_is_always_accepted(model: Path, tmp_path: Path) -> None:
    """For every draft lag, after proposals of either kind, at block boundaries, and after a cached prefix."""
    options = {
        **ROOMY,
        "deterministic": True,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 6,
    }  # too few for proposals of all streams
    drafting = {"speculative_model": str(model), "speculative_adaptive": False, "speculative_tokens": 3}
    first = [greedy(f"{i}", prompt(i, length), 30 + length) for i, length in enumerate((1, 15, 16, 17, 33, 60))]
    for ngram in ({}, {"speculative_ngram": 4, "speculative_ngram_min": 2}):
        core = make_core(model, **drafting, **ngram, **options)
        plain = make_core(model, **options)
        assert core.info.state_bytes == 2 * plain.info.state_bytes
        got = run_checked(core, first)
        same(got, run(plain, first), 0.0)
        turns = [
            greedy(f"{i}", [*one.prompt_token_ids, *got[f"{i}", 0].token_ids, 7, 8], 40) for i, one in enumerate(first)
        ]
        found = run_checked(core, turns)
        same(found, run(plain, turns), 0.0)
        assert all(one.outputs[-1].cached_tokens >= 16 for one in found.values())
        stats = core.stats()
        accepted, drafted = stats.spec_decode_model_num_accepted_tokens, stats.spec_decode_model_num_draft_tokens
        assert (10 if ngram else 100) < accepted == drafted
        assert bool(ngram) == (stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens)
    shift = ContextRule(overflow="shift", keep_tokens=16)
    core = make_core(model, **drafting, **options | {"max_model_len": 64, "max_total_tokens": 300})
    run_checked(core, [greedy(f"{i}", prompt(i, 20 + 9 * i), 90, context=shift) for i in range(4)])
    stats = core.stats()
    assert stats.context_shifts > 8
    assert 100 < stats.spec_decode_model_num_accepted_tokens == stats.spec_decode_model_num_draft_tokens
