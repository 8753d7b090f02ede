"""Steps of tiny models on Triton programs, interpreted, against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import save_adapter
from helpers.device import DEVICE
from helpers.engines import Finished, greedy, make_core, run
from helpers.gguf_models import make_gguf
from helpers.marks import slow_but
from helpers.tiny_models import make_model
from kernels_helpers.interpreted import QUIET

from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.kernels import BlockWeight, backend_selector
from windlass.kernels.triton.triton_backend import TritonBackend

pytestmark = QUIET
KIND = DEVICE.partition(":")[0]
PROMPT = torch.randint(3, 128, (7,), generator=torch.Generator().manual_seed(0)).tolist()


def results(directory: Path, requests: list[Any], **options: Any) -> dict[tuple[str, int], Finished]:
    core = make_core(directory, **options)
    found = run(core, requests)
    found["backend", 0] = Finished(outputs=[type(core.runner.decoder.backend)])  # type: ignore[list-item]
    return found


def check(
    directory: Path, requests: list[Any], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[tuple[str, int], Finished]:
    """Compare both backends, and return the results of Triton."""
    monkeypatch.setattr(backend_selector, "_NATIVE_BACKENDS", {})
    plain = results(directory, requests, **options)
    own = backend_selector._NativeBackend(lambda options: None, backend_selector._triton, narrow=False)
    monkeypatch.setattr(backend_selector, "_NATIVE_BACKENDS", {KIND: own})
    found = results(directory, requests, **options)
    assert found.pop(("backend", 0)).outputs == [TritonBackend]
    for key, one in found.items():
        assert one.token_ids == plain[key].token_ids
        logits, expected = torch.stack(one.logits), torch.stack(plain[key].logits)
        assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5
    return found


def test_a_prompt_and_its_next_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, a sequence that decodes during the prompt of another, and draws with filters and penalties."""
    directory = make_model("llama", tmp_path / "m", num_hidden_layers=1)
    drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
    requests = [greedy("a", PROMPT, 2), greedy("b", PROMPT[2:], 2, **drawn)]
    check(directory, requests, monkeypatch, max_num_batched_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"quantization": "int4"}),
        ("qwen2_moe", {"quantization": "int8"}),
        ("gpt_oss", {}),
        ("gemma2", {}),
        ("deepseek_v2", {}),
    ],
)
def test_other_kinds_of_layers(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, sinks, soft caps, windows, latent attention, and blocks with unrounded rows."""
    directory = make_model(family, tmp_path / "m")
    if "quantization" in options:
        options = {**options, "activations": "float32"}
    check(directory, [greedy("a", PROMPT, 2)], monkeypatch, **options)


@pytest.mark.parametrize(
    "family", slow_but(["gemma4_e2b", "gemma4_26b", "qwen3_5", "lfm2", "granite4_h_experts", "falcon_h1"], "lfm2")
)
def test_layers_with_shared_keys_or_states(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two chunks, then one with the same prefix, during a stream."""
    prompt = torch.randint(3, 128, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    requests = [greedy("a", prompt, 2), greedy("b", PROMPT, 5), greedy("c", prompt[:18] + PROMPT[:3], 2)]
    options = {"max_num_batched_tokens": 20, "max_num_seqs": 2}
    found = check(make_model(family, tmp_path / "m"), requests, monkeypatch, **options)
    assert found["c", 0].outputs[-1].cached_tokens == 16


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters(deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters of different ranks and no adapter in one step, with prompts and streams."""
    directory = make_model("llama", tmp_path / "m", num_hidden_layers=1)
    made = [save_adapter(tmp_path / f"{rank}", directory, rank=rank, seed=rank, strength=0.2) for rank in (3, 16)]
    sources = tuple(AdapterSource(i, f"{i}", str(path)) for i, path in enumerate(made, start=1))
    prompt = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    requests = [greedy("a", prompt, 2, adapter=1), greedy("b", PROMPT, 3, adapter=2), greedy("c", PROMPT, 3)]
    found = check(directory, requests, monkeypatch, lora=sources, max_model_len=160, deterministic=deterministic)
    assert not torch.equal(found["b", 0].logits[0], found["c", 0].logits[0])


@pytest.mark.slow
def test_float8_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, read, copied for a second sample of a prompt that ends inside a block, and rotated again."""
    monkeypatch.setattr("windlass.engine.model.loading.preflight.check_cache_dtype", lambda *given: None)
    directory = make_model("llama", tmp_path / "m", num_hidden_layers=2, max_position_embeddings=16)
    dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
    sent = [
        greedy("a", PROMPT * 3, 3, n=2),
        greedy("b", PROMPT * 2, 5, rope_scaling=dynamic, rope_update="rotate"),
    ]
    check(directory, sent, monkeypatch, kv_cache_dtype="fp8", max_model_len=48)
    core = make_core(directory, kv_cache_dtype="fp8")
    assert core.runner.cache.dtype == torch.float8_e4m3fn
    wide = make_core(directory, kv_cache_dtype="float16")
    assert 2 * core.info.kv_bytes_per_token == wide.info.kv_bytes_per_token


@pytest.mark.slow
def test_blocks_of_gguf_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_model("llama", tmp_path / "source")
    made = make_gguf(source, tmp_path / "made", lambda name: "Q5_1" if "mlp" in name else "Q8_0")
    check(made.derived, [greedy("a", PROMPT, 2)], monkeypatch, activations="float32")
    core = make_core(made.derived)
    assert {weight.form.name for weight in core.runner.decoder.tensors() if isinstance(weight, BlockWeight)} == {
        "q5_1",
        "q8_0",
    }
