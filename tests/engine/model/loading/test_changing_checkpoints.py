"""A checkpoint that is replaced while it is read is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import engine_config
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.model.loading import loader

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("replaced", ["before the weights are read", "behind that"])
@pytest.mark.parametrize("of", ["model", "draft model"])
def test_replaced_checkpoint_is_refused(
    of: str, replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = make_model("llama", tmp_path / "model"), make_model("llama", tmp_path / "other", seed=1)
    fill = loader.fill_decoder

    def swapped(*given: Any) -> tuple[str, ...]:
        notices = fill(*given) if replaced == "behind that" else None
        shutil.copy(other / WEIGHTS, model / "new")
        (model / "new").rename(model / WEIGHTS)
        return fill(*given) if notices is None else notices

    config = engine_config(model, **({"speculative_model": str(model)} if of == "draft model" else {}))
    beside = loader.load_model(engine_config(model))

    def load(config: EngineConfig) -> loader.LoadedModel | None:
        return loader.load_draft(config, beside) if of == "draft model" else loader.load_model(config)

    load(config)
    monkeypatch.setattr(loader, "fill_decoder", swapped)
    with pytest.raises(LoadError, match="changed while it was read") as refused:
        load(config)
    assert str(refused.value).startswith("the draft model: ") == (of == "draft model")
    monkeypatch.setattr(loader, "fill_decoder", fill)
    assert load(config) is not None
