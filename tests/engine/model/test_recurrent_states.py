"""Recurrent models: logits do not depend on scheduling, caching, preemption, frequency changes or proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.persisting import keeping
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.every_request import Results, prompt, run_checked, same
from helpers.tiny_models import Reference, make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.execution.attention_maps import attention_weights
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import ScheduledSequence
from windlass.lab.scoring import Scorer

# With a memory, without one, and with one in parallel with attention; cache sizes in bytes that cause preemptions.
FAMILIES = {"qwen3_5": 300 << 10, "lfm2": 160 << 10, "granite4_h": 400 << 10, "falcon_h1": 400 << 10}
_generator = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(3, 128, (count,), generator=_generator).tolist() for count in (5, 16, 17, 33, 60, 90)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    core = make_core(model, max_model_len=256)
    specs = specs_of(core, greedy("any", PROMPTS[0]))
    return Reference(model, specs, [group.name for group in core.info.rotary_groups])


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 256, "max_num_batched_tokens": 40, **options})


def check(reference: Reference, prompt: Sequence[int], got: Finished) -> None:
    """Return the logits and sampled tokens of all recorded rows."""
    tokens = [*prompt, *got.token_ids]
    right = reference.logits(tokens)[len(prompt) - 1 : len(tokens) - 1]
    assert got.token_ids == right.argmax(-1).tolist()
    if len(got.logits) == len(got.token_ids):
        assert (torch.stack(got.logits) - right).abs().max() < 1e-5 * right.abs().max()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_memory": FAMILIES},
        {"deterministic": True},
        {"prefix_caching": False},
        {"burst_seconds": 1.0},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_batch_of_all_lengths_equals_single_sequences(
    model: Path, reference: Reference, options: dict[str, Any]
) -> None:
    little = {name: by_family[model.name] for name, by_family in options.items() if by_family is FAMILIES}
    if little and model.name == "falcon_h1":  # states are larger than the keys of a short context
        little["max_model_len"] = 144
    core = core_of(model, **options | little)
    requests = [greedy(str(i), text, 40) for i, text in enumerate(PROMPTS)]
    found = run(core, requests, every_logit="burst_seconds" not in options)
    for i, text in enumerate(PROMPTS):
        check(reference, text, found[str(i), 0])
    assert (core.scheduler.counters.num_preemptions > 0) == ("kv_cache_memory" in options)
    assert core.runner.replay.num_replayed > 20 or core.runner.decoder.device.type != "cpu"


def test_next_turn_continues_from_cached_states(model: Path, reference: Reference) -> None:
    core = core_of(model)
    prompt = PROMPTS[5]
    first = run(core, [greedy("first", prompt, 30)])["first", 0]
    turn = [*prompt, *first.token_ids, 9, 8, 7]
    again = [*prompt, 5, 6, 7]  # as if the thinking is omitted
    found = run(core, [greedy("turn", turn, 8), greedy("again", again, 8)])
    for name, tokens, cached in (("turn", turn, 112), ("again", again, 80)):
        assert found[name, 0].outputs[-1].cached_tokens == cached
        check(reference, tokens, found[name, 0])


def test_samples_of_a_prompt_diverge(model: Path, reference: Reference) -> None:
    core = core_of(model)
    prompt = PROMPTS[4]
    found = run(core, [greedy("three", prompt, 20, n=3, temperature=1.0, seed=5)])
    drawn = [found["three", index] for index in range(3)]
    assert len({tuple(one.token_ids) for one in drawn}) == 3
    for one in drawn:
        right = reference.logits([*prompt, *one.token_ids])[len(prompt) - 1 : -1]
        assert (torch.stack(one.logits) - right).abs().max() < 1e-5 * right.abs().max()


def test_deterministic_bits_are_equal_in_batches(model: Path) -> None:
    alone = run(core_of(model, deterministic=True), [greedy("a", PROMPTS[5], 12)])["a", 0]
    requests = [greedy("a", PROMPTS[5], 12), *(greedy(str(i), prompt, 20) for i, prompt in enumerate(PROMPTS))]
    together = run(core_of(model, deterministic=True, max_num_batched_tokens=96), requests)["a", 0]
    assert all(torch.equal(one, other) for one, other in zip(alone.logits, together.logits, strict=True))


def test_mixed_scalings_and_rotated_keys(model: Path) -> None:
    """`rotate` changes frequencies and not states. Greedy tokens equal those of the engine's scorer."""
    core = core_of(model)
    scalings = {
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "linear": {"rope_type": "linear", "factor": 3.0},
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    }
    requests = [
        greedy(name, PROMPTS[4], 30, rope_scaling=RopeScaling.from_dict(fields), rope_update=policy)
        for (name, fields), policy in zip(scalings.items(), (None, None, "rotate"), strict=True)
    ]
    plans = {request.request_id: core.plan_rotation(request) for request in requests}
    found = run(core, requests)
    scorer = Scorer(core.runner.decoder, torch.float32)
    for name, plan in plans.items():
        got = found[name, 0]
        right = scorer.logits([*PROMPTS[4], *got.token_ids], plan, prompt=len(PROMPTS[4]))[len(PROMPTS[4]) - 1 : -1]
        assert (torch.stack(got.logits) - right).abs().max() < 1e-5 * right.abs().max()
    for one, other in combinations(scalings, 2):
        ours, theirs = (torch.stack(found[name, 0].logits) for name in (one, other))
        assert (ours - theirs).abs().max() > 1e-3 * ours.abs().max()


