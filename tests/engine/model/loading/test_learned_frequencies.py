"""Learned frequencies: found in the checkpoint, decoded exactly, refused if invalid."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.model.loading.model_description import with_learned_frequencies
from windlass.engine.rotary.rope_scaling import RopeScaling

NAME = "model.rotary_emb.inv_freq"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_type": "learned"},
}
VALUES = torch.tensor([0.9, 0.7, 0.31, 0.111, 0.05, 0.01, 0.0, 1e-4])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_type_is_read_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = VALUES.to(dtype)
    save_file({"other": torch.ones(3, 5), NAME: stored, "z": torch.zeros(2)}, tmp_path / "model.safetensors")
    (group,) = with_learned_frequencies(read_rotary_groups(CONFIG), tmp_path)
    assert group.base.inv_freq == tuple(stored.double().tolist())
    assert group.parameters() == {}


def test_groups_have_separate_frequencies(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "learned"},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    save_file({"model.rotary_emb.full_attention_inv_freq": VALUES}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"model.rotary_emb.inv_freq": VALUES * 2}, tmp_path / "model-00002-of-00002.safetensors")
    full, sliding = with_learned_frequencies(read_rotary_groups(config), tmp_path)
    assert full.base.inv_freq == tuple(VALUES.double().tolist())
    assert sliding.base.inv_freq is None


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (None, "needs the tensor model.rotary_emb.inv_freq"),
        (VALUES[:7], "holds 7 frequencies, the model rotates 8 pairs"),
        (VALUES - 0.5, "not frequencies"),
        (VALUES / 0, "not frequencies"),
        (VALUES.to(torch.int32), "is I32"),
    ],
)
def test_invalid_frequencies_are_refused(tensor: torch.Tensor | None, says: str, tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)} if tensor is None else {NAME: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=says) as caught:
        with_learned_frequencies(read_rotary_groups(CONFIG), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match=r"cannot read .*download"):
        with_learned_frequencies(read_rotary_groups(CONFIG), tmp_path)


def test_reading_them_loads_no_torch() -> None:
    code = (
        "import sys\nimport windlass.engine.model.loading.model_description\n"
        "print(*[name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_model_uses_them_and_kinds_without_a_base(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    plain = make_core(model)
    tensors = load_file(model / "model.safetensors")
    tensors[NAME] = VALUES
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert (
        make_core(model).info.rotary_groups == plain.info.rotary_groups
    )  # the saved buffer of an ordinary model is ignored
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_type": "learned"}}))
    core = make_core(model)
    prompt = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    (model / "config.json").write_text(json.dumps(config))  # transformers has no such kind: its angles are replaced
    for name, fields in (("own", None), ("half", {"rope_type": "linear", "factor": 2.0})):
        scaling = None if fields is None else RopeScaling.from_dict(fields)
        request = greedy(name, prompt, 6, rope_scaling=scaling)
        specs = specs_of(core, request)
        expected = VALUES.double() / (1 if fields is None else 2)
        assert specs[0].inv_freq == pytest.approx(expected.tolist())
        result = run(core, [request])[name, 0]
        logits = Reference(model, specs, ["full_attention"]).logits(prompt + result.token_ids)[29:-1]
        assert (torch.stack(result.logits) - logits).abs().max() / logits.abs().max() < 1e-5
    for fields in ({"rope_type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2.0}):
        with pytest.raises(RequestError, match="use one of default, linear, llama3, longrope, learned") as caught:
            core.add(greedy("no", prompt, 6, rope_scaling=RopeScaling.from_dict(fields)))
        assert caught.value.param == "rope_scaling.rope_type"
