"""Shards of a model, and refused models and numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.configs import engine_config
from helpers.tiny_models import make_model
from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.preflight import check_start
from windlass.engine.model.tensor_parallel import WeightSlice, shard_range


@given(st.integers(1, 400), st.integers(1, 8), st.sampled_from([1, 16, 32]))
def test_shares_are_adjacent_complete_units(size: int, ranks: int, unit: int) -> None:
    shares = [shard_range(size, rank, ranks, unit) for rank in range(ranks)]
    assert [first for first, _ in shares] == [0, *(first + count for first, count in shares)][:ranks]
    assert sum(count for _, count in shares) == size
    assert all(first % unit == 0 for first, _ in shares)
    units = [count // unit for _, count in shares]
    assert max(units) - min(units) <= 1


def test_slice_has_its_rows_within_each_tensor() -> None:
    part = WeightSlice(((2, 2), (10, 4), (20, 1)))
    assert list(part.within(0, 8)) == [(2, 4)]
    assert list(part.within(8, 4)) == [(2, 4)]
    assert list(part.within(12, 10)) == [(0, 2), (8, 9)]
    assert part.count(0, 30) == 7


@pytest.mark.parametrize(
    ("family", "overrides", "options", "told"),
    [
        ("llama", {}, {"tensor_parallel": 3}, "the model has 2 heads of keys: use 2 or less"),
        ("olmo2", {}, {}, "a norm of queries over all heads is not split"),
        ("bitnet", {}, {}, "is not split"),
        ("deepseek_v2", {}, {}, "latent attention is not split"),
        ("stablelm_normed", {}, {}, "a norm with a tensor for each head is not split"),
        ("llama", {}, {"quantization": "int4"}, "use `compute.quantization=int8`"),
        ("llama", {}, {"device": "cuda:1"}, "the installed torch has no CUDA"),
        ("llama", {}, {"load_format": "dummy"}, "leave `loading.format=dummy` out"),
        ("llama", {}, {"kv_persist": "/tmp/nowhere"}, "leave `cache.persist` out"),
        ("llama", {}, {"kv_host_memory": 1 << 30}, "leave `cache.host_memory` out"),
        ("llama", {}, {"tensor_parallel": 33}, "must be at most 32"),
    ],
)
def test_models_that_are_not_split_are_refused(
    tmp_path: Path,
    family: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "windlass.engine.model.loading.preflight._torch_has_cuda", lambda: False
    )  # independent of the build
    directory = make_model(family, tmp_path / "model", **overrides)
    with pytest.raises(LoadError) as refused:
        check_start(engine_config(directory, **{"device": "cpu", "tensor_parallel": 2, **options}))
    assert told in str(refused.value) and "\n" not in str(refused.value)