def test_endings_share_the_state_of_their_text(model: Path, reference: Reference) -> None:
    core = core_of(model)
    text, endings = PROMPTS[3], [[4], [5, 6, 7], [4, 9]]
    plan = core.plan_rotation(greedy("any", text))
    found = Scorer(core.runner.decoder, torch.float32).endings(text, endings, plan)
    for ending, entries in zip(endings, found, strict=True):
        right = reference.logits([*text, *ending]).log_softmax(-1)[len(text) - 1 : -1]
        for row, token, entry in zip(right, ending, entries, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.quick_cases(1)
@ON_A_CPU
def test_states_are_restored_from_files(model: Path, reference: Reference, tmp_path: Path) -> None:
    prompt = PROMPTS[5]
    with keeping(model, tmp_path, max_num_batched_tokens=40, max_model_len=256) as core:
        first = run(core, [greedy("first", prompt, 8)])["first", 0]
    with keeping(model, tmp_path, max_num_batched_tokens=40, max_model_len=256) as core:
        second = run(core, [greedy("second", prompt, 8)])["second", 0]
    assert second.outputs[-1].cached_tokens == 80
    assert all(torch.equal(one, other) for one, other in zip(first.logits, second.logits, strict=True))
    check(reference, prompt, second)


def test_context_changes_are_refused(model: Path) -> None:
    core = core_of(model)
    request = greedy("a", PROMPTS[5], 4, reuse=NonPrefixReuseParams(32, scope="me"))
    with pytest.raises(RequestError, match=r"cache_reuse: .* carry a state from token to token") as caught:
        core.add(request)
    assert caught.value.param == "cache_reuse"
    with pytest.raises(LoadError, match=r"needs .* of KV cache in addition to keys"):
        core_of(model, kv_cache_memory=4 << 10)
    assert core.info.num_states == 17 and core.info.state_bytes


def test_attention_weights_of_layers_that_attend(model: Path) -> None:
    scorer = Scorer(core_of(model).runner.decoder, torch.float32)
    weights = attention_weights(scorer, PROMPTS[1], 2)
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]))
    if model.name == "falcon_h1":  # all layers attend
        return
    with pytest.raises(RequestError, match=r"layer 1 attends to nothing, as it carries a state: ask for one of 2, 4"):
        attention_weights(scorer, PROMPTS[1], 1)


def test_window_of_one_token_retains_the_state(model: Path, reference: Reference) -> None:
    """Key blocks that no later token sees are freed, all of them at a block's end. The state remains."""
    core = core_of(model)
    seen = ContextRule(attention_window=1)
    scorer = Scorer(core.runner.decoder, torch.float32)
    plan = core.plan_rotation(greedy("any", PROMPTS[4]))
    got = run(core, [greedy("a", PROMPTS[4], 30, context=seen)])["a", 0]
    tokens = [*PROMPTS[4], *got.token_ids]
    right = scorer.logprobs(tokens, plan, context=seen)[len(PROMPTS[4]) - 1 :]
    rows = torch.stack(got.logits).log_softmax(-1)
    found = rows.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
    assert torch.allclose(found, right, atol=1e-4)


