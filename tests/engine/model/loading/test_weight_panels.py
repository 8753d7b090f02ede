"""16-bit weights in panels: the same numbers as rows, for all layouts of files and in any batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass.engine.model.decoder import Decoder
from windlass.kernels import Backend, PanelWeight, cpu
from windlass.kernels.cpu.cpu_backend import CompiledBackend

pytestmark = [
    ON_A_CPU,
    pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="panels need the compiled kernels"),
]

TYPES = ("bfloat16", "float16")


def stored_as(directory: Path, dtype: str) -> Path:
    tensors = {name: t.to(getattr(torch, dtype)) for name, t in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def as_rows(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return every weight, with panels as rows."""
    return {n: w.unpack() if isinstance(w, PanelWeight) else w for n, w in decoder.weights().items()}


def without_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledBackend, "_plain_matrix", Backend._plain_matrix)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("dtype", TYPES)
# Heads of 16 rows; fused and split projections; sorted rows; sizes that do not fill panels.
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"intermediate_size": 75, "vocab_size": 121, "head_dim": 10}),
        ("llama_bias", {}),
        ("phi3", {}),
        ("glm4", {}),
        ("hunyuan", {}),
    ],
)
def test_weights_equal_the_files(
    family: str, overrides: dict[str, int], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stored_as(make_model(family, tmp_path, **overrides), dtype)
    request = greedy("a", range(3, 40), 6)
    core = make_core(directory)
    decoder = core.runner.decoder
    tied = decoder.spec.tied_embeddings
    assert isinstance(decoder.layers[0].feed_forward.weights.down, PanelWeight) and isinstance(
        decoder.embedding, torch.Tensor
    )
    assert isinstance(decoder.head, torch.Tensor) == tied
    got = run(core, [request])["a", 0]
    without_panels(monkeypatch)
    plain = make_core(directory)
    rows = as_rows(plain.runner.decoder)
    assert not any(isinstance(w, PanelWeight) for w in plain.runner.decoder.tensors())
    for name, weight in as_rows(decoder).items():
        assert torch.equal(weight, rows[name]), name
    assert core.info.num_parameters == plain.info.num_parameters
    assert core.info.weight_dtype == plain.info.weight_dtype == dtype
    assert plain.info.weight_bytes <= core.info.weight_bytes <= 1.25 * plain.info.weight_bytes
    want = run(plain, [request])["a", 0]
    assert got.token_ids == want.token_ids
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_dummy_weights_are_equal_in_panels(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_model("llama", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    monkeypatch.setattr("windlass.engine.model.loading.loader._RANDOM_BYTES", 3000)  # several draws for each matrix
    decoder = make_core(directory, load_format="dummy", seed=3).runner.decoder
    assert isinstance(decoder.layers[0].mixer.weights.qkv, PanelWeight)
    without_panels(monkeypatch)
    rows = as_rows(make_core(directory, load_format="dummy", seed=3).runner.decoder)
    for name, weight in as_rows(decoder).items():
        assert torch.equal(weight, rows[name]), name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compute", ["auto", "float16", "bfloat16"])
def test_deterministic_bits_do_not_depend_on_the_batch(compute: str, tmp_path: Path) -> None:
    directory = stored_as(make_model("qwen3", tmp_path), "bfloat16" if compute == "auto" else compute)
    options = {"deterministic": True, "prefix_caching": False, "dtype": compute}
    sent = [greedy(str(i), range(3, 9 + 11 * i), 12) for i in range(5)]
    core = make_core(directory, **options)
    assert isinstance(core.runner.decoder.layers[0].mixer.weights.qkv, PanelWeight)
    together = run(core, sent)
    for request in sent:
        for budget in (2048, 7):
            alone = run(make_core(directory, max_num_batched_tokens=budget, **options), [request])
            key = (request.request_id, 0)
            assert torch.equal(torch.stack(alone[key].logits), torch.stack(together[key].logits)), (key, budget)


def test_steps_are_recorded(tmp_path: Path) -> None:
    core = make_core(stored_as(make_model("llama", tmp_path), "bfloat16"))
    run(core, [greedy("a", range(3, 9), 40)])
    assert core.runner.replay.obstacle is None and core.runner.replay.num_replayed > 20


def test_other_weights_are_stored_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = stored_as(make_model("llama", tmp_path), "bfloat16")
    monkeypatch.setattr("windlass.kernels.torch.linear.multiplies_bfloat16", lambda: True)
    monkeypatch.setattr("windlass.kernels.cpu.library.BF16_DOT_ISAS", frozenset())
    for dtype in ("float32", "bfloat16"):
        assert not any(isinstance(w, PanelWeight) for w in make_core(directory, dtype=dtype).runner.decoder.tensors())
    monkeypatch.setattr("windlass.kernels.torch.linear.multiplies_bfloat16", lambda: False)
    assert any(isinstance(w, PanelWeight) for w in make_core(directory, dtype="bfloat16").runner.decoder.tensors())
