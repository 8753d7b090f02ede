"""Recurrent models: logits do not depend on scheduling, caching, preemption or frequency changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.persisting import keeping
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.execution.attention_maps import attention_weights
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.rotary.rope_scaling import RopeScaling
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
    requests = [greedy(str(i), prompt, 40) for i, prompt in enumerate(PROMPTS)]
    found = run(core, requests, every_logit="burst_seconds" not in options)
    for i, prompt in enumerate(PROMPTS):
        check(reference, prompt, found[str(i), 0])
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