def test_few_states_limit_running_sequences_without_recomputation(tmp_path: Path) -> None:
    model = make_model("qwen3_5", tmp_path / "model")
    ample = make_core(model, max_model_len=256)
    state, token = ample.info.state_bytes, ample.info.kv_bytes_per_token
    core = make_core(model, kv_cache_memory=5 * state + 512 * token, max_model_len=512, max_num_seqs=8)
    assert core.info.num_states == 5 < core.info.max_num_seqs and core.info.num_kv_blocks == (32,)
    requests = [greedy(str(i), PROMPTS[i % 4], 50) for i in range(8)]
    found, right = run(core, requests), run(ample, requests)
    assert core.scheduler.counters.num_preemptions == 0
    assert [found[str(i), 0].token_ids for i in range(8)] == [right[str(i), 0].token_ids for i in range(8)]


def test_rotated_and_second_key_copies_with_one_state_slot(model: Path) -> None:
    core = core_of(model, max_num_seqs=1)
    dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4.0})
    twice = RopeScaling.from_dict({"rope_type": "self_extend", "group_size": 4, "window": 16})
    for scaling, policy in ((dynamic, "rotate"), (twice, None)):
        request = greedy("a", PROMPTS[5], 200 if policy else 20, rope_scaling=scaling, rope_update=policy)
        assert run(core, [request])["a", 0].finish_reason == "length"


def test_samples_with_second_key_copies(model: Path) -> None:
    core = core_of(model, kv_cache_memory=FAMILIES[model.name], max_num_seqs=8)
    twice = RopeScaling.from_dict({"rope_type": "self_extend", "group_size": 4, "window": 16})
    drawn: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5}
    requests = [greedy(str(i), PROMPTS[5][: 40 + i], 20, rope_scaling=twice, **drawn) for i in range(3)]
    assert len(run(core, requests, every_logit=False)) == 9
    again = run(core, [greedy("again", PROMPTS[5][:60], 4, rope_scaling=twice)])["again", 0]
    assert again.outputs[-1].cached_tokens in (0, 32)


def test_failing_recorded_step_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(model)
    core.add(greedy("a", PROMPTS[1], 40))
    while core.runner.replay.num_replayed < 3:
        core.step()
    kinds = {type(plan.recording) for plan in core.runner.replay._recordings.values() if plan is not None}
    for kind in kinds - {type(None)}:
        monkeypatch.setattr(kind, "repeat", lambda recording: False)
    with pytest.raises(RuntimeError, match="cannot be repeated on changed states"):
        for _ in range(3):
            core.step()


# -- proposals ---------------------------------------------------------------------------------------------------------

# One family for each operation: short convolutions, Gated DeltaNet, a parallel state space; small cache sizes in bytes.
SMALL_CACHES = {"lfm2": 180 << 10, "qwen3_5": 240 << 10, "falcon_h1": 540 << 10}
LITTLE = {"max_num_seqs": 6, "max_model_len": 96, "max_total_tokens": 400, "deterministic": True}
ROOMY: dict[str, Any] = {"max_model_len": 256}
PROPOSING = {"speculative_ngram": 5, "speculative_ngram_min": 1}


@pytest.fixture(scope="module", params=SMALL_CACHES)
def proposing_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    proposing_model: Path, sent: Callable[[], list[EngineRequest]], proposing: dict[str, Any], **options: Any
) -> tuple[EngineCore, Results]:
    """Return the engine with proposals and its answers, which equal those of an engine without proposals."""
    options = {"max_model_len": 256, "max_num_batched_tokens": 40, **options}
    want = run(make_core(proposing_model, **options), sent())
    core = make_core(proposing_model, **proposing, **options)
    got = run_checked(core, sent())
    same(got, want, 0.0 if options.get("deterministic") else 1e-5)
    stats = core.stats()
    assert 20 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens - 20
    return core, got


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True, "prefix_caching": False}], ids=lambda options: next(iter(options), "plain")
)
def test_proposals_do_not_change_answers(proposing_model: Path, options: dict[str, Any]) -> None:
    core, _ = both(proposing_model, traffic, PROPOSING, **options)
    assert core.info.num_states == 8 + 1 + 8 * (not options) + 8 * 5
    if core.runner.replay.obstacle is None:
        assert core.runner.replay.num_replayed > 0


