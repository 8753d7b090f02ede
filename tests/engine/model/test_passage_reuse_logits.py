"""Passages reused from other prompts: logits compared with keys that are rotated again for every token to its position."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.raw_key_oracle import RawKeyOracle
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import RequestError
from windlass.engine.interface.context import ContextReport, NonPrefixReuseParams
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling

_GENERATOR = torch.Generator().manual_seed(7)


def tokens(count: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=_GENERATOR).tolist()


FIRST, SECOND = tokens(57), tokens(50)  # two documents
SOURCE = [*tokens(5), *FIRST, *tokens(3), *SECOND, *tokens(17)]
AT = 5, 5 + 57 + 3  # their positions in SOURCE
TAIL = tokens(6)
TURNED = [*tokens(11), *SECOND, *tokens(2), *FIRST, *TAIL]  # in another order
TURNED_AT = 11 + 50 + 2, 11  # their positions there
ANY = NonPrefixReuseParams(32, scope="me")
OFFER = NonPrefixReuseParams(0, scope="me")
FAMILIES = ["llama", "gemma3", "smollm3", "glm", "hunyuan", "ministral3", "gemma4_e2b"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: make_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}
    found["one layer"] = make_model("llama", tmp_path_factory.mktemp("one"), num_hidden_layers=1)
    found["one latent layer"] = make_model("deepseek_v3", tmp_path_factory.mktemp("latent"), num_hidden_layers=1)
    found["short"] = make_model("llama", tmp_path_factory.mktemp("short"), max_position_embeddings=64)
    return found


def core_of(model: Path, **options: Any) -> EngineCore:
    core = make_core(model, **{"max_model_len": 256, **options})
    run(core, [greedy("source", SOURCE, 1, reuse=OFFER)])
    return core


def oracle_of(core: EngineCore, model: Path, request: EngineRequest) -> RawKeyOracle:
    return RawKeyOracle(model, specs_of(core, request), [group.name for group in core.info.rotary_groups])


def read(oracle: RawKeyOracle, ids: list[int]) -> list[int]:
    """Append tokens and return their indices."""
    first = len(oracle.held)
    for token in ids:
        count = len(oracle.held) + 1
        oracle.step(token, count - 1, range(count), [True] * count)
    return oracle.held[first:]


def reused_logits(
    oracle: RawKeyOracle, ids: list[int], head: int, *, source: list[int] = SOURCE
) -> list[torch.Tensor | None]:
    """Return logits of TURNED and the tokens after it, with both documents except their first tokens reused from SOURCE."""
    there = read(oracle, source)
    oracle.held = []
    own: list[int | None] = []
    for at, from_at, length in ((TURNED_AT[1], AT[1], 50), (TURNED_AT[0], AT[0], 57)):
        own += read(oracle, ids[len(own) : at + head])
        oracle.held += there[from_at + head : from_at + length]
        own += [None] * (length - head)
    own += read(oracle, ids[len(own) :])
    logits = oracle.logits()
    return [None if row is None else logits[row] for row in own]


def check(got: Finished, right: list[torch.Tensor | None]) -> None:
    wanted = torch.stack([row for row in right[len(TURNED) - 1 : len(TURNED) - 1 + len(got.logits)] if row is not None])
    difference = (torch.stack(got.logits) - wanted).abs().max()
    assert difference / wanted.abs().max() < 2e-5
    assert got.token_ids == wanted.argmax(-1).tolist()


def report_of(got: Finished) -> tuple[int, int]:
    report = got.outputs[-1].context
    assert isinstance(report, ContextReport)
    return report.reused_passages, report.reused_tokens


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_reordered_documents_equal_rotation_to_new_positions(
    family: str, recompute: float, models: dict[str, Path]
) -> None:
    core = core_of(models[family], max_num_batched_tokens=40)
    request = greedy("turned", TURNED, 12, reuse=NonPrefixReuseParams(32, recompute=recompute, scope="me"))
    got = run(core, [request])["turned", 0]
    heads = (5, 6) if recompute else (0, 0)
    assert report_of(got) == (2, 107 - sum(heads))
    assert got.outputs[-1].cached_tokens == 107 - sum(heads)
    stats = core.stats()
    assert (stats.reused_passages, stats.reused_tokens) == (2, 107 - sum(heads))
    assert stats.recomputed_tokens["cache_reuse"] == sum(heads)
    if not recompute:
        check(got, reused_logits(oracle_of(core, models[family], request), TURNED + got.token_ids, 0))


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_passages_are_reused_under_the_same_scaling_only(name: str, models: dict[str, Path]) -> None:
    core = core_of(models["short"])
    scaling = RopeScaling.from_dict(SCALINGS[name])
    request = greedy("a", TURNED, 14, reuse=ANY, rope_scaling=scaling, rope_update="frozen")
    assert run(core, [request])["a", 0].outputs[-1].context is None, "computed under other frequencies"
    # At most as long as the other, so that frequencies that depend on length are equal.
    longest = len(TURNED) + 14
    source = greedy("s", SOURCE, longest - len(SOURCE), reuse=OFFER, rope_scaling=scaling, rope_update="frozen")
    core = make_core(models["short"], max_model_len=256)
    run(core, [source])
    got = run(core, [request])["a", 0]
    assert report_of(got) == (2, 107)
    check(got, reused_logits(oracle_of(core, models["short"], request), TURNED + got.token_ids, 0))


@pytest.mark.parametrize(
    "options", [{}, {"speculative_ngram": 4, "speculative_ngram_min": 1}, {"max_num_batched_tokens": 16}]
)
def test_reused_prompt_of_one_layer_equals_the_computed_one(options: dict[str, Any], models: dict[str, Path]) -> None:
    """A key of the first layer depends only on its token."""
    core = core_of(models["one layer"], **options)
    right = run(core, [greedy("whole", TURNED, 30)])["whole", 0]
    core = core_of(models["one layer"], **options)
    got = run(core, [greedy("reused", TURNED, 30, reuse=ANY)])["reused", 0]
    assert report_of(got) == (2, 107)
    assert got.token_ids == right.token_ids
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(right.logits), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["one layer", pytest.param("one latent layer", marks=ON_A_CPU)])
def test_int8_passages_are_reused_unchanged(name: str, models: dict[str, Path]) -> None:
    core = core_of(models[name], kv_cache_dtype="int8")
    right = run(core, [greedy("whole", TURNED, 8)])["whole", 0]
    core = core_of(models[name], kv_cache_dtype="int8")
    got = run(core, [greedy("reused", TURNED, 8, reuse=ANY)])["reused", 0]
    assert report_of(got) == (2, 107)
    scale = torch.stack(right.logits).abs().max()
    assert (got.logits[0] - right.logits[0]).abs().max() / scale < 0.05  # a key is rounded at its first position


def test_concurrent_requests_and_samples_share_a_passage(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    other = [*TAIL, *FIRST, *TAIL]
    requests = [greedy("a", TURNED, 10, reuse=ANY), greedy("b", other, 10, reuse=ANY, n=2)]
    alone = [run(core_of(models["llama"]), [request]) for request in requests]
    together = run(core, requests)
    assert {key: got.token_ids for key, got in together.items()} == {
        key: got.token_ids for finished in alone for key, got in finished.items()
    }
    assert report_of(together["b", 0]) == report_of(together["b", 1]) == (1, 57)
    assert report_of(together["a", 0]) == (2, 107)


def test_started_answer_does_not_use_later_passages(models: dict[str, Path]) -> None:
    """It found none, and was preempted by a request that computed them."""
    asked = greedy("a", TURNED, 60, reuse=ANY, priority=5)
    right = run(make_core(models["llama"], max_model_len=256), [asked])["a", 0]
    core = make_core(models["llama"], max_model_len=256, kv_cache_memory=18 * 16 << 10)
    core.add(asked)
    outputs = [output for _ in range(10) for output in core.step()]
    assert any(output.token_ids for output in outputs)
    core.add(greedy("b", SOURCE, 80, reuse=OFFER, priority=-5))
    while core.has_work():
        outputs += core.step()
    assert core.scheduler.counters.num_preemptions > 0
    mine = [output for output in outputs if output.request_id == "a"]
    assert [token for output in mine for token in output.token_ids] == right.token_ids
    assert mine[-1].context is None


def pages_of(core: EngineCore, blocks: list[int]) -> str:
    """Return a digest of these blocks."""
    digest = hashlib.sha256()
    for layer in range(len(core.runner.decoder.spec.layers)):
        pages = core.runner.cache.pages(layer)
        for plane in (pages.key, pages.value):
            digest.update(plane[blocks].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_thousand_reuses_change_no_byte_of_a_block(models: dict[str, Path]) -> None:
    core = core_of(models["one layer"])
    (pool,) = core.blocks.pools
    there = dict(pool.cached)
    before = pages_of(core, list(there.values()))
    for turn in range(50):
        ids = tokens(1 + turn % 19)
        requests = [greedy(f"{turn} {i}", [*ids, i + 3, *SECOND, 5], 1, reuse=ANY) for i in range(20)]
        run(core, requests)
        assert {digest: pool.cached.get(digest) for digest in there} == there
    assert core.stats().reused_passages == 1000
    assert pages_of(core, list(there.values())) == before


def test_blocks_after_a_passage_are_no_prefix(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    answer = run(core, [greedy("a", TURNED, 60, reuse=ANY)])["a", 0]
    following = run(core, [greedy("d", TURNED + answer.token_ids + TAIL, 4, reuse=ANY)])["d", 0]
    passages, reused = report_of(following)
    assert passages == 3 and reused >= 107 + 32
    plain = run(core, [greedy("b", TURNED + answer.token_ids, 4)])["b", 0]
    assert plain.outputs[-1].cached_tokens == 0
    whole = run(make_core(models["llama"], max_model_len=256), [greedy("c", TURNED + answer.token_ids, 4)])["c", 0]
    assert plain.token_ids == whole.token_ids


def test_passages_respect_scopes_and_spans(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    for salt, reuse in enumerate(
        (NonPrefixReuseParams(32, scope="another"), NonPrefixReuseParams(58, scope="me"), OFFER, None)
    ):
        got = run(core, [greedy("a", TURNED, 1, reuse=reuse, cache_salt=str(salt))])["a", 0]
        assert got.outputs[-1].context is None and got.outputs[-1].cached_tokens == 0
    span = NonPrefixReuseParams(0, ((15, 15 + 40),), scope="me")
    got = run(core, [greedy("b", TURNED, 1, reuse=span, cache_salt="apart")])["b", 0]
    assert report_of(got) == (1, 40)
    scored = greedy("c", TURNED, 1, reuse=ANY, cache_salt="apart", prompt_logprobs=0)
    assert run(core, [scored])["c", 0].outputs[-1].cached_tokens == 0


@pytest.mark.parametrize(
    ("reuse", "param"),
    [
        (NonPrefixReuseParams(-1), "cache_reuse"),
        (NonPrefixReuseParams(32, recompute=-0.1), "cache_reuse_recompute"),
        (NonPrefixReuseParams(32, recompute=float("nan")), "cache_reuse_recompute"),
        (NonPrefixReuseParams(0, ((0, 10), (9, 20))), "passages"),
        (NonPrefixReuseParams(0, ((5, 5),)), "passages"),
        (NonPrefixReuseParams(0, ((100, 1000),)), "passages"),
        (NonPrefixReuseParams(0, ((-1, 4),)), "passages"),
    ],
)
def test_invalid_reuse_options_are_refused(reuse: NonPrefixReuseParams, param: str, models: dict[str, Path]) -> None:
    core = make_core(models["one layer"], max_model_len=256)
    with pytest.raises(RequestError) as refusal:
        core.add(greedy("a", TURNED, 1, reuse=reuse))
    assert refusal.value.param == param and not core.has_work()


def test_deterministic_server_refuses_reuse(models: dict[str, Path]) -> None:
    core = core_of(models["one layer"], deterministic=True)
    with pytest.raises(RequestError, match="deterministic"):
        core.add(greedy("a", TURNED, 1, reuse=ANY))
    assert not core.has_work()
