"""Distance-based attention: logits compared with keys that are rotated again for every query to the distance of the rule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.distance_oracle import Distance, DistanceOracle, dual_chunk, log_n, rerope, self_extend
from engine_helpers.raw_key_oracle import RawKeyOracle
from helpers.cache_invariants import assert_balanced
from helpers.cpu_kernels import choose
from helpers.device import DEVICE
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import RequestError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.auto_scaling import AUTO, ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling, resolve

TRAINED = 32
PROMPT = torch.randint(3, 128, (53,), generator=torch.Generator().manual_seed(5)).tolist()
LENGTH = 60
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "glm": {},  # half of the dimensions, interleaved
    "qwen3": {},
    "ernie4_5": {},
    "smollm3": {"use_sliding_window": False, "sliding_window": None},  # layers that do not rotate
}

SCALINGS: dict[str, dict[str, Any]] = {
    "dual chunk": {"rope_type": "dual_chunk"},
    "own sizes": {"rope_type": "dual_chunk", "chunk_size": 29, "local_size": 9},
    "narrow": {"rope_type": "dual_chunk", "chunk_size": 32, "local_size": 1},
    "yarn inside": {"rope_type": "dual_chunk", "factor": 2.0},
    "growing scores": {"rope_type": "dual_chunk", "log_n": True},
    "long scores": {"rope_type": "dual_chunk", "length_scores": True},
    "self extend": {"rope_type": "self_extend"},
    "groups of 7": {"rope_type": "self_extend", "group_size": 7, "window": 11},
    "rerope": {"rope_type": "rerope"},
    "leaky": {"rope_type": "rerope", "window": 12, "factor": 3.5},
    "growing rerope": {"rope_type": "rerope", "window": 20, "log_n": True},
    "log n": {"rope_type": "log_n"},
    "log n of 20": {"rope_type": "log_n", "original_max_position_embeddings": 20},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: make_model(name, tmp_path_factory.mktemp(name), max_position_embeddings=TRAINED, **options)
        for name, options in FAMILIES.items()
    }


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 128, **options})


def context_sizes_of(scaling: dict[str, Any]) -> tuple[int, int]:
    """Return (s, c) from the scaling's fields."""
    longest = int(TRAINED * scaling.get("factor", 1))
    most = scaling.get("chunk_size", longest * 3 // 4)
    return most - scaling.get("local_size", longest // 8), most


def distance(scaling: dict[str, Any], i: int, j: int) -> float:
    """Return the distance of key j from query i by definition."""
    if scaling["rope_type"] == "self_extend":
        return self_extend(scaling.get("group_size", 4), scaling.get("window", TRAINED // 4))(i, j)
    if scaling["rope_type"] == "rerope":
        return rerope(scaling.get("window", TRAINED // 2), scaling.get("factor", math.inf))(i, j)
    if scaling["rope_type"] != "dual_chunk":
        return i - j
    s, c = context_sizes_of(scaling)
    if i // s == j // s:
        return i - j
    if i // s == j // s + 1:
        return min(i % s + s, c - 1) - j % s
    return c - 1 - j % s


def score_scale(scaling: dict[str, Any], i: int, length: int) -> float:
    """Return the score factor of query i in a request with this many tokens."""
    trained = scaling.get("original_max_position_embeddings", TRAINED)
    scale = 1.0
    if scaling["rope_type"] == "log_n" or scaling.get("log_n"):
        scale *= max(1.0, math.log(i + 1) / math.log(trained))
    if scaling.get("length_scores"):
        grid = trained
        while grid < length:
            grid *= 2**0.25
        scale *= 0.1 * math.log(grid / trained) + 1
    return scale


def right_logits(core: EngineCore, model: Path, request: EngineRequest, tokens: list[int]) -> list[torch.Tensor]:
    assert request.rope_scaling is not None
    scaling = request.rope_scaling.to_dict()
    oracle = RawKeyOracle(model, specs_of(core, request), [group.name for group in core.info.rotary_groups])
    length = len(request.prompt_token_ids) + request.sampling.max_tokens
    for i, token in enumerate(tokens):
        places = [i - distance(scaling, i, j) for j in range(i + 1)]
        oracle.score_scale = score_scale(scaling, i, length)
        oracle.step(token, i, places, [True] * (i + 1))
    return oracle.logits()


def check(got: Finished, right: list[torch.Tensor], prompt: int = len(PROMPT), tolerance: float = 2e-5) -> None:
    wanted = torch.stack(right[prompt - 1 : prompt - 1 + len(got.logits)])
    assert (torch.stack(got.logits) - wanted).abs().max() / wanted.abs().max() < tolerance
    if tolerance < 1e-4:
        assert got.token_ids == wanted.argmax(-1).tolist()


def asked(
    name: str, request_id: str = "a", length: int = LENGTH, prompt: list[int] = PROMPT, **fields: Any
) -> EngineRequest:
    return greedy(request_id, prompt, length, rope_scaling=RopeScaling.from_dict(SCALINGS[name]), **fields)


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("name", ["dual chunk", "groups of 7", "leaky"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_rotation_by_the_rule(family: str, name: str, models: dict[str, Path]) -> None:
    core = core_of(models[family])
    request = asked(name)
    got = run(core, [request])["a", 0]
    check(got, right_logits(core, models[family], request, PROMPT + got.token_ids))


@pytest.mark.slow
def test_recurrent_layers_with_second_key_copies(tmp_path: Path) -> None:
    model = make_model("qwen3_5", tmp_path, max_position_embeddings=TRAINED)
    core = core_of(model, max_num_batched_tokens=20)
    request = asked("self extend")
    got = run(core, [request])["a", 0]
    check(got, right_logits(core, model, request, PROMPT + got.token_ids))


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("budget", [7, pytest.param(2048, marks=pytest.mark.slow)])
def test_every_rule_in_chunks_of_any_size(name: str, budget: int, models: dict[str, Path]) -> None:
    core = core_of(models["llama"], max_num_batched_tokens=budget)
    request = asked(name)
    got = run(core, [request])["a", 0]
    check(got, right_logits(core, models["llama"], request, PROMPT + got.token_ids))


def test_rule_changes_answers(models: dict[str, Path]) -> None:
    """Sensitivity of the comparison above."""
    core = core_of(models["llama"])
    plain = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0]
    for name in SCALINGS:
        other = run(core, [asked(name, length=1)])["a", 0].logits[0]
        assert float((other - plain).abs().max() / plain.abs().max()) > 1e-3, name


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 pages": {"kv_cache_dtype": "int8"},
    "speculation": {"speculative_ngram": 4, "speculative_ngram_min": 1},
    "deterministic": {"deterministic": True},
    "few pages": {"kv_cache_memory": 256 << 10},  # some are preempted
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_all_rules_in_one_batch(options: str, models: dict[str, Path]) -> None:
    core = core_of(models["llama"], **{"prefix_caching": False} | OPTIONS[options])
    requests = [asked(name, name, n=2, temperature=1.0, seed=3) for name in SCALINGS]
    requests.append(greedy("none", PROMPT, LENGTH))
    alone = {request.request_id: run(core, [request]) for request in requests}
    together = run(core, requests)
    if options == "few pages":
        assert core.stats().num_preemptions
    for request in requests:
        for sample in range(request.sampling.n):
            right, got = alone[request.request_id][request.request_id, sample], together[request.request_id, sample]
            assert got.token_ids == right.token_ids, request.request_id
            difference = (torch.stack(got.logits) - torch.stack(right.logits)).abs().max()
            # With int8 pages a last digit can decide which code a key is rounded to.
            assert float(difference) <= {"deterministic": 0, "int8 pages": 2e-3}.get(options, 1e-4), request.request_id


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", ["dual chunk", "long scores", "groups of 7", "rerope", "log n"])
def test_prefix_cache_is_separate_for_each_rule(name: str, models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    first = run(core, [asked(name)])["a", 0]
    run(core, [greedy("plain", PROMPT, LENGTH)])
    again = run(core, [asked(name, prompt=PROMPT + first.token_ids[:20], length=LENGTH - 20)])["a", 0]
    assert again.outputs[-1].cached_tokens >= 64
    assert again.token_ids == first.token_ids[20:]
    other = run(core, [asked("own sizes")])["a", 0]
    assert other.outputs[-1].cached_tokens == 0
    right = right_logits(core, models["llama"], asked("own sizes"), PROMPT + other.token_ids)
    check(other, right)


@pytest.mark.parametrize("name", ["dual chunk", "groups of 7", "rerope"])
def test_requests_that_arrive_together_compute_their_common_prompt_once(name: str, models: dict[str, Path]) -> None:
    """Also where a second copy of the keys is cached."""
    core = core_of(models["llama"])
    requests = [replace(asked(name, prompt=[*PROMPT, 9 + i], length=1), request_id=f"r{i}") for i in range(4)]
    found = run(core, requests)
    block = core.info.block_size
    assert core.runner.positions_computed <= len(PROMPT) + 1 + 3 * (block + 1)
    cached = [found[request.request_id, 0].outputs[-1].cached_tokens for request in requests]
    assert cached == [0, *[len(PROMPT) // block * block] * 3]
    for request in requests:
        got = found[request.request_id, 0]
        right = right_logits(core, models["llama"], request, request.prompt_token_ids + got.token_ids)
        check(got, right, len(request.prompt_token_ids))


def test_short_texts_equal_answers_without_a_rule(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    plain = run(core, [greedy("a", PROMPT[:9], 5)])["a", 0]
    for name in ("dual chunk", "growing scores", "long scores", "rerope", "log n"):
        got = run(core, [asked(name, length=5, prompt=PROMPT[:9])])["a", 0]
        assert torch.equal(torch.stack(got.logits), torch.stack(plain.logits)), name


@pytest.mark.parametrize("name", ["dual chunk", "leaky"])
def test_recorded_decode_steps_give_the_same_bits(name: str, models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    if core.runner.replay.obstacle is not None:
        pytest.skip("nothing is recorded here")
    run(core, [asked(name)])
    assert core.runner.replay.num_replayed > LENGTH // 2


@pytest.mark.parametrize("first", ["none", "log n"])
def test_steps_with_and_without_score_factors_share_recordings(first: str, models: dict[str, Path]) -> None:
    """A recording belongs to one form of step: the score factor of one request must not apply to the next."""
    requests = {"none": greedy("a", PROMPT, LENGTH), "log n": asked("log n")}
    alone = {name: run(core_of(models["llama"]), [request])["a", 0] for name, request in requests.items()}
    core = core_of(models["llama"], prefix_caching=False)
    other = next(name for name in requests if name != first)
    for name in (first, other, first, other):
        got = run(core, [requests[name]])["a", 0]
        assert torch.equal(torch.stack(got.logits), torch.stack(alone[name].logits)), name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chunk_size": 33}, "chunk_size"),
        ({"chunk_size": 20, "local_size": 20}, "local_size"),
        ({"chunk_size": 20, "local_size": 5}, "local_size"),
        ({"local_size": 0}, "local_size"),
        ({"chunk_size": 1}, "chunk_size"),
        ({"chunk_size": 20.5}, "chunk_size"),
        ({"chunk_size": 65, "factor": 2.0}, "chunk_size"),
        ({"factor": 0.5}, "factor"),
        ({"beta_fast": 32.0}, "beta_fast"),
        ({"log_n": 1}, "log_n"),
        ({"low_freq_factor": 1.0}, "low_freq_factor"),
    ],
)
def test_invalid_chunks_are_refused(fields: dict[str, Any], param: str, models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    with pytest.raises(RequestError) as caught:
        core.add(greedy("a", PROMPT, 5, rope_scaling=RopeScaling.from_dict({"rope_type": "dual_chunk", **fields})))
    assert caught.value.param == f"rope_scaling.{param}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"rope_type": "self_extend", "window": 33}, "window"),
        ({"rope_type": "self_extend", "window": 0}, "window"),
        ({"rope_type": "self_extend", "group_size": 1}, "group_size"),
        ({"rope_type": "self_extend", "group_size": 2.5}, "group_size"),
        ({"rope_type": "self_extend", "factor": 2.0}, "factor"),
        ({"rope_type": "rerope", "window": 33}, "window"),
        ({"rope_type": "rerope", "factor": 0.9}, "factor"),
        ({"rope_type": "rerope", "group_size": 4}, "group_size"),
    ],
)
def test_invalid_windows_are_refused(fields: dict[str, Any], param: str, models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    with pytest.raises(RequestError) as caught:
        core.add(greedy("a", PROMPT, 5, rope_scaling=RopeScaling.from_dict(fields)))
    assert caught.value.param == f"rope_scaling.{param}"


def test_second_key_copies_use_twice_the_blocks(models: dict[str, Path]) -> None:
    core = core_of(models["llama"], kv_cache_memory=160 << 10)  # 10 blocks of 16 tokens
    assert run(core, [asked("dual chunk")])["a", 0].token_ids
    with pytest.raises(
        RequestError, match=r"14 KV blocks .keys under this rope_scaling are cached twice. and the cache has 10"
    ):
        core.add(asked("rerope"))
    core.add(asked("rerope", length=20))  # 72 tokens: five blocks twice
    used = 0
    while core.has_work():
        core.step()
        used = max(used, core.stats().kv_blocks_used)
    assert used == 10 and core.stats().kv_blocks_used == 0
    assert_balanced(core.blocks)


@pytest.mark.parametrize(
    ("family", "why"), [("gemma3", "window"), ("mistral", "window"), ("hunyuan", "normed"), ("ministral3", "positions")]
)
def test_models_with_other_positions_refuse_rules(family: str, why: str, tmp_path: Path) -> None:
    core = core_of(make_model(family, tmp_path))
    for kind in ("dual_chunk", "self_extend", "rerope", "log_n"):
        with pytest.raises(RequestError, match=why) as caught:
            core.add(greedy("a", PROMPT, 5, rope_scaling=RopeScaling(kind)))
        assert caught.value.param == "rope_scaling.rope_type"


@pytest.mark.parametrize("kind", ["dual_chunk", "self_extend", "rerope", "log_n"])
def test_other_position_options_are_refused_with_rules(kind: str, models: dict[str, Path]) -> None:
    core = core_of(models["llama"], shift_context=64)
    asked_with: dict[str, dict[str, Any]] = {
        "context_overflow": {"context": ContextRule("shift")},
        "attention_window": {"context": ContextRule(attention_window=20)},
        "cache_reuse": {"reuse": NonPrefixReuseParams(32)},
    }
    for field, options in asked_with.items():
        with pytest.raises(RequestError, match="leave one of them out") as caught:
            core.add(greedy("a", PROMPT, 5, rope_scaling=RopeScaling(kind), **options))
        assert caught.value.param == field


def test_report_has_the_chunk_sizes(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    for name, sizes in (("dual chunk", (24, 4)), ("own sizes", (29, 9)), ("yarn inside", (48, 8))):
        report = run(core, [asked(name, length=2)])["a", 0].outputs[-1].rotary
        assert report is not None and report.rope_type == "dual_chunk"
        assert (report.parameters["chunk_size"], report.parameters["local_size"]) == sizes
    for name, parameters in (("self extend", {"window": 8, "group_size": 4}), ("rerope", {"window": 16})):
        report = run(core, [asked(name, length=2)])["a", 0].outputs[-1].rotary
        assert report is not None and parameters.items() <= report.parameters.items()


def test_rule_of_the_server_applies_to_all_requests(models: dict[str, Path]) -> None:
    core = core_of(models["llama"], rope_scaling=RopeScaling.from_dict(SCALINGS["own sizes"]))
    by_server = run(core, [greedy("a", PROMPT, LENGTH)])["a", 0]
    by_request = run(core_of(models["llama"]), [asked("own sizes")])["a", 0]
    assert torch.equal(torch.stack(by_server.logits), torch.stack(by_request.logits))
    plain = run(core, [greedy("b", PROMPT, 4, rope_scaling=RopeScaling())])["b", 0]
    assert plain.token_ids == run(core_of(models["llama"]), [greedy("b", PROMPT, 4)])["b", 0].token_ids


def test_automatic_scaling_may_end_in_chunks(models: dict[str, Path]) -> None:
    rule = RopeScaling.from_dict(SCALINGS["dual chunk"])
    ladder = (ScalingThreshold(80), ScalingThreshold(None, rule, "chunks"))
    core = core_of(models["llama"], rope_ladder=ladder)
    request = greedy("a", PROMPT, LENGTH, rope_scaling=AUTO, rope_update="rotate")
    assert core.plan_rotation(request).policy == "recompute"
    got = run(core, [request])["a", 0]
    spelt_out = replace(request, rope_scaling=rule, rope_update=None)
    right = right_logits(core, models["llama"], spelt_out, PROMPT + got.token_ids)
    got.logits, got.token_ids = got.logits[-20:], got.token_ids[-20:]
    check(got, right, prompt=len(PROMPT) + LENGTH - 20)


# -- table of distances ------------------------------------------------------------------------------------------------

TABLE_TRAINED = 64
TABLE_PROMPT = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(7)).tolist()
MADE = 20

# Each with its distances, and the length from which scores grow.
KINDS: dict[str, tuple[dict[str, Any], Distance | None, int | None]] = {
    "defaults": ({"rope_type": "dual_chunk"}, dual_chunk(40, 48), None),
    "small chunks": ({"rope_type": "dual_chunk", "chunk_size": 25, "local_size": 8}, dual_chunk(17, 25), None),
    "yarn": ({"rope_type": "dual_chunk", "chunk_size": 90, "local_size": 50, "factor": 2}, dual_chunk(40, 90), None),
    "all": (
        {"rope_type": "dual_chunk", "chunk_size": 42, "local_size": 9, "log_n": True, "length_scores": True},
        dual_chunk(33, 42),
        TABLE_TRAINED,
    ),
    "self_extend": ({"rope_type": "self_extend"}, self_extend(4, 16), None),
    "threes": (
        {"rope_type": "self_extend", "group_size": 3, "window": 20, "log_n": True},
        self_extend(3, 20),
        TABLE_TRAINED,
    ),
    "rerope": ({"rope_type": "rerope"}, rerope(32), None),
    "leaky": ({"rope_type": "rerope", "window": 23, "factor": 5.5}, rerope(23, 5.5), None),
    "log_n": ({"rope_type": "log_n", "original_max_position_embeddings": 40}, None, 40),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=TABLE_TRAINED)


@pytest.fixture(params=["compiled", "plain torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain torch":
        if DEVICE != "cpu":
            pytest.skip("of kernels for a CPU")
        choose(monkeypatch, "turned off by this test")
    return str(request.param)


def table_core(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 256, "max_num_batched_tokens": 37, **options})


def table_request(kind: str, prompt: list[int] = TABLE_PROMPT) -> EngineRequest:
    scaling = None if kind == "plain" else RopeScaling.from_dict(KINDS[kind][0])
    return greedy(kind, prompt, MADE, rope_scaling=scaling)


def table_logits(model: Path, core: EngineCore, kind: str, tokens: list[int], **options: bool) -> torch.Tensor:
    """Return the logits of every token by the table, with the frequencies inside of chunks."""
    fields, distance, logarithm = KINDS.get(kind, ({}, None, None))
    inside = {"rope_type": "yarn", "factor": fields["factor"]} if kind == "yarn" else {"rope_type": "default"}
    spec = resolve(RopeScaling.from_dict(inside), core.info.model_rotary_groups[0].base, 1)
    longest = TABLE_TRAINED * 2 ** (
        math.ceil(4 * math.log2(len(tokens) / TABLE_TRAINED)) / 4
    )  # prompt and output, on the grid
    factor = 0.1 * math.log(longest / TABLE_TRAINED) + 1 if fields.get("length_scores") else 1.0
    grows = log_n(logarithm) if logarithm else lambda i: 1.0
    given: dict[str, Any] = {**options, **({"distance": distance} if distance else {})}
    oracle = DistanceOracle(
        model, spec.inv_freq, growth=lambda i: factor * grows(i), rotary_scale=spec.rotary_scale, **given
    )
    return oracle.logits(tokens)


def check_by_table(got: Finished, prompt: list[int], right: torch.Tensor) -> None:
    right = right[len(prompt) - 1 : len(prompt) - 1 + len(got.logits)]
    assert (torch.stack(got.logits) - right).abs().max() / right.abs().max() < 1e-5
    assert got.token_ids == right.argmax(-1).tolist()


@pytest.mark.quick_cases(1)
def test_logits_equal_the_table(kernels: str, model: Path) -> None:
    core = table_core(model)
    assert core.runner.decoder.backend.explain().startswith("plain torch") == (kernels == "plain torch")
    for kind in KINDS:
        got = run(core, [table_request(kind)])[kind, 0]
        check_by_table(got, TABLE_PROMPT, table_logits(model, core, kind, TABLE_PROMPT + got.token_ids))


def test_one_key_head_equals_the_table(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path, max_position_embeddings=TABLE_TRAINED, num_key_value_heads=1)
    core = table_core(model)
    got = run(core, [table_request("all")])["all", 0]
    check_by_table(got, TABLE_PROMPT, table_logits(model, core, "all", TABLE_PROMPT + got.token_ids))


@pytest.mark.parametrize("family", ["gemma", "olmo2", "granite", "exaone4_full"])
def test_families_with_other_query_norms_equal_the_table(family: str, tmp_path: Path) -> None:
    """Norm offsets, norms over all heads, a separate scale, and norms per head after the projections."""
    model = make_model(family, tmp_path, max_position_embeddings=TABLE_TRAINED)
    core = table_core(model)
    got = run(core, [table_request("small chunks")])["small chunks", 0]
    check_by_table(got, TABLE_PROMPT, table_logits(model, core, "small chunks", TABLE_PROMPT + got.token_ids))


@pytest.mark.parametrize("kind", ["small chunks", "threes", "leaky"])
def test_latent_attention_equals_the_table(kind: str, tmp_path: Path) -> None:
    model = make_model("deepseek_v3_half", tmp_path, max_position_embeddings=TABLE_TRAINED)
    core = table_core(model)
    got = run(core, [table_request(kind)])[kind, 0]
    check_by_table(got, TABLE_PROMPT, table_logits(model, core, kind, TABLE_PROMPT + got.token_ids, rotated_last=True))


def crowd() -> list[EngineRequest]:
    """Requests of every kind and of several lengths."""
    return [table_request(kind, TABLE_PROMPT[: 150 - 13 * n]) for n, kind in enumerate([*KINDS, "plain"])]


@pytest.mark.quick_cases(1)
def test_all_kinds_in_one_batch_equal_the_table(kernels: str, model: Path) -> None:
    core = table_core(model, max_num_seqs=16)
    got = run(core, crowd())
    for request in crowd():
        prompt, found = list(request.prompt_token_ids), got[request.request_id, 0]
        check_by_table(found, prompt, table_logits(model, core, request.request_id, prompt + found.token_ids))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pages", ["auto", "int8"])
def test_deterministic_bits_in_any_chunks_and_batches(pages: str, model: Path) -> None:
    fixed = {"deterministic": True, "max_num_seqs": 16, "kv_cache_dtype": pages, "prefix_caching": False}
    together = run(table_core(model, **fixed), crowd())
    for budget in (16, 2048):
        core = table_core(model, **fixed, max_num_batched_tokens=budget)
        for request in crowd():
            alone, other = run(core, [request])[request.request_id, 0], together[request.request_id, 0]
            assert torch.equal(torch.stack(alone.logits), torch.stack(other.logits)), (request.request_id, budget)


@pytest.mark.slow
def test_draft_model_uses_the_rule(model: Path) -> None:
    """A model that is its own draft model proposes its own tokens, as long as both see keys at the same distances."""
    core = table_core(model, speculative_model=str(model), speculative_adaptive=False)
    alone = table_core(model)
    for kind in KINDS:
        before = core.stats()
        got = run(core, [table_request(kind)])[kind, 0]
        assert got.token_ids == run(alone, [table_request(kind)])[kind, 0].token_ids
        after = core.stats()
        proposed = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
        assert (
            proposed and after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens == proposed
        ), kind