def test_next_turn_after_proposals_continues_from_cached_states(proposing_model: Path) -> None:
    """The end of a block may be anywhere in a step of proposed tokens."""
    few = {"allowed_token_ids": (20, 21, 22)}
    first = [prompt(i, 20 + i, period=3) for i in range(6)]
    plain, core = (
        make_core(proposing_model, max_model_len=256),
        make_core(proposing_model, max_model_len=256, **PROPOSING),
    )
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


@pytest.mark.slow
@ON_A_CPU
def test_states_after_accepted_tokens_are_restored_from_files(proposing_model: Path, tmp_path: Path) -> None:
    """Of the model and of a draft model."""
    text, few = prompt(1, 30, period=3), {"allowed_token_ids": (20, 21, 22)}
    plain = make_core(proposing_model, deterministic=True, **ROOMY)
    want = run(plain, [greedy("first", text, 60, **few)])
    turn = [*text, *want["first", 0].token_ids, 5]
    then = run(plain, [greedy("turn", turn, 20)])
    drafted = {"speculative_model": str(proposing_model), "speculative_adaptive": False}
    for proposing in (PROPOSING, drafted):
        folder = tmp_path / next(iter(proposing))
        with keeping(proposing_model, folder, **ROOMY, **proposing) as core:
            same(run(core, [greedy("first", text, 60, **few)]), want, 0.0)
            assert core.stats().spec_decode_num_draft_tokens > 10
        with keeping(proposing_model, folder, **ROOMY, **proposing) as core:
            found = run(core, [greedy("turn", turn, 20)])
            stats = core.stats()
        assert found["turn", 0].outputs[-1].cached_tokens == 80
        same(found, then, 0.0)
    assert 10 < stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens


@pytest.mark.quick_cases(1)
def test_preempted_and_shifted_streams_equal_unspeculated_ones(proposing_model: Path) -> None:
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

    core, _ = both(proposing_model, sent, PROPOSING, **LITTLE, kv_cache_memory=SMALL_CACHES[proposing_model.name])
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.context_shifts > 5


@pytest.mark.quick_cases(2)
def test_few_states_limit_proposals(proposing_model: Path) -> None:
    info = make_core(proposing_model).info
    memory = 128 * info.kv_bytes_per_token + 4 * info.state_bytes
    core, _ = both(proposing_model, traffic, PROPOSING, kv_cache_memory=memory, max_model_len=128, max_num_seqs=2)
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


@pytest.mark.slow
def test_draft_model_without_states_proposes(
    proposing_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not swap or copy blocks of states."""
    drafting = {"speculative_model": str(make_model("llama", tmp_path / "draft")), "speculative_adaptive": False}
    little = {**LITTLE, "kv_cache_memory": 2 * SMALL_CACHES[proposing_model.name]}
    shift, swapped_out = ContextRule(overflow="shift", keep_tokens=16), list[int]()
    shifting = [
        replace(one, context=shift, sampling=replace(one.sampling, max_tokens=120), priority=-i)
        for i, one in enumerate(traffic())
    ]
    for sent, options in ((traffic(), ROOMY), (shifting, little), (traffic()[:1], ROOMY)):
        want = run(make_core(proposing_model, **options), sent)
        core = make_core(proposing_model, **drafting, speculative_tokens=3, **options)
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


@pytest.mark.slow
def test_model_as_its_own_draft_model_is_always_accepted(proposing_model: Path, tmp_path: Path) -> None:
    """For every draft lag, after proposals of either kind, at block boundaries, and after a cached prefix."""
    options = {
        **ROOMY,
        "deterministic": True,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 6,
    }  # too few for proposals of all streams
    drafting = {"speculative_model": str(proposing_model), "speculative_adaptive": False, "speculative_tokens": 3}
    first = [greedy(f"{i}", prompt(i, length), 30 + length) for i, length in enumerate((1, 15, 16, 17, 33, 60))]
    for ngram in ({}, {"speculative_ngram": 4, "speculative_ngram_min": 2}):
        core = make_core(proposing_model, **drafting, **ngram, **options)
        plain = make_core(proposing_model, **options)
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
    core = make_core(proposing_model, **drafting, **options | {"max_model_len": 64, "max_total_tokens": 300})
    run_checked(core, [greedy(f"{i}", prompt(i, 20 + 9 * i), 90, context=shift) for i in range(4)])
    stats = core.stats()
    assert stats.context_shifts > 8
    assert 100 < stats.spec_decode_model_num_accepted_tokens == stats.spec_decode_model_num_draft_tokens
