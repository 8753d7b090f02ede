"""Recorded decode steps with adapters: the same bits, one recording for any mix of adapters, and a separate one without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import ALL, merged, save_adapter
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run
from helpers.gguf_models import make_gguf
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.model_info import AdapterSource
from windlass.kernels import cpu

pytestmark = [
    ON_A_CPU,
    pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="without compiled kernels nothing repeats"),
]

PROMPT = list(range(3, 24))
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
Results = dict[tuple[str, int], Finished]


def sources_of(
    model: Path, root: Path, ranks: tuple[int, ...], targets: tuple[str, ...] = ALL
) -> tuple[AdapterSource, ...]:
    made = [save_adapter(root / f"adapter-{i}", model, targets, rank=rank, seed=i) for i, rank in enumerate(ranks)]
    return tuple(AdapterSource(i, f"a{i}", str(path)) for i, path in enumerate(made, start=1))


def assert_same_bits(found: Results, wanted: Results) -> None:
    assert found.keys() == wanted.keys()
    for key, entry in wanted.items():
        assert found[key].token_ids == entry.token_ids
        assert torch.equal(torch.stack(found[key].logits), torch.stack(entry.logits)), key


def work(core: EngineCore, *, repeat: bool = True) -> Results:
    """Streams with three adapters and with none, which start and end at different steps."""
    if not repeat:
        core.runner.replay.max_rows = 0
    found = run(core, [greedy(f"a{i}", PROMPT[i:], 20 + 9 * i, adapter=(None, 1, 2, 3, 1)[i]) for i in range(5)])
    return found | run(core, [greedy(f"b{i}", PROMPT[: 5 + i], 30, adapter=(3, None, 2)[i]) for i in range(3)])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"deterministic": True}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4", "kv_cache_dtype": "int8"}),
        ("qwen3", {}),
        ("gemma3", {}),
        ("phi3", {}),
        ("llama", {"dtype": "bfloat16"}),
    ],
)
def test_recorded_steps_give_the_same_bits(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    sources = sources_of(model, tmp_path, (1, 4, 7), FUSED if family == "phi3" else ALL)
    options |= {"lora": sources, "max_model_len": 128}
    core = make_core(model, **options)
    assert_same_bits(work(core), work(make_core(model, **options), repeat=False))
    if "dtype" not in options:
        assert core.runner.replay.obstacle is None and core.runner.replay.num_replayed > 40


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_recorded_steps_with_blocks_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    model = make_model("llama", tmp_path / "model", num_hidden_layers=2, **sizes)
    made = make_gguf(model, tmp_path / "gguf", lambda name: kind)
    options = {"lora": sources_of(model, tmp_path, (2, 16, 5)), "max_model_len": 128}
    core = make_core(made.derived, **options)
    found = work(core)
    assert_same_bits(found, work(make_core(made.derived, **options), repeat=False))
    assert core.runner.replay.num_replayed > 40
    assert found["a1", 0].logits[0].ne(found["b2", 0].logits[0]).any()


def test_fused_projections_equal_merged_weights(tmp_path: Path) -> None:
    model = make_model("phi3", tmp_path / "model")
    (source,) = sources_of(model, tmp_path, (6,), FUSED)
    wanted = run(make_core(merged(model, Path(source.path), tmp_path / "merged")), [greedy("r", PROMPT, 12)])["r", 0]
    found = run(make_core(model, lora=(source,)), [greedy("r", PROMPT, 12, adapter=1)])["r", 0]
    assert found.token_ids == wanted.token_ids
    a, b = torch.stack(found.logits), torch.stack(wanted.logits)
    assert (a - b).abs().max() < 1e-5 * b.abs().max()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def sources(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterSource, ...]:
    return sources_of(llama, tmp_path_factory.mktemp("adapters"), (2, 3, 16, 1))


def streams(*adapters: int | None, tokens: int = 12) -> list[Any]:
    return [greedy(f"s{i}", PROMPT[i:], tokens, adapter=adapter) for i, adapter in enumerate(adapters)]


def test_one_recording_serves_every_mix(llama: Path, sources: tuple[AdapterSource, ...]) -> None:
    core = make_core(llama, lora=sources)
    replay = core.runner.replay
    run(core, streams(1, 2, 3, 4))
    plans = set(replay._recordings)
    for mix in ((4, 3, 2, 1), (1, 1, None, 1), (None, None, None, 2)):
        before = replay.num_replayed
        found = run(core, streams(*mix))
        assert replay.num_replayed - before == 11 and set(replay._recordings) == plans
        wanted = make_core(llama, lora=sources)
        wanted.runner.replay.max_rows = 0
        assert_same_bits(found, run(wanted, streams(*mix)))


def test_a_step_without_adapters_makes_no_calls_for_them(llama: Path, sources: tuple[AdapterSource, ...]) -> None:
    counts = {}
    for lora, adapter in (((), None), (sources, None), (sources, 1)):
        core = make_core(llama, lora=lora)
        run(core, streams(adapter, None))
        (plan,) = [plan for key, plan in core.runner.replay._recordings.items() if key[0] == 2 and plan is not None]
        counts[bool(lora), adapter] = [name for name, _ in plan.recording.calls]
    assert counts[True, None] == counts[False, None]
    more = counts[True, 1]
    assert more.count("add_low_rank") == 4 * len(core.runner.decoder.layers)
    assert [name for name in more if name != "add_low_rank"] == counts[False, None]


def test_adapter_loaded_between_steps_is_used_by_the_next(llama: Path, sources: tuple[AdapterSource, ...]) -> None:
    """A stream continues with one adapter while another is unloaded and a third takes its slot."""
    wanted = {i: run(make_core(llama, lora=sources), [greedy("r", PROMPT, 40, adapter=i)])["r", 0] for i in (1, 2, 3)}
    core = make_core(llama, lora=sources[:2], max_loras=2)
    tokens: dict[str, list[int]] = {"one": [], "two": [], "three": []}

    def steps(count: int) -> None:
        for _ in range(count):
            for output in core.step():
                tokens[output.request_id] += output.token_ids

    core.add(greedy("one", PROMPT, 40, adapter=1))
    core.add(greedy("two", PROMPT, 15, adapter=2))
    steps(8)
    core.drop_adapter(2)
    late = core.read_adapter(sources[2])
    assert "max_loaded" in str(late.exception(30))  # it is still in use
    steps(10)
    core.add_adapter(core.read_adapter(sources[2]).result(30))
    core.add(greedy("three", PROMPT, 15, adapter=3))
    repeated = core.runner.replay.num_replayed
    while core.has_work():
        steps(1)
    assert core.runner.replay.num_replayed > repeated + 12
    assert tokens == {
        "one": wanted[1].token_ids,
        "two": wanted[2].token_ids[:15],
        "three": wanted[3].token_ids[:15],
    }


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bits_do_not_depend_on_threads(threads: int, llama: Path, sources: tuple[AdapterSource, ...]) -> None:
    mix = (3, None, 1, 3)
    wanted = run(make_core(llama, lora=sources, deterministic=True), streams(*mix))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        core = make_core(llama, lora=sources, deterministic=True)
        assert_same_bits(run(core, streams(*mix)), wanted)
        assert core.runner.replay.num_replayed >= 8
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "drafting", [{"speculative_ngram": 3, "speculative_ngram_min": 1}, {"speculative_model": "itself"}]
)
def test_proposals_are_verified_with_the_adapter(
    drafting: dict[str, Any], llama: Path, sources: tuple[AdapterSource, ...]
) -> None:
    """Proposals change the number of steps and no token, whether or not the draft model has the adapter."""
    if "speculative_model" in drafting:
        drafting = {"speculative_model": str(llama), "speculative_adaptive": False}
    requests = [greedy(f"s{i}", [*PROMPT, *PROMPT], 40, adapter=adapter) for i, adapter in enumerate((1, None, 3))]
    options = {"lora": sources, "deterministic": True, "max_model_len": 160}
    core = make_core(llama, **drafting, **options)
    found, wanted = run(core, requests), run(make_core(llama, **options), requests)
    assert {key: entry.token_ids for key, entry in found.items()} == {k: e.token_ids for k, e in wanted.items()}
    stats = core.stats()
    assert stats.spec_decode_num_draft_tokens > 20
