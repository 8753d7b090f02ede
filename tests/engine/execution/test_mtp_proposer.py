"""MTP layers: the proposals equal those of transformers, and no result changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.proposals import Proposed, mtp_engine, predictor_of
from engine_helpers.quantized_checkpoints import AWQ, FP8, as_awq, as_floats, make_quantized, quantize
from engine_helpers.rewritten_weights import rewritten
from helpers.engines import greedy, make_core, run, specs_of
from helpers.every_request import prompt, run_checked, same, traffic
from helpers.little_memory import NO_ROOM
from helpers.marks import slow_after, slow_but
from helpers.prediction_layers import PredictionOracle, make_predicting
from helpers.tiny_models import make_model
from helpers.tiny_multimodal import make_multimodal
from safetensors.torch import load_file

from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.errors import LoadError
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from windlass.kernels import BlockWeight

DirectoryOf = Callable[[str], Path]
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# Families whose MTP layer is one more layer of the model, and families whose MTP layer has its own form.
MORE_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "ernie4_5_moe", "nemotron_h_experts")


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_predicting(family, tmp_path_factory.mktemp(family), seed=1)
        return made[family]

    return get


def with_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [pytest.param({}, marks=pytest.mark.slow), {"speculative_ngram": 2, "speculative_ngram_min": 1}],
    ids=["alone", "with n-grams"],
)
@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3_5"))
def test_proposals_equal_transformers(family: str, others: dict[str, Any], directory_of: DirectoryOf) -> None:
    """Chunked prompts, several streams, samples of one prompt, accepted and rejected tokens; alone, and combined with n-gram
    proposals in some steps."""
    directory = directory_of(family)
    core = mtp_engine(directory, speculative_tokens=3, max_num_batched_tokens=32, **others)
    proposed = Proposed(core)
    sent = [greedy("a", prompt(1, 5), 24), greedy("b", prompt(2, 40), 24)]
    sent.append(greedy("c", prompt(3, 23), 24, n=2, temperature=0.7, seed=3))
    run(core, sent)
    stats = core.stats()
    assert (stats.spec_decode_num_draft_tokens > stats.spec_decode_model_num_draft_tokens + 5) is bool(others)
    accepted, drafted = stats.spec_decode_model_num_accepted_tokens, stats.spec_decode_model_num_draft_tokens
    assert 5 < accepted < drafted - 5
    proposed.check(PredictionOracle(family, directory, specs_of(core, sent[0])), 15)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", slow_but(MORE_FAMILIES, "deepseek_v3", "nemotron_h_experts"))
def test_proposals_of_further_families_equal_transformers(family: str, directory_of: DirectoryOf) -> None:
    """And results equal those without the layer."""
    directory = directory_of(family)
    sent = [greedy("a", prompt(1, 5), 24), greedy("b", prompt(2, 40), 24)]
    want = run(make_core(directory), sent)
    core = mtp_engine(directory, speculative_tokens=3, max_num_batched_tokens=32)
    proposed = Proposed(core)
    same(run(core, sent), want, 1e-4)
    stats = core.stats()
    assert stats.spec_decode_model_num_accepted_tokens > 3
    specs = () if family.startswith("nemotron") else specs_of(core, sent[0])
    proposed.check(PredictionOracle(family, directory, specs), 8)


@pytest.mark.parametrize("method", slow_but(["fp8", "awq"], "fp8"))
def test_proposals_of_quantized_checkpoints_equal_transformers(method: str, tmp_path: Path) -> None:
    """Quantized like the model's layers, except for the input projection, or not quantized."""
    family, sizes = ("deepseek_v3", {}) if method == "fp8" else ("glm4_moe", {"moe_intermediate_size": 64})
    source = make_predicting(family, tmp_path / "source", seed=1, **sizes)
    left = ("lm_head", "mlp.gate", "eh_proj", "shared_head.head")
    modules = [name.removesuffix(".weight") for name in load_file(source / "model.safetensors")]
    leave = [name for name in modules if name.endswith(left) or (method == "awq" and "layers.4." in name)]

    def layout(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if method == "fp8":
            return as_floats(module, weight, "48x40", "weight_scale_inv")
        rounded = quantize(weight, 4, 32, symmetric=False)
        return as_awq(module, rounded), rounded.numbers()

    config = {**FP8, "weight_block_size": [48, 40]} if method == "fp8" else AWQ
    quantized, plain = make_quantized(source, tmp_path, config, layout, leave=leave)
    core = mtp_engine(quantized, speculative_tokens=2, dtype="float32", activations="float32")
    proposed, sent = Proposed(core), greedy("a", prompt(2, 20), 16)
    run(core, [sent])
    proposed.check(PredictionOracle(family, plain, specs_of(core, sent)), 5)


def test_the_next_turn_finds_cached_keys_of_the_mtp_layer(directory_of: DirectoryOf) -> None:
    """A text that continues the cached one uses all of its keys."""
    directory = directory_of("qwen3_next")
    core = mtp_engine(directory)
    (first,) = run(core, [greedy("a", prompt(2, 40), 60)]).values()
    computed = predictor_of(core).positions_computed
    proposed, turn = Proposed(core), [*prompt(2, 40), *first.token_ids, 9, 8, 7]
    (second,) = run(core, [greedy("b", turn, 20)]).values()
    assert second.outputs[-1].cached_tokens == 96
    assert predictor_of(core).positions_computed - computed < 60
    proposed.check(PredictionOracle("qwen3_next", directory, specs_of(core, greedy("b", turn))), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    slow_after(
        1,
        [
            ("qwen3_5", {}),
            ("qwen3_5_moe", {"speculative_adaptive": True, "max_num_batched_tokens": 24}),
            ("qwen3_next", {"speculative_ngram": 3, "speculative_ngram_min": 1, "deterministic": True}),
            ("qwen3_5", {"prefix_caching": False, "max_num_seqs": 3, "speculative_tokens": 16}),
            ("qwen3_5", {"deterministic": True, "quantization": "int8", "kv_cache_dtype": "int8"}),
            ("qwen3_5_moe", {"deterministic": True, "dtype": "bfloat16"}),
        ],
    ),
)
def test_an_mtp_layer_changes_no_result(family: str, options: dict[str, Any], directory_of: DirectoryOf) -> None:
    own = {name: value for name, value in options.items() if not name.startswith("speculative")}
    want = run(make_core(directory_of(family), max_model_len=192, **own), traffic())
    core = mtp_engine(directory_of(family), max_model_len=192, **options)
    same(run_checked(core, traffic()), want, 0.0 if options.get("deterministic") else 1e-5)
    stats = core.stats()
    assert stats.spec_decode_model_num_accepted_tokens > 20
    assert not predictor_of(core).progress


@pytest.mark.slow
@pytest.mark.parametrize("memory", slow_but(["little", "enough"], "little"))
def test_rotations_shifts_and_preemptions_with_an_mtp_layer(memory: str, tmp_path: Path) -> None:
    """The cache holds NaNs until it is written: every key that is read has been computed."""

    def sent() -> list[EngineRequest]:
        shift = ContextRule(overflow="shift", keep_tokens=16)
        yarn = RopeScaling.from_dict({"rope_type": "yarn", "factor": 4.0})
        dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
        rules: list[dict[str, Any]] = [
            {"context": shift, "max_tokens": 150},
            {"rope_scaling": yarn},
            {"rope_scaling": dynamic, "rope_update": "rotate", "max_tokens": 70},
            {"rope_scaling": dynamic, "rope_update": "recompute", "max_tokens": 70},
            {"context": shift, "max_tokens": 150, "temperature": 0.6, "seed": 4},
            {},
        ]
        return [
            greedy(f"{i}", prompt(i, 20), **{"max_tokens": 70, "priority": -i, **rule}) for i, rule in enumerate(rules)
        ]

    directory = make_predicting("qwen3_5_moe", tmp_path, seed=1, max_position_embeddings=64)
    options: dict[str, Any] = {"deterministic": True, "max_model_len": 96, "max_total_tokens": 400, "max_num_seqs": 6}
    want = run(make_core(directory, **options), sent())
    if memory == "little":
        probe = mtp_engine(directory, **options).info
        options["kv_cache_memory"] = 16 * probe.kv_bytes_per_token * 20 + 24 * probe.state_bytes
    core = mtp_engine(directory, **options)
    predictor = predictor_of(core)
    pages = predictor.cache.pages(0)
    pages.key.fill_(torch.nan), pages.value.fill_(torch.nan)
    compute = predictor._run

    def watched(*given: Any) -> tuple[torch.Tensor, Any]:
        hidden, outputs = compute(*given)
        assert bool(hidden.isfinite().all())
        return hidden, outputs

    predictor._run = watched
    same(run_checked(core, sent()), want, 0.0)
    stats = core.stats()
    assert (stats.num_preemptions > 0) is (memory == "little")
    assert stats.context_shifts > 5 and stats.key_moves > 0
    assert stats.spec_decode_model_num_accepted_tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("rows", slow_after(1, [8, 0]))
def test_an_mtp_layer_without_memory_fails_no_request(rows: int, directory_of: DirectoryOf) -> None:
    """Steps with more rows fail, so prompts or all proposals are skipped."""
    directory = directory_of("qwen3_5_moe")
    want = run(make_core(directory, deterministic=True, max_model_len=192), traffic())
    core = mtp_engine(directory, deterministic=True, max_model_len=192)
    layer, failed = predictor_of(core).decoder, list[int]()
    predictor_of(core).replay.max_rows = 0
    forward, waiting = layer.forward, list[int]()

    def with_little_memory(batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        hidden = forward(batch, cache)
        if len(hidden) > rows:
            failed.append(len(hidden))
            waiting.append(max(len(one.states) for one in predictor_of(core).progress.values()))
            raise torch.OutOfMemoryError(NO_ROOM)
        return hidden

    layer.forward = with_little_memory
    same(run_checked(core, traffic()), want, 0.0)
    assert len(failed) > 10 and (core.stats().spec_decode_model_num_accepted_tokens > 10) is (rows > 0)
    assert max(waiting) <= 16 + 4  # a block and the tokens of one step


def test_states_without_memory_fail_no_request(monkeypatch: pytest.MonkeyPatch, directory_of: DirectoryOf) -> None:
    """The model's step is complete by then, and its samples are valid. Missing states are not replaced by older ones."""
    directory = directory_of("qwen3_5")
    sent = [greedy("a", prompt(1, 5), 60), greedy("b", prompt(2, 40), 60)]
    want = run(make_core(directory, deterministic=True), sent)
    core = mtp_engine(directory, deterministic=True, speculative_tokens=3)
    predictor, taken, lacking = predictor_of(core), list[int](), list[int]()
    take, observe = predictor._append_states, predictor.observe

    def with_little_memory(item: ScheduledSequence, *given: Any) -> Any:
        taken.append(item.seq_id)
        if len(taken) % 5 == 0:
            lacking.append(item.seq_id)
            raise torch.OutOfMemoryError(NO_ROOM)
        return take(item, *given)

    def watched(plan: SchedulerOutput, hidden: torch.Tensor) -> None:
        before = len(lacking)
        observe(plan, hidden)
        assert not predictor.progress.keys() & set(lacking[before:])

    monkeypatch.setattr(predictor, "_append_states", with_little_memory)
    monkeypatch.setattr(predictor, "observe", watched)
    same(run(core, sent), want, 0.0)
    assert len(lacking) > 5 and core.stats().spec_decode_model_num_accepted_tokens > 5


def test_models_without_a_usable_mtp_layer_are_refused(tmp_path: Path, directory_of: DirectoryOf) -> None:
    missing = r"speculation\.mtp`: this model .* has no layer that predicts further"
    for family in ("llama", "gemma3", "ernie4_5_moe"):  # the last one's config.json names no MTP layer
        with pytest.raises(LoadError, match=missing):
            mtp_engine(make_model(family, tmp_path / family))
    with pytest.raises(LoadError, match=missing):  # its layer has a window
        mtp_engine(make_multimodal("exaone4_5", tmp_path / "exaone4_5"))
    counted = {"num_nextn_predict_layers": 1}
    for family, begins in (("qwen3_5", "mtp"), ("deepseek_v3", "model.layers.4"), ("ernie4_5_moe", "model.mtp_block")):
        without = make_model(family, tmp_path / f"{family} without", **counted)
        with pytest.raises(
            LoadError, match=rf"speculation\.mtp`: the files contain no layer .* begins with '{begins}\."
        ):
            mtp_engine(without)
    with pytest.raises(LoadError, match=missing):
        mtp_engine(make_model("deepseek_v3", tmp_path / "none", num_nextn_predict_layers=0))
    other_kinds = shutil.copytree(directory_of("nemotron_h_experts"), tmp_path / "kinds")
    with_config(other_kinds, mtp_layers_block_type=["linear_attention", "moe"])
    with pytest.raises(LoadError, match=missing):
        mtp_engine(other_kinds)
    directory = directory_of("qwen3_5")
    weights = load_file(directory / "model.safetensors")
    del weights["mtp.fc.weight"]
    with pytest.raises(LoadError, match=r"tensor 'mtp\.fc\.weight' is missing"):
        mtp_engine(rewritten(directory, tmp_path / "incomplete", weights))
    with pytest.raises(LoadError, match=r"leave one of them out"):
        mtp_engine(directory, tensor_parallel=2)
    with pytest.raises(LoadError, match=r"in place of the draft model .* leave one of them out"):
        mtp_engine(directory, speculative_model=str(directory))
    other = shutil.copytree(directory, tmp_path / "own")
    with_config(other, mtp_use_dedicated_embeddings=True)
    with pytest.raises(LoadError, match=r"has no layer that predicts further tokens, or none that can be used"):
        mtp_engine(other)


def test_the_mtp_layer_shares_embedding_and_head(directory_of: DirectoryOf) -> None:
    core = mtp_engine(directory_of("qwen3_5"), quantization="int8", speculative_tokens=2)
    layer, model = predictor_of(core).decoder, core.runner.decoder
    assert layer.embedding is model.embedding and layer.head is model.head
    assert not {"embedding", "head"} & set(layer.weights())
    assert layer.weights()["joined"].shape == (64, 128)
    draft = core.info.draft_model
    assert draft is not None and (draft.num_tokens, draft.path) == (2, "")
    assert draft.architecture == "prediction layer of Qwen3_5ForCausalLM"


def test_an_unused_mtp_layer_is_announced(tmp_path: Path, directory_of: DirectoryOf) -> None:
    def offers(directory: Path, **options: Any) -> bool:
        return any("`scheduling.speculation.mtp`" in notice for notice in make_core(directory, **options).info.notices)

    assert offers(directory_of("qwen3_5"))
    assert not offers(directory_of("qwen3_5"), speculative_mtp=True)
    assert not offers(directory_of("qwen3_5"), speculative_ngram=4)
    assert not offers(make_model("qwen3_5", tmp_path / "without"))


@pytest.mark.slow
@pytest.mark.parametrize("tied", slow_after(1, [False, True]))
def test_a_quantized_copy_of_the_head_changes_no_result(tied: bool, tmp_path: Path) -> None:
    """Proposals are often accepted, rejected ones change nothing, and the model's own head is unchanged."""
    directory = make_predicting("qwen3_5_moe", tmp_path, seed=1, tie_word_embeddings=tied, hidden_size=128)
    sent = [greedy("a", prompt(1, 5), 60), greedy("b", prompt(2, 40), 60)]
    want = run(make_core(directory, deterministic=True), sent)
    found = []
    for quantization in ("none", "int8", "int4"):
        core = mtp_engine(directory, deterministic=True, speculative_model_quantization=quantization)
        same(run(core, sent), want, 0.0)
        layer, model = predictor_of(core).decoder, core.runner.decoder
        assert (layer.head is model.head) is (quantization == "none") and isinstance(model.head, torch.Tensor)
        if quantization != "none":
            assert isinstance(layer.head, BlockWeight) and layer.head.shape == (128, 128)
        found.append(core.stats().spec_decode_model_num_accepted_tokens)
    assert min(found) > 0.7 * found[0] > 10
