"""Tensor headers are checked before weights are read: every tensor is used once, and errors name tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.configs import engine_config
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.preflight import check_start
from windlass.engine.model.loading.safetensors_header import read_header

Q, NORM, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "model")


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def remove(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


LAYER = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
CASES = {
    "missing": (remove(NORM), f"tensor '{NORM}' is missing: the checkpoint is incomplete"),
    "several missing": (remove(*LAYER, NORM), "tensors '.*', '.*', '.*' and 1 more are missing"),
    "surplus": (put("model.layers.0.swirl.weight", torch.ones(1)), r"unexpected tensor 'model\.layers\.0\.swirl\.weight'"),
    "several surplus": (
        lambda tensors: [put(f"model.x{i}", torch.ones(1))(tensors) for i in range(5)],
        r"unexpected tensors 'model\.x0', 'model\.x1', 'model\.x2' and 2 more: this architecture has no place for them",
    ),
    "shape": (put(NORM, torch.ones(63)), rf"'{NORM}' has shape \[63\] where config\.json asks for \[64\]"),
    "transposed": (
        lambda tensors: put(LAYER[2], tensors[LAYER[2]].t().contiguous())(tensors),
        rf"'{LAYER[2]}' has shape \[\d+, 64\] where config\.json asks for \[64, \d+\]",
    ),
    "flat": (put(Q, torch.ones(64 * 64)), r"has shape \[4096\]"),
    "single number": (put(NORM, torch.tensor(1.0)), r"has shape \[\]"),
    "integers": (put(NORM, torch.ones(64, dtype=torch.int32)), f"'{NORM}' is I32, which is not a type of weights"),
    "truths": (put(NORM, torch.ones(64, dtype=torch.bool)), f"'{NORM}' is BOOL, which is not a type of weights"),
    "complex": (put(NORM, torch.ones(64, dtype=torch.complex64)), f"'{NORM}' is C64, which is not a type of weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_inconsistent_headers_are_refused(case: str, model: Path) -> None:
    change, says = CASES[case]
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(LoadError, match=says) as caught:
        check_start(engine_config(model, device="cpu"))
    assert "\n" not in str(caught.value) and str(model) in str(caught.value)


def test_tensor_in_two_shards_is_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    first = {name: tensor for name, tensor in tensors.items() if "layers" in name}
    save_file(first, model / names[0])
    save_file({name: tensor for name, tensor in tensors.items() if name not in first or name == Q}, model / names[1])
    owners = {name: names[0] if name in first else names[1] for name in tensors}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    with pytest.raises(LoadError, match=f"tensor '{re.escape(Q)}' appears in more than one file"):
        check_start(engine_config(model, device="cpu"))


def test_unused_buffers_and_integers_are_accepted(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    extra = {
        "lm_head.weight": tensors[EMBEDDING].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    }
    save_file(tensors | extra, model / "model.safetensors")
    check_start(engine_config(model, device="cpu"))


def written(file: Path, data: int, **tensors: tuple[str, list[int], int, int]) -> Path:
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for name, (dtype, shape, begin, end) in tensors.items()
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return file


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": ("F32", [2], 0, 8), "b": ("F32", [2], 0, 8)},
        {"a": ("F32", [2], 0, 8), "b": ("F32", [1], 4, 8)},
        {"a": ("F32", [1], 0, 4), "b": ("F16", [1], 6, 8)},
        {"a": ("F32", [3], 0, 8)},
        {"a": ("BF16", [2, 3], 0, 8)},
        {"a": ("F8_E4M3", [-2, -4], 0, 8)},
        {"a": ("F32", [2], 8, 0), "b": ("F32", [2], 0, 8)},
    ],
)
def test_invalid_tensor_ranges_are_refused(tensors: dict[str, tuple[str, list[int], int, int]], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"its header is damaged at tensor '[ab]': download or copy the file again"):
        read_header(written(tmp_path / "x.safetensors", 8, **tensors))


def test_empty_tensors_and_unknown_dtypes_are_ignored(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", 8, e=("F32", [0, 3], 0, 0), a=("F4", [16], 0, 8), z=("I8", [0], 8, 8))
    assert set(read_header(file).tensors) == {"a", "e", "z"}
