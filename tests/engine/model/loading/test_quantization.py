"""Quantized models: similar to the unquantized one, with equal bits in any batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import engine_config
from helpers.cpu_kernels import kernels
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import FAMILIES as TINY_FAMILIES
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file

import windlass
from windlass.engine.core.engine_builder import cache_namespace
from windlass.engine.errors import LoadError
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.engine.model.loading.weights import head_order
from windlass.kernels import BlockWeight, StackedWeight
from windlass.lab.scoring import Scorer

DEMO = Path(windlass.__file__).parent / "models" / "demo"
FAMILIES = ("llama", "llama_bias", "glm", "phi3", "gemma3", "hunyuan")
WIDTHS = ("int8", "int4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(family, root / family) for family in FAMILIES}


def whole_logits(directory: Path, ids: list[int], **options: Any) -> torch.Tensor:
    loaded = load_model(engine_config(directory, device="cpu", **options))
    scorer = Scorer(loaded.decoder, loaded.cache_dtype)
    with torch.inference_mode():
        return scorer.logits(ids, scorer.plan(len(ids)))


def dequantized(weight: BlockWeight | StackedWeight) -> torch.Tensor:
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    return torch.cat([part.dequantize() for part in parts if isinstance(part, BlockWeight)])


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_stored_in_its_rows(models: dict[str, Path], family: str, width: str) -> None:
    """Dequantized weights equal the plain matrices up to rounding: fused rows, order and ties."""
    plain, packed = (
        load_model(engine_config(str(models[family]), device="cpu", dtype="float32", **extra)).decoder
        for extra in ({}, {"quantization": width})
    )
    assert [one.numel() for one in packed.tensors()] == [one.numel() for one in plain.tensors()]
    for stored, theirs in zip(packed.tensors(), plain.tensors(), strict=True):
        ours = dequantized(stored) if isinstance(stored, BlockWeight | StackedWeight) else stored
        assert ours.shape == theirs.shape
        if ours.dim() == 1:
            assert torch.equal(ours, theirs)
        else:
            assert (ours - theirs).norm() <= (0.01 if width == "int8" else 0.1) * theirs.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_logits_are_near_float32(models: dict[str, Path], family: str) -> None:
    ids = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    want = whole_logits(models[family], ids, dtype="float32")
    got = whole_logits(models[family], ids, dtype="float32", quantization="int8")
    assert not torch.equal(got, want)
    assert (got - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("width", WIDTHS)
def test_quantized_demo_model_writes_text(width: str) -> None:
    text = torch.randint(3, 4096, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    want = whole_logits(DEMO, text).log_softmax(-1)
    got = whole_logits(DEMO, text, quantization=width).log_softmax(-1)
    divergence = (want.exp() * (want - got)).sum(-1).mean()
    assert 0 < divergence < (0.005 if width == "int8" else 0.1)
    core = make_core(DEMO, quantization=width)
    assert core.info.quantization == {"int8": "int8 (q8_0)", "int4": "int4 (q5_k, q8_0, q4_k, q6_k)"}[width]
    result = run(core, [greedy("a", text[:20], 12)])["a", 0]
    assert len(result.token_ids) == 12


def logits_of(finished: dict[tuple[str, int], Finished]) -> dict[str, torch.Tensor]:
    return {name: torch.stack(result.logits) for (name, _), result in finished.items()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_deterministic_bits_are_equal_in_batches_and_chunks(
    models: dict[str, Path], width: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("windlass.kernels.cpu.library.unavailable_reason", lambda: "none here")
    generator = torch.Generator().manual_seed(3)
    sent = [
        greedy(str(i), torch.randint(3, 128, (5 + 7 * i,), generator=generator).tolist(), 6)
        for i in range(6 if compiled else 3)
    ]
    options: dict[str, Any] = {"quantization": width, "deterministic": True, "prefix_caching": False}
    alone = {}
    for request in sent:
        alone |= logits_of(run(make_core(models["llama_bias"], **options), [request]))
    for budget in (2048, 7):
        together = logits_of(run(make_core(models["llama_bias"], max_num_batched_tokens=budget, **options), sent))
        assert all(torch.equal(together[name], alone[name]) for name in alone)


@pytest.mark.parametrize("width", WIDTHS)
def test_dummy_weights(models: dict[str, Path], width: str) -> None:
    (models["llama"] / "empty").mkdir(exist_ok=True)
    core = make_core(models["llama"], load_format="dummy", quantization=width)
    decoder = core.runner.decoder
    weight = decoder.layers[0].feed_forward.weights.down
    assert isinstance(weight, BlockWeight)
    values = weight.dequantize()
    assert float(values.std()) == pytest.approx((1 / weight.columns) ** 0.5, rel=0.1)
    assert abs(float(values.mean())) < 0.05 * float(values.std())
    assert len(torch.unique(weight.codes)) > 200
    assert weight.form.name == ("q8_0" if width == "int8" else "q5_k")
    assert all(row.isfinite().all() for row in run(core, [greedy("a", [5, 6, 7], 4)])["a", 0].logits)


def test_memory_shrinks() -> None:
    sizes = [
        load_model(engine_config(DEMO, device="cpu", quantization=q)).decoder.weight_bytes()
        for q in ("none", "int8", "int4")
    ]
    assert sizes[1] < 0.54 * sizes[0]
    assert sizes[2] < sizes[1]


def test_prefix_blocks_of_another_width_are_separate(models: dict[str, Path]) -> None:
    loaded = [load_model(engine_config(str(models["llama"]), quantization=q)) for q in ("none", "int8", "int4")]
    assert len({cache_namespace(model) for model in loaded}) == 3


@pytest.mark.parametrize("equal", [True, False])
def test_saved_head_must_equal_the_tied_embedding(tmp_path: Path, equal: bool) -> None:
    directory = make_model("llama_bias", tmp_path / "tied")
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if not equal:
        head[7] *= 1.5
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
    if equal:
        make_core(directory, quantization="int8")
    else:
        with pytest.raises(LoadError, match="tie_word_embeddings"):
            make_core(directory, quantization="int8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_gpu_has_the_same_blocks(models: dict[str, Path], quantization: str) -> None:
    config = engine_config(str(models["llama"]), quantization=quantization)
    gpu, cpu = (prepare_model(config, DeviceCapabilities(device, device == "cpu")) for device in ("cuda:1", "cpu"))
    assert gpu.plan == cpu.plan and gpu.quantization == cpu.quantization
    with pytest.raises(LoadError, match=r"on cuda: use .*`compute\.quantization=int8`"):
        prepare_model(engine_config(str(models["llama"])), DeviceCapabilities("cuda:1", False, free=300_000))


def test_unsupported_options_are_refused_with_a_remedy(models: dict[str, Path]) -> None:
    with pytest.raises(LoadError, match="use none, int8 or int4"):
        make_core(models["llama"], quantization="int3")


def test_kernels_are_compiled_here() -> None:
    """Otherwise the tests above compare the reference with itself."""
    kernels()


def as_an_ordinary_model(source: Path, decoder: Decoder, target: Path) -> Path:
    """Save the dequantized weights of a decoder as a Hugging Face directory."""
    saved = load_file(source / "model.safetensors")
    weights = decoder.weights()
    for spec in decoder.spec.weights():
        weight, first = weights[spec.name], 0
        if not isinstance(weight, (BlockWeight, StackedWeight)):
            continue
        parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
        numbers = torch.cat([part.dequantize() for part in parts if isinstance(part, BlockWeight)]).cpu()
        for stored in spec.stored:
            rows, first = numbers[first : first + stored.rows], first + stored.rows
            if stored.rotary is not None:
                order = head_order(stored.rotary)
                rows = rows[torch.cat((order, torch.arange(len(order), stored.rows))).argsort()]
            saved[stored.name] = rows.contiguous()
    target.mkdir()
    shutil.copy(source / "config.json", target)
    save_file(saved, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("family", sorted(TINY_FAMILIES))
def test_logits_equal_transformers_with_the_quantized_weights(family: str, width: str, tmp_path: Path) -> None:
    """Within 1e-5 of the largest logit if rows are not rounded, otherwise similar."""
    source = make_model(family, tmp_path / "source")
    core = make_core(source, quantization=width, dtype="float32", activations="float32")
    plain = as_an_ordinary_model(source, core.runner.decoder, tmp_path / "plain")
    ids = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    request = greedy("a", ids, 5)
    result = run(core, [request])["a", 0]
    names = [group.name for group in core.runner.decoder.spec.rotary_groups]
    want = Reference(plain, specs_of(core, request), names).logits(ids + result.token_ids)[len(ids) - 1 : -1]
    got = torch.stack(result.logits)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    rounded = run(make_core(source, quantization=width, dtype="float32"), [request])["a", 0].logits[0]
    assert 0 < (rounded - want[0]).norm() < 0.1 * want[0].norm()
