"""Selection of backends, and their descriptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.cpu_kernels import choose

from windlass.kernels import (
    FORMS,
    Backend,
    BlockWeight,
    PanelWeight,
    backend_selector,
    cpu,
    has_native_bf16,
    ranks_refusal,
    reads_16bit_weights,
    select_backend,
)
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

WITH_KERNELS = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="needs the compiled kernels")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "not compiled: do this")


@WITH_KERNELS
@pytest.mark.parametrize("deterministic", [False, True])
def test_cpus_use_the_compiled_kernels(deterministic: bool) -> None:
    backend = select_backend("cpu", torch.bfloat16, deterministic=deterministic)
    assert isinstance(backend, CompiledBackend) and reads_16bit_weights("cpu")
    assert backend.explain() == f"compiled CPU kernels ({cpu.load().isa})" and not backend.is_fallback
    assert backend.dtype == backend.weight_dtype == torch.bfloat16 and backend.deterministic == deterministic
    assert backend.recording_refusal is None and backend.reads_host_memory


@pytest.mark.parametrize(("deterministic", "kind"), [(False, TorchBackend), (True, RowIndependentBackend)])
def test_cpus_without_compiled_kernels_use_plain_torch(
    without_kernels: None, deterministic: bool, kind: type[Backend]
) -> None:
    backend = select_backend("cpu", deterministic=deterministic)
    assert type(backend) is kind and not reads_16bit_weights("cpu")
    assert backend.explain() == "plain torch kernels: not compiled: do this" and backend.is_fallback
    assert backend.recording_refusal == "not compiled: do this" and backend.reads_host_memory
    with pytest.raises(ValueError, match="do this"):
        backend.recorder(1 << 20)


@pytest.mark.parametrize(("deterministic", "kind"), [(False, TorchBackend), (True, RowIndependentBackend)])
def test_other_devices_use_plain_torch_without_a_fallback(deterministic: bool, kind: type[Backend]) -> None:
    backend = select_backend("meta", deterministic=deterministic)
    assert type(backend) is kind and not reads_16bit_weights("meta")
    assert "no others for meta" in backend.explain() and not backend.is_fallback
    assert backend.recording_refusal == "the model is on meta" and not backend.reads_host_memory
    assert backend.table(3, 5, torch.float32).device.type == backend.pages((2, 3), torch.int8).device.type == "meta"


def test_abilities_of_a_device_follow_from_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(refused: str | None = None, **fields: Any) -> backend_selector._NativeBackend:
        return backend_selector._NativeBackend(lambda _: refused, TorchBackend, **fields)

    for own, expected in (
        (None, (False, False, "no group for meta")),
        (entry(narrow=False), (False, False, "no group for meta")),
        (entry(narrow=True, pairs=lambda options: options.dtype == torch.bfloat16), (True, True, "no group for meta")),
        (entry(narrow=True, share_memory=True), (True, False, None)),
        (entry("none", narrow=True, pairs=lambda _: True, share_memory=True), (False, False, "no group for meta")),
    ):
        monkeypatch.setattr(backend_selector, "_NATIVE_BACKENDS", {} if own is None else {"meta": own})
        refusal = ranks_refusal("meta")
        assert (reads_16bit_weights("meta"), has_native_bf16("meta")) == expected[:2]
        assert refusal is None if expected[2] is None else refusal is not None and expected[2] in refusal


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("name", FORMS)
def test_weights_have_the_requested_form(name: str) -> None:
    backend, form = select_backend("cpu"), FORMS[name]
    for make in (backend.matrix, backend.table, backend.tied_embedding):
        weight = make(20, 33, form)
        assert isinstance(weight, BlockWeight) and weight.form == form and weight.shape == (20, 33)
        plain = make(20, 33, torch.float32)
        assert isinstance(plain, torch.Tensor) and plain.dtype == torch.float32 and plain.shape == (20, 33)


def test_torch_refuses_panel_weights() -> None:
    backend, weight = select_backend("meta"), PanelWeight.empty(16, 4, torch.bfloat16)
    with pytest.raises(TypeError, match="panel weights"):
        backend.linear(torch.ones(1, 4), weight)
    with pytest.raises(TypeError, match="panel weights"):
        backend.pack(weight.narrow(0, 16), torch.ones(16, 4))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantized", [False, True])
def test_backends_embed_the_same_rows(dtype: torch.dtype, quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is rounded to the compute dtype, as are the products."""
    ids, source, found = torch.tensor([3, 0, 3]), torch.randn(5, 32), []
    for unavailable in (False, True):
        if unavailable:
            choose(monkeypatch, "off")
        backend = select_backend("cpu", dtype, torch.float32)
        table = backend.tied_embedding(5, 32, FORMS["q8_0"] if quantized else torch.float32)
        if isinstance(table, BlockWeight):
            backend.pack(table.narrow(0, 5), source)
        else:
            table.copy_(source)
        found.append(backend.embed(table, ids, 7.3))
        rows = (table.dequantize(ids) if isinstance(table, BlockWeight) else table[ids]).to(dtype)
        assert torch.equal(found[-1], rows * torch.tensor(7.3, dtype=dtype)) and found[-1].dtype == dtype
        assert torch.equal(backend.embed(table, ids), rows)
    assert torch.equal(*found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_logarithms_of_counts(deterministic: bool) -> None:
    counts = torch.tensor([0, 1, 7, 100_000] * 9)
    for backend in (
        select_backend("cpu", deterministic=deterministic),
        select_backend("cpu", torch.bfloat16, deterministic=deterministic),
    ):
        found = backend.log1p(counts)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), counts.double().log1p(), rtol=1e-6, atol=0)
