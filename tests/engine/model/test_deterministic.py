"""Deterministic mode: logits of greedy requests have equal bits in any batch and chunk, from the cache and after preemption."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import choose
from helpers.engines import Finished, greedy, make_core, run
from helpers.tiny_models import make_model

import windlass
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling

DEMO = Path(windlass.__file__).parent / "models" / "demo"
TEXT = torch.randint(3, 128, (700,), generator=torch.Generator().manual_seed(9)).tolist()
Logits = dict[str, torch.Tensor]  # [tokens, V] by request


def scalings(pairs: int, original: int, alpha: bool = False) -> list[dict[str, Any]]:
    """Eight scalings for a model with this many rotated pairs. alpha: dynamic changes even below the trained length."""
    return [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "ntk", "factor": 3.0},
        {"rope_type": "dynamic", "alpha": 6.0} if alpha else {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        },
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
            "long_factor": [1.5 + 0.5 * i for i in range(pairs)],
            "original_max_position_embeddings": original,
        },
        {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    ]


def requests(pairs: int, vocab: int, original: int = 32, alpha: bool = False) -> list[EngineRequest]:
    """Return sixteen requests, two for each scaling. A pair shares a prefix and differs in length."""
    generator = torch.Generator().manual_seed(8)
    made = []
    for i, scaling in enumerate(scalings(pairs, original, alpha)):
        prompt = torch.randint(3, vocab, (75,), generator=generator).tolist()
        rope = RopeScaling.from_dict(scaling)
        made.append(greedy(f"{i} short", prompt[: 13 + 3 * i], 22, rope_scaling=rope))
        made.append(greedy(f"{i} long", prompt[: 40 + 5 * i], 4, rope_scaling=rope))
    return made


def logits_of(finished: dict[tuple[str, int], Finished]) -> Logits:
    return {name: torch.stack(result.logits) for (name, _), result in finished.items()}


def alone(directory: Path, sent: list[EngineRequest], **options: Any) -> Logits:
    core = core_of(directory, **{"prefix_caching": False, **options})
    return {name: row for request in sent for name, row in logits_of(run(core, [request])).items()}


def differing(got: Logits, want: Logits) -> list[str]:
    assert set(got) == set(want)
    return [name for name in want if not torch.equal(got[name], want[name])]


def core_of(directory: Path, **options: Any) -> EngineCore:
    return make_core(directory, **{"max_num_seqs": 16, "max_model_len": 96, "deterministic": True, **options})


def in_one_batch(directory: Path, sent: list[EngineRequest], **options: Any) -> Logits:
    return logits_of(run(core_of(directory, **options), sent))


def in_chunks_of(tokens: int) -> Callable[..., Logits]:
    def way(directory: Path, sent: list[EngineRequest], **options: Any) -> Logits:
        return in_one_batch(directory, sent, max_num_batched_tokens=tokens, **options)

    return way


def preempted(directory: Path, sent: list[EngineRequest], **options: Any) -> Logits:
    whole = core_of(directory, **options)
    per_block = whole.info.kv_bytes_per_token * whole.info.block_size
    core = core_of(directory, kv_cache_memory=14 * per_block, prefix_caching=False, **options)
    result = logits_of(run(core, sent))
    assert core.stats().num_preemptions > 0
    return result


def from_the_prefix_cache(directory: Path, sent: list[EngineRequest], **options: Any) -> Logits:
    core = core_of(directory, **options)
    run(core, sent)
    finished = run(core, sent)
    assert sum(result.outputs[0].cached_tokens for result in finished.values()) > 300
    return logits_of(finished)


WAYS = {
    "batch": in_one_batch,
    "chunks of 3": in_chunks_of(3),
    "chunks of 7": in_chunks_of(7),
    "chunks of 33": in_chunks_of(33),
    "preempted": preempted,
    "prefix cache": from_the_prefix_cache,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama_bias": {},
    "qwen2": {},
    "qwen3": {"dtype": "bfloat16"},
    "gemma3": {},
    "gemma4_e2b": {},
    "gemma4_26b": {},
    "ministral3": {},
    "hunyuan": {},
    "demo": {},
    "demo, all bfloat16": {"dtype": "bfloat16"},
    "demo, int8 keys": {"kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model.startswith("demo"):
            return DEMO
        if model not in made:
            made[model] = make_model(model, tmp_path_factory.mktemp(model), max_position_embeddings=48)
        return made[model]

    return get


def requests_for(model: str) -> list[EngineRequest]:
    if model.startswith("demo"):
        return requests(16, 4096, original=64, alpha=True)
    return requests(16 if model.startswith("gemma4") else 8, 128)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SLOW = ("hunyuan", "ministral3", "demo, all bfloat16", "gemma4_26b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]
)
def test_bits_do_not_depend_on_the_batch(model: str, directory_of: Callable[[str], Path]) -> None:
    directory, sent, options = directory_of(model), requests_for(model), MODELS[model]
    want = alone(directory, sent, **options)
    together = core_of(directory, **options)
    for request in sent:
        together.add(request)
    together.step()
    assert together.stats().rotary_specs_live >= 8
    for name, way in WAYS.items():
        assert differing(way(directory, sent, **options), want) == [], name
    plain = alone(directory, sent, deterministic=False, **options)
    errors = [float((row[0] - plain[name][0]).abs().max() / plain[name][0].abs().max()) for name, row in want.items()]
    rounding = 2e-2 if options.get("dtype") == "bfloat16" else 1e-5  # tolerance of the mode's logits
    if "kv_cache_dtype" not in options:
        assert max(errors) <= rounding
    else:  # the last digit can decide the code of a key, which happens rarely and has a small effect
        assert statistics.median(errors) <= rounding
        assert max(errors) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama_bias", pytest.param("gemma3", marks=pytest.mark.slow), "qwen3", "demo"])
def test_plain_torch_has_the_same_bits_in_any_batch(
    model: str, directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, "turned off by this test")
    directory, sent, options = directory_of(model), requests_for(model)[3::4], MODELS[model]
    want = alone(directory, sent, **options)
    for name in ("batch", "chunks of 7"):
        assert differing(WAYS[name](directory, sent, **options), want) == [], name


@pytest.mark.slow
def test_frequency_changes_have_the_same_bits(tmp_path: Path) -> None:
    """A sequence changes frequencies at the same tokens in every schedule."""
    directory = make_model("llama", tmp_path, max_position_embeddings=32)
    kinds = {name: RopeScaling.from_dict(scalings(8, 32)[index]) for name, index in (("dynamic", 3), ("longrope", 6))}
    sent = [
        greedy(f"{name} {policy} {length}", range(3, 3 + length), 24, rope_scaling=scaling, rope_update=policy)
        for name, scaling in kinds.items()
        for policy in ("recompute", "rotate")
        for length in (20, 26, 47)
    ]
    options = {"max_model_len": 128}
    want = alone(directory, sent, **options)
    for name in ("batch", "chunks of 7", "chunks of 33"):
        assert differing(WAYS[name](directory, sent, **options), want) == [], name
    core = core_of(directory, kv_cache_memory=16 * 16 * core_of(directory).info.kv_bytes_per_token, **options)
    assert differing(logits_of(run(core, sent)), want) == []
    assert core.stats().num_preemptions > 0
    assert core.stats().key_moves > 0


@pytest.mark.slow
def test_windows_and_second_keys_longer_than_an_attention_chunk(tmp_path: Path) -> None:
    """Freed blocks and second key copies depend on the computed length, which differs between schedules."""
    directory = make_model("llama", tmp_path, num_hidden_layers=2, max_position_embeddings=256)
    sent = [
        greedy(
            f"{window} behind {sinks}", prompt, 800, context=ContextRule(attention_window=window, attention_sinks=sinks)
        )
        for window, sinks, prompt in ((300, 4, TEXT[:700]), (280, 0, TEXT[:300]), (290, 20, TEXT[:30]))
    ]
    far = RopeScaling.from_dict({"rope_type": "self_extend", "group_size": 8, "window": 200})
    sent.append(greedy("far", TEXT[5:505], 600, rope_scaling=far))
    options = {"max_model_len": 1536, "kv_cache_memory": 64 << 20}
    want = alone(directory, sent, **options)
    for changed in ({"burst_seconds": 1.0}, {"max_num_batched_tokens": 37}, {"max_num_batched_tokens": 530}):
        core = core_of(directory, **options, **changed)
        found = logits_of(run(core, sent, every_logit=False))
        kept = {name: rows[: len(found[name])] for name, rows in want.items()}
        assert all(map(len, found.values()))
        assert differing(found, kept) == [], changed
    core = core_of(directory, **options)
    for request in sent[:3]:
        core.add(request)
    while core.has_work():
        core.step()
    assert core.scheduler.counters.dropped_tokens >= 2 * 512, "blocks are given up all the same"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", ["gemma3", "gpt_oss"])
def test_sinks_with_windows_of_layers(model: str, directory_of: Callable[[str], Path]) -> None:
    """Such a layer sees sinks and the tokens after them as adjacent, with one window, for rotated query copies too."""
    sent = [
        greedy(
            f"{window} behind {sinks}",
            TEXT[:100],
            2,
            prompt_logprobs=0,
            context=ContextRule(attention_window=window, attention_sinks=sinks),
        )
        for window, sinks in ((50, 4), (50, 17), (33, 40))
    ]

    def prompts(tokens: int) -> dict[str, list[float]]:
        core = core_of(directory_of(model), max_model_len=256, max_num_batched_tokens=tokens)
        done = run(core, sent)
        told = {
            name: [out.prompt_logprobs for out in one.outputs if out.prompt_logprobs] for (name, _), one in done.items()
        }
        return {
            name: [row.logprob for rows in parts for row in rows if row is not None] for name, parts in told.items()
        }

    want = prompts(1)
    assert all(len(rows) == 99 for rows in want.values())
    for tokens in (4, 33, 64, 512):
        assert prompts(tokens) == want, tokens


@pytest.mark.slow
def test_two_threads_have_the_same_bits(directory_of: Callable[[str], Path]) -> None:
    torch.set_num_threads(2)
    sent = requests_for("demo")[1::8]
    assert differing(in_chunks_of(33)(DEMO, sent), alone(DEMO, sent)) == []


def test_comparison_finds_differences_without_the_mode() -> None:
    """The fast path sums a prefill chunk in another order than a decoded token."""
    sent = requests_for("demo")
    batch = in_one_batch(DEMO, sent, deterministic=False)
    assert len(differing(in_chunks_of(7)(DEMO, sent, deterministic=False), batch)) > 8
