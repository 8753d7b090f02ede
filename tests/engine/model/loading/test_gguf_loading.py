"""Models in GGUF files: weights equal the numbers of the file, logits equal a model of these numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import engine_config
from helpers.engines import greedy, make_core, run, specs_of
from helpers.gguf_models import QUANTIZED_BY_PACKAGE, WIDE, GgufModel, make_gguf
from helpers.tiny_models import FAMILIES, Reference, make_model
from safetensors.torch import load_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.preflight import check_start
from windlass.kernels import BlockWeight, PanelWeight, StackedWeight, Weight

TOLERANCE = 1e-5  # of the largest reference logit, without rounding
ROUNDED = 0.05  # of their norm, for rows rounded to 8 bits: these models amplify differences
EXACT: dict[str, Any] = {"dtype": "float32", "activations": "float32"}
BLOCKS = (*QUANTIZED_BY_PACKAGE, "Q4_K", "Q5_K", "Q6_K")
IDS = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()


def as_q4_k_m(name: str) -> str:
    """Several types in one file, as in published ones: v differs from q and k, the embedding from all."""
    for part, kind in (("embed_tokens", "Q6_K"), ("lm_head", "Q6_K"), ("v_proj", "Q6_K"), ("down_proj", "Q5_K")):
        if part in name:
            return kind
    return "F16" if "o_proj" in name else "Q4_K"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), **WIDE)


def assert_same_logits(core: EngineCore, plain: Path, tolerance: float | None = TOLERANCE) -> None:
    request = greedy("a", IDS, 6)
    result = run(core, [request])["a", 0]
    names = [group.name for group in core.runner.decoder.spec.rotary_groups]
    reference = Reference(plain, specs_of(core, request), names).logits(IDS + result.token_ids)
    want, got = reference[len(IDS) - 1 : -1], torch.stack(result.logits)
    if tolerance is not None:
        assert (got - want).abs().max() < tolerance * want.abs().max()
    else:
        assert 0 < (got - want).norm() < ROUNDED * want.norm()


def numbers_of(weight: Weight) -> torch.Tensor:
    if isinstance(weight, StackedWeight):
        return torch.cat([numbers_of(part) for part in weight.parts])
    if isinstance(weight, BlockWeight):
        return weight.dequantize()
    return (weight.unpack() if isinstance(weight, PanelWeight) else weight).float()


def assert_same_numbers(got: Path, want: Path, **options: Any) -> None:
    """Assert equal bits of every weight of the model."""
    mine, theirs = (
        load_model(engine_config(d, device="cpu", **o)).decoder
        for d, o in ((got, options), (want, {"dtype": "float32"}))
    )
    for (name, weight), other in zip(mine.weights().items(), theirs.tensors(), strict=True):
        assert torch.equal(numbers_of(weight), numbers_of(other)), name


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", [*BLOCKS, "F16", "BF16", "F32"])
def test_every_type_has_the_numbers_of_the_file(kind: str, interleaved: bool, llama: Path, tmp_path: Path) -> None:
    made = make_gguf(llama, tmp_path / "made", lambda name: kind, interleaved=interleaved)
    assert_same_numbers(made.derived, made.plain)
    core = make_core(made.derived, **EXACT)
    assert_same_logits(core, made.plain)
    assert core.info.quantization == f"GGUF {kind}"
    weight = core.runner.decoder.layers[0].mixer.weights.qkv
    assert isinstance(weight, BlockWeight) == (kind in BLOCKS)
    if isinstance(weight, BlockWeight):
        assert weight.form.name == kind.lower()
        assert_same_logits(make_core(made.derived), made.plain, None)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_the_numbers_of_the_file(family: str, tmp_path: Path) -> None:
    source = make_model(family, tmp_path / "source", **{**WIDE, **of_family(family)})
    gemma, llama = family == "gemma3", family.startswith("llama")
    made = make_gguf(source, tmp_path / "made", as_q4_k_m, interleaved=llama, norms_with_offset=gemma)
    assert_same_numbers(made.derived, made.plain)
    assert_same_logits(make_core(made.derived, **EXACT), made.plain)
    core = make_core(made.derived)
    assert_same_logits(core, made.plain, None)
    layer = core.runner.decoder.layers[0].mixer.weights
    if family != "phi3":  # whose q, k and v are one tensor
        assert isinstance(layer.qkv, StackedWeight)
        assert [part.form.name for part in layer.qkv.parts if isinstance(part, BlockWeight)] == ["q4_k", "q6_k"]
    assert core.info.quantization is not None and core.info.quantization.startswith("GGUF ")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K"])
def test_per_layer_embeddings_are_gathered_from_blocks(kind: str, tmp_path: Path) -> None:
    source = make_model(
        "gemma4_e2b",
        tmp_path / "source",
        **{**WIDE, "num_hidden_layers": 6, "attention_bias": False, "hidden_size_per_layer_input": 256},
    )
    made = make_gguf(source, tmp_path / "made", lambda name: kind if "per_layer" in name else as_q4_k_m(name))
    assert_same_numbers(made.derived, made.plain)
    core = make_core(made.derived, **EXACT)
    assert_same_logits(core, made.plain)
    table = core.runner.decoder.weights()["layer_inputs_table"]
    assert isinstance(table, BlockWeight) and table.form.name == kind.lower()
    assert_same_logits(make_core(made.derived), made.plain, None)


def of_family(family: str) -> dict[str, Any]:
    """Return the settings that a family needs in addition to wider matrices."""
    if family == "gemma3":
        return {"num_hidden_layers": 4}
    return {"max_window_layers": 1} if family == "qwen2" else {}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compiled", [True, False])
def test_deterministic_bits_are_equal_in_batches_and_chunks(
    compiled: bool, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("windlass.kernels.cpu.library.unavailable_reason", lambda: "none here")
    made = make_gguf(llama, tmp_path / "made", as_q4_k_m, interleaved=True)
    sent = [greedy(str(i), IDS[: 5 + 6 * i], 5) for i in range(4 if compiled else 2)]
    for activations in ("int8", "float32"):
        options: dict[str, Any] = {"deterministic": True, "prefix_caching": False, "activations": activations}
        alone = {}
        for request in sent:
            alone |= run(make_core(made.derived, **options), [request])
        for budget in (2048, 7):
            together = run(make_core(made.derived, max_num_batched_tokens=budget, **options), sent)
            for key, result in together.items():
                assert torch.equal(torch.stack(result.logits), torch.stack(alone[key].logits)), (activations, key)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "F16"])
def test_memory_equals_the_file_size(kind: str, tmp_path: Path) -> None:
    source = make_model("llama", tmp_path / "source", **WIDE, vocab_size=2048)
    made = make_gguf(source, tmp_path / "made", lambda name: kind)
    config = engine_config(made.derived, device="cpu")
    loaded = load_model(config).decoder.weight_bytes()
    assert loaded < 1.1 * made.file.stat().st_size
    assert loaded > 0.9 * made.file.stat().st_size  # otherwise something is not counted


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "TQ2_0"])
def test_types_without_a_product_are_stored_with_8_bits(kind: str, llama: Path, tmp_path: Path) -> None:
    made = make_gguf(llama, tmp_path / "made", lambda name: kind if "mlp" in name else "Q8_0")
    core = make_core(made.derived, **EXACT)
    (notice,) = (line for line in core.info.notices if "GGUF" in line)
    assert f"{kind} (6 tensors)" in notice and "q8_0" in notice and "\n" not in notice
    weight = core.runner.decoder.layers[0].feed_forward.weights.gate_up
    assert isinstance(weight, BlockWeight) and weight.form.name == "q8_0"
    want = load_file(made.plain / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    got = weight.dequantize()[: len(want)].cpu()
    assert 0 < (got - want).norm() < 0.01 * want.norm()
    assert_same_logits(core, made.plain, None)


def test_gpu_has_the_blocks_of_the_file(llama: Path, tmp_path: Path) -> None:
    from windlass.engine.model.loading import preflight

    made = make_gguf(llama, tmp_path / "made", as_q4_k_m, interleaved=True)
    config = engine_config(made.derived, dtype="bfloat16")
    gpu, cpu = (
        preflight.prepare_model(config, preflight.DeviceCapabilities(device, device == "cpu"))
        for device in ("cuda", "cpu")
    )
    assert gpu.plan == cpu.plan and gpu.quantization == cpu.quantization is not None and gpu.notices == ()
    assert gpu.cache_dtype == "bfloat16"  # rows are multiplied with the blocks unchanged there


def test_quantized_file_is_not_quantized_again(llama: Path, tmp_path: Path) -> None:
    made = make_gguf(llama, tmp_path / "made", as_q4_k_m)
    for device in ("cpu", "auto"):
        with pytest.raises(
            LoadError, match=r"quantized already \(.*Q4_K.*leave `compute\.quantization=int8` out"
        ) as error:
            check_start(engine_config(made.derived, quantization="int8", device=device))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_plain_file_can_be_quantized(kind: str, llama: Path, tmp_path: Path) -> None:
    made = make_gguf(llama, tmp_path / "made", lambda name: kind, interleaved=True)
    core = make_core(made.derived, quantization="int4", **EXACT)
    assert core.info.quantization is not None and core.info.quantization.startswith("int4 (q5_k, ")
    mine, theirs = (
        load_model(engine_config(d, device="cpu", quantization="int4")).decoder for d in (made.derived, made.plain)
    )
    for weight, other in zip(mine.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(numbers_of(weight), numbers_of(other))


# Errors of files

Edit = Callable[[dict[str, Any]], None]


def edited(made: GgufModel, edit: Edit) -> Path:
    path = made.derived / "gguf.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
    return made.derived


def remove(name: str) -> Edit:
    return lambda index: index["tensors"].pop(name)


def put(name: str, **values: Any) -> Edit:
    return lambda index: index["tensors"].setdefault(name, dict(index["tensors"]["model.norm.weight"])).update(values)


def rename(old: str, new: str) -> Edit:
    return lambda index: index["tensors"].update({new: index["tensors"].pop(old)})


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (remove(UP), f"tensor '{UP}' is missing"),
        (put("model.layers.0.mlp.swirl.weight"), r"unexpected tensor 'model\.layers\.0\.mlp\.swirl\.weight'"),
        (put(UP, shape=[256, 512]), r"has shape \[256, 512\] where config\.json asks for \[512, 256\]"),
        (put(UP, shape=[512, 512]), "does not have the bytes it needs"),
        (put(UP, shape=[1024, 128]), "does not have the bytes it needs"),
        (put(UP, type="Q8_K"), "has the type Q8_K, which cannot be read"),
        (put(UP, begin=-5), "is damaged: remove"),
        (put(UP, end=1 << 60), "is damaged: remove"),
        (put(UP, file=3), "is damaged: remove"),
        (lambda index: index.update(version=2), "is damaged: remove"),
        (lambda index: index.update(tensors=[1]), "is damaged: remove"),
        (lambda index: index["files"][0].update(size=7), "has changed since it was read: start again"),
        (lambda index: index["files"][0].update(path="/nowhere/x.gguf"), "cannot be read any more.*start again"),
    ],
)
def test_inconsistent_index_is_refused(edit: Edit, says: str, llama: Path, tmp_path: Path) -> None:
    derived = edited(make_gguf(llama, tmp_path / "made", as_q4_k_m), edit)
    with pytest.raises(LoadError, match=says) as error:
        make_core(derived)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [lambda p: p.unlink(), lambda p: p.write_bytes(b"x"), lambda p: os.utime(p, (1, 1))])
def test_missing_or_changed_file_is_reported(change: Callable[[Path], None], llama: Path, tmp_path: Path) -> None:
    made = make_gguf(llama, tmp_path / "made", lambda name: "Q4_0")
    change(made.file)
    with pytest.raises(LoadError, match=r"model\.gguf.*start again"):
        check_start(engine_config(made.derived))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("kind", [*BLOCKS, "IQ4_NL", "F16"])
def test_non_finite_numbers_are_refused_by_name(kind: str, llama: Path, tmp_path: Path) -> None:
    made = make_gguf(llama, tmp_path / "made", lambda name: kind)
    entry = json.loads((made.derived / "gguf.json").read_text())["tensors"][UP]
    place = {"Q6_K": entry["end"] - 2}.get(kind, entry["begin"])
    for value in (0x7C00, 0xFC00, 0x7E01):
        stat = made.file.stat()
        with made.file.open("r+b") as file:
            file.seek(place)
            file.write(value.to_bytes(2, "little"))
        os.utime(made.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(LoadError, match=rf"tensor '{UP}' contains numbers that are NaN or infinite"):
            make_core(made.derived)


@pytest.mark.parametrize("equal", [True, False])
def test_saved_head_must_equal_the_tied_embedding(equal: bool, tmp_path: Path) -> None:
    source = make_model("llama_bias", tmp_path / "source", **WIDE)
    made = make_gguf(source, tmp_path / "made", lambda name: "Q6_K")
    tensors = json.loads((made.derived / "gguf.json").read_text())["tensors"]
    other = tensors["model.embed_tokens.weight" if equal else "model.layers.0.self_attn.q_proj.weight"]
    derived = edited(made, lambda index: index["tensors"].update({"lm_head.weight": other}))
    if equal:
        make_core(derived)
    else:
        with pytest.raises(LoadError, match="tie_word_embeddings"):
            make_core(derived)


def test_weight_cache_distinguishes_files(llama: Path, tmp_path: Path) -> None:
    first, second = (
        load_model(engine_config(make_gguf(llama, tmp_path / kind, lambda name, k=kind: k).derived, device="cpu"))
        for kind in ("Q4_0", "Q8_0")
    )
    assert first.digest != second.digest
