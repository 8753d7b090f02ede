"""Reading safetensors without a memory map: equal to the library, in place, with its refusals."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from helpers.configs import engine_config
from helpers.tiny_models import make_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from windlass.engine.bounded_files import MAX_JSON_BYTES, MAX_JSON_ENTRIES
from windlass.engine.errors import LoadError
from windlass.engine.model.loading import tensor_reader
from windlass.engine.model.loading.model_description import describe_model
from windlass.engine.model.loading.safetensors_header import read_header
from windlass.engine.model.loading.tensor_reader import Destination, all_finite, read_tensors

MODEL = Path(__file__).parents[4] / "models" / "demo"


def nowhere(name: str, dtype: torch.dtype, shape: list[int]) -> None:
    return None


def read_whole(path: Path, place: Destination = nowhere) -> dict[str, torch.Tensor]:
    """Join every tensor of the file from its parts, which arrive in order, one tensor after the other."""
    whole: dict[str, torch.Tensor] = {}
    parts: list[torch.Tensor] = []
    for part in read_tensors(path, place):
        assert part.name not in whole and part.first == sum(len(p) for p in parts)
        if part.last and not parts:
            tensor = part.tensor
            whole[part.name] = tensor.clone() if place(part.name, tensor.dtype, part.shape) is None else tensor
        elif part.last:
            whole[part.name] = torch.cat((*parts, part.tensor))
            parts = []
        else:
            parts.append(part.tensor.clone())
            continue
        assert list(whole[part.name].shape) == part.shape
    assert not parts
    return whole


def test_every_dtype_and_shape_equals_the_library(tmp_path: Path) -> None:
    kinds = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ]
    shapes = [(), (0, 4), (3,), (5, 7), (2, 3, 4)]
    tensors = {
        f"{kind}-{shape}": (torch.randn(shape) * 50).to(kind) for kind in kinds for shape in shapes
    }  # without NaN, so equality is sufficient
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    expected = load_file(tmp_path / "x.safetensors")
    found = read_whole(tmp_path / "x.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_tensor_is_read_into_a_target(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(64, 8), "b": torch.randn(64, 8), "c": torch.randn(4).bfloat16()}
    save_file(tensors, tmp_path / "x.safetensors")
    fused = torch.full((128, 8), float("nan"))
    asked = {}

    def place(name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor | None:
        asked[name] = (dtype, shape)
        return {"a": fused[:64], "b": fused[64:]}.get(name)

    found = read_whole(tmp_path / "x.safetensors", place)
    assert torch.equal(fused, torch.cat((tensors["a"], tensors["b"])))
    assert found["b"].data_ptr() == fused[64:].data_ptr() and torch.equal(found["c"], tensors["c"])
    assert asked == {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("size", [1, 1000, 5000, 1 << 16])
def test_parts_are_complete_panels_of_rows(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than buffers, of tensors of several widths: each holds its rows until the next is requested."""
    monkeypatch.setattr(tensor_reader, "_CHUNK_BYTES", size)
    tensors = {f"{rows}x{columns}": torch.randn(rows, columns) for rows in (1, 16, 49, 400) for columns in (3, 64, 100)}
    tensors |= {"vector": torch.randn(2000), "cube": torch.randn(40, 3, 5), "one": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_whole(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    for part in read_tensors(tmp_path / "x.safetensors", nowhere):
        assert part.last or (len(part.tensor) % 16 == 0 and part.first % 16 == 0)
        assert part.tensor.nbytes <= size or not part.shape or len(part.tensor) <= 16


@pytest.mark.parametrize("rows", [1, 5000])
def test_every_part_reports_non_finite_numbers(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked in pieces, one of which holds the number: in a target and in parts."""
    monkeypatch.setattr(tensor_reader, "_CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(tensor_reader, "_CHECK_BYTES", 1 << 10)
    tensors = {"good": torch.randn(rows, 9), "bad": torch.randn(rows, 9), "also good": torch.randn(rows, 9)}
    tensors["bad"][rows // 3, 4] = torch.nan
    save_file(tensors, tmp_path / "x.safetensors")
    for place in (nowhere, lambda name, dtype, shape: torch.empty(shape, dtype=dtype)):
        parts = list(read_tensors(tmp_path / "x.safetensors", place))
        assert [part.name for part in parts if not part.finite] == ["bad"]
    bad = next(part for part in read_tensors(tmp_path / "x.safetensors", nowhere) if not part.finite)
    assert bad.first <= rows // 3 < bad.first + len(bad.tensor)


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(64, 8)}, path)
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-5], "header": b"\xff" * 8 + content[8:], "empty": b""}[damage])
    with pytest.raises((SafetensorError, OSError)):
        list(read_tensors(path, nowhere))


@pytest.mark.slow
def test_loading_does_not_duplicate_weights(tmp_path: Path) -> None:
    """The peak grows by 300 MB of weights and little more, without transformers and without a mapped file."""
    names = [f"w{i}" for i in range(10)]
    save_file({name: torch.full((15 << 20,), 1.0, dtype=torch.bfloat16) for name in names}, tmp_path / "x.safetensors")
    script = f"""
import sys
from pathlib import Path
import torch
import windlass.engine.core.engine_core
from windlass.engine.model.loading.tensor_reader import read_tensors
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
places = {{name: torch.empty(15 << 20, dtype=torch.bfloat16) for name in {names}}}
total = sum(float(p.tensor[-1]) for p in read_tensors(Path({str(tmp_path / "x.safetensors")!r}), lambda n, d, s: places[n]))
assert total == 10.0 and 'transformers' not in sys.modules
print(peak() - before)
"""
    grown = int(subprocess.check_output([sys.executable, "-c", script], text=True)) * 1024
    assert 300e6 < grown < 400e6


# -- finite numbers ----------------------------------------------------------------------------------------------------


def finite(tensor: torch.Tensor) -> bool:
    return all_finite(tensor.view(torch.uint8).numpy().data, tensor.dtype)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
)
def test_every_pattern_equals_torch(dtype: torch.dtype) -> None:
    patterns = torch.arange(1 << (8 * dtype.itemsize)).to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    numbers = patterns.view(dtype)
    wanted = numbers.float().isfinite()
    found = torch.tensor([finite(numbers[i : i + 1]) for i in range(len(numbers))])
    assert torch.equal(found, wanted) and 0 < wanted.sum() < len(wanted)
    assert finite(numbers[wanted]) and not finite(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits_of_wide_types(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = torch.tensor([info.max, info.min, info.tiny, 0.0, -0.0, 1.0], dtype=dtype).repeat(1000)
    assert finite(numbers)
    for value in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        for place in (0, 2999, -1):
            damaged = numbers.clone()
            damaged[place] = value
            assert not finite(damaged)


def test_integers_and_empty_tensors_are_finite() -> None:
    assert finite(torch.full((16,), -1, dtype=torch.int8)) and finite(torch.full((16,), 255, dtype=torch.uint8))
    assert finite(torch.empty(0, dtype=torch.float32))


@pytest.mark.parametrize(
    "header",
    [
        b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(MAX_JSON_ENTRIES + 2)) + b"}}",
        b'{"a":[' + b",".join([b"{}"] * (MAX_JSON_ENTRIES + 2)) + b"]}",
        b'{"' + b"a" * MAX_JSON_BYTES + b'":{}}',
    ],
    ids=["metadata", "objects", "bytes"],
)
def test_oversized_header_is_refused_before_it_is_parsed(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    tracemalloc.start()
    try:
        with pytest.raises(LoadError, match="too large for the tensors of a model") as caught:
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(header)
    finally:
        tracemalloc.stop()
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_oversized_json_file_is_refused_before_it_is_parsed(name: str, tmp_path: Path) -> None:
    directory = make_model("llama", tmp_path / "model")
    (directory / name).write_bytes(b'{"weight_map":[' + b",".join([b"{}"] * (MAX_JSON_ENTRIES + 2)) + b"]}")
    with pytest.raises(LoadError, match=f"{name} has more than {MAX_JSON_ENTRIES} entries"):
        describe_model(engine_config(directory))
