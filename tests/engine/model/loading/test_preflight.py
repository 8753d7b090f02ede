"""Preflight: predicted sizes equal allocations, and models that do not fit are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import engine_config
from helpers.tiny_models import FAMILIES, make_model
from safetensors.torch import load_file, save_file

from windlass import kernels
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.cache.kv_cache_budget import bytes_per_token, plan_cache
from windlass.engine.cache.kv_cache_spec import KVGroupSpec
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.model.loading import preflight
from windlass.engine.model.loading.checkpoint import describe_other_format
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.model_description import ModelDescription, describe_model
from windlass.engine.model.loading.preflight import (
    DeviceCapabilities,
    ModelToLoad,
    check_memory,
    check_start,
    prepare_model,
)
from windlass.engine.model.weight_storage import plan_bytes, plan_storage, total_weight_bytes
from windlass.kernels import select_backend

DEMO = Path(__file__).parents[4] / "models" / "demo"
GIB = 1 << 30


@pytest.fixture(scope="module")
def demo() -> ModelDescription:
    return describe_model(engine_config(DEMO))


def size_of(model: ModelDescription, dtype: str = "float32", quantization: str = "none") -> int:
    return total_weight_bytes(model.spec, plan_storage(model.spec, dtype, quantization), dtype)


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (lambda name: name.removeprefix("model.").replace("lm_head", "dense"), "without its language-model head"),
        (lambda name: f"language_{name}", "of a multimodal model"),
        (lambda name: name.replace(".weight", ".qweight"), r"quantized \(GPTQ or AWQ\), but its config.json has no"),
        (lambda name: name.replace("norm.weight", "norm.weight_scale_inv"), r"quantized \(FP8\), but"),
        (
            lambda name: name.replace("norm.weight", "norm.SCB"),
            r"quantized \(bitsandbytes\).*`compute.quantization=int8`",
        ),
    ],
)
def test_roles_follow_from_tensor_names(rename: Callable[[str], str], says: str, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    tensors = {rename(name): tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=says):
        check_start(engine_config(model))


def test_preflight_imports_no_torch() -> None:
    code = (
        "import sys\nfrom windlass.engine.interface.config import EngineConfig\n"
        "from windlass.engine.model.loading.preflight import check_start\n"
        f"check_start(EngineConfig(model={str(DEMO)!r}))\n"
        "print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_passes(family: str, tmp_path: Path) -> None:
    check_start(engine_config(str(make_model(family, tmp_path / family))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("dim", [16, 18, 63, 128])
def test_bytes_per_token_equal_the_allocated_cache(dtype: str, dim: int) -> None:
    group = KVGroupSpec(layers=(0, 1, 2), num_kv_heads=5, head_dim=dim, window=None)
    storage = KVCache([group], [7], 32, getattr(torch, dtype), select_backend("cpu"))
    pages = [storage.pages(layer) for layer in group.layers]
    planes = [plane for page in pages for plane in (page.key, page.value, page.key_scale, page.value_scale)]
    assert bytes_per_token(group, dtype) * 7 * 32 == sum(plane.nbytes for plane in planes if plane is not None)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("family", ["llama", "llama_bias", "gemma3", "phi3"])
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_predicted_weight_bytes_equal_the_allocation(family: str, options: dict[str, str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16, "vocab_size": 512}
    config = engine_config(str(make_model(family, tmp_path / "model", **sizes)), device="cpu", **options)
    decoder = load_model(config).decoder
    assert plan_bytes(decoder.spec, decoder.plan) == sum(t.nbytes for t in decoder.tensors() if len(t.shape) > 1)
    assert total_weight_bytes(decoder.spec, decoder.plan, options.get("dtype", "float32")) == decoder.weight_bytes()


def check(model: ModelDescription, free: int | None, stored: str = "float32", **options: object) -> None:
    config = engine_config(DEMO, **options)  # type: ignore[arg-type]
    cached = "float32" if config.cache.dtype == "auto" else config.cache.dtype
    plan = plan_storage(model.spec, stored)
    check_memory(
        config, ModelToLoad(model, stored, stored, cached, False, plan), DeviceCapabilities("cpu", True, free=free)
    )


def refusal(model: ModelDescription, free: int | None, stored: str = "float32", **options: object) -> str:
    with pytest.raises(LoadError) as error:
        check(model, free, stored, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_too_large_weights_name_options_that_fit(demo: ModelDescription) -> None:
    whole, half, quarter = (size_of(demo, *how) for how in (("float32",), ("bfloat16",), ("float32", "int4")))
    said = refusal(demo, whole - 1)
    assert "`compute.dtype=bfloat16` (" in said
    assert "`compute.quantization=int8` (" in said and "`compute.quantization=int4` (" in said
    assert "the weights need 15.3 MiB of memory, 15.3 MiB are free" in said
    said = refusal(demo, half - 1)
    assert "compute.dtype" not in said and "`compute.quantization=int8`" in said
    assert refusal(demo, quarter - 1).endswith("use a smaller model or free some memory")
    assert "compute.dtype" not in refusal(demo, half - 1, "bfloat16")
    check(demo, 4 * whole)


@pytest.mark.parametrize(
    ("options", "cached"),
    [
        ({}, "float32"),
        ({"quantization": "int8"}, "float16"),
        ({"quantization": "int4"}, "float16"),
        ({"quantization": "int8", "kv_cache_dtype": "float32"}, "float32"),
        ({"quantization": "int8", "kv_cache_dtype": "int8"}, "int8"),
        ({"quantization": "int8", "activations": "float32"}, "float32"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "bfloat16"),
    ],
    ids=str,
)
def test_quantized_models_cache_in_float16(options: dict[str, str], cached: str) -> None:
    for narrow in (True, False):  # without compiled kernels nothing is rounded to 8 bits
        prepared = prepare_model(engine_config(DEMO, **options), DeviceCapabilities("cpu", narrow))
        assert prepared.cache_dtype == (cached if narrow or cached != "float16" else "float32")


@pytest.mark.parametrize(
    ("options", "computed", "cached"),
    [
        ({}, "bfloat16", "bfloat16"),
        ({"kv_cache_dtype": "int8"}, "bfloat16", "int8"),
        ({"dtype": "float32"}, "float32", "float32"),
        ({"deterministic": True}, "float32", "float32"),
        ({"quantization": "int8"}, "float32", "float16"),
    ],
    ids=str,
)
def test_auto_dtype_is_bfloat16_if_the_processor_supports_it(
    options: dict[str, Any], computed: str, cached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def types(multiplies_narrow: bool) -> tuple[str, str, bool]:
        config = engine_config(DEMO, **options)
        found = prepare_model(config, DeviceCapabilities("cpu", True, multiplies_narrow))
        return found.compute_dtype, found.cache_dtype, preflight.BFLOAT16_NOTICE in found.notices

    assert types(True)[0] == "float32"  # small models gain nothing
    monkeypatch.setattr(preflight, "_LEAST_ROUNDED", 1 << 20)
    assert types(True) == (computed, cached, computed == "bfloat16")
    assert types(False)[0] == "float32"


def test_auto_dtype_is_float32_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_LEAST_ROUNDED", 1)
    for family, dtype, expected in (
        ("llama", torch.bfloat16, "bfloat16"),
        ("llama", torch.float16, "float32"),  # float32 numbers would be rounded
        ("mixtral", torch.bfloat16, "float32"),
        ("gemma4_e2b", torch.bfloat16, "bfloat16"),
        ("gemma4_26b", torch.bfloat16, "float32"),  # experts in parallel with the feed-forward
    ):
        model = make_model(family, tmp_path / f"{family}-{dtype}")
        weights = {name: tensor.to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}
        save_file(weights, model / "model.safetensors", {"format": "pt"})
        prepared = prepare_model(engine_config(model), DeviceCapabilities("cpu", True, True))
        assert prepared.compute_dtype == expected
    monkeypatch.setattr(kernels, "has_native_bf16", lambda device: True)
    loaded = load_model(engine_config(tmp_path / "llama-torch.bfloat16", device="cpu"))
    assert loaded.cache_dtype == torch.bfloat16 and preflight.BFLOAT16_NOTICE in loaded.notices


def test_cache_must_fit_in_memory_with_the_weights(demo: ModelDescription) -> None:
    length, sequences = 1 << 20, 4
    needed = length * sequences * bytes_per_token(demo.spec.kv_groups[0], "float32")
    weights = size_of(demo)
    options = {"max_model_len": length, "max_num_seqs": sequences, "kv_cache_memory": needed}
    said = refusal(demo, needed + weights - 1, **options)
    assert said.startswith("the KV cache needs 16.0 GiB of memory, 16.0 GiB are free, 15.3 MiB of it for the weights: ")
    assert "`cache.dtype=int8`" in said and "int8" not in refusal(demo, GIB, kv_cache_dtype="int8", **options)
    check(demo, needed + weights, **options)
    check(demo, None, **options)  # free memory is unknown


def test_only_helpful_options_are_named(demo: ModelDescription) -> None:
    """1 M tokens need 4 GiB in float32 and 1.1 GiB in int8."""
    said = refusal(demo, 10 * GIB, max_model_len=1 << 20, kv_cache_memory=GIB)
    assert "it needs 4.0 GiB of KV cache, but only 1.0 GiB are available, which hold 262144 tokens" in said
    assert "raise `cache.memory` or lower `max_model_len` or use `cache.dtype=int8`" in said
    said = refusal(demo, 2 * GIB, max_model_len=1 << 20)
    assert "raise" not in said and said.endswith("lower `max_model_len` or use `cache.dtype=int8`")
    said = refusal(demo, GIB, max_model_len=1 << 20)
    assert said.endswith("tokens: lower `max_model_len`")


def test_configured_cache_memory_is_used_for_prefixes(demo: ModelDescription, tmp_path: Path) -> None:
    """Even more than running sequences can hold. The default does not fill the memory."""

    def blocks(model: ModelDescription, **options: Any) -> tuple[int, ...]:
        config = engine_config(str(DEMO), max_model_len=512, max_num_seqs=4, **options)
        return plan_cache(config, model.spec.kv_groups, model.spec.trained_len, "float32", 32 << 20).num_blocks

    running, named = 4 * 512 // 16, (32 << 20) // (16 * bytes_per_token(demo.spec.kv_groups[0], "float32"))
    assert named == 4 * running
    assert blocks(demo, kv_cache_memory=32 << 20) == (named,)
    assert blocks(demo) == blocks(demo, kv_cache_memory=32 << 20, prefix_caching=False) == (running,)
    windows = describe_model(engine_config(make_model("gemma3", tmp_path / "gemma", sliding_window=64)))
    assert max(blocks(windows, kv_cache_memory=32 << 20)) == running


def test_windows_of_many_sequences_need_blocks(tmp_path: Path) -> None:
    model = make_model("gemma3", tmp_path / "gemma", sliding_window=64)
    spec = describe_model(engine_config(model)).spec
    options = {"max_model_len": 4096, "max_num_batched_tokens": 64}
    few, many = (engine_config(model, max_num_seqs=n, **options) for n in (1, 64))  # type: ignore[arg-type]
    budget = plan_cache(few, spec.kv_groups, spec.trained_len, "float32", GIB).num_bytes
    assert plan_cache(few, spec.kv_groups, spec.trained_len, "float32", budget).max_model_len == 4096
    with pytest.raises(LoadError, match=r"lower `max_model_len` or `scheduling\.max_num_seqs`"):
        plan_cache(many, spec.kv_groups, spec.trained_len, "float32", budget)


def test_failing_cache_allocation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocation fails although the free memory appeared sufficient."""
    monkeypatch.setattr("windlass.engine.model.loading.device_selection.available_memory", lambda: None)
    config = engine_config(
        str(DEMO), device="cpu", kv_cache_memory=1 << 50, max_num_seqs=1 << 16, max_model_len=1 << 26
    )
    with pytest.raises(LoadError, match=r"the KV cache needs .* GiB of memory, more than cpu has.*`cache.memory`") as e:
        EngineCore(config)
    assert "\n" not in str(e.value)


def test_commands_for_conversion_are_quoted_for_a_shell(tmp_path: Path) -> None:
    for name in ("plain", "it's $HOME", 'a "b"'):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "pytorch_model.bin").touch()
        said = describe_other_format(directory)
        assert said is not None
        command = said[said.index("python -c") :].replace("python -c", "printf %s", 1)
        code = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert repr(str(directory)) in code and repr(f"{name}-safetensors") in code
        compile(code, "command", "exec")


def test_training_files_are_not_weights(tmp_path: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt"):
        (tmp_path / name).touch()
    assert describe_other_format(tmp_path) is None


def test_processor_features_are_known_without_kernels() -> None:
    assert preflight.processor_multiplies_bfloat16() == kernels.has_native_bf16("cpu")
