"""Attention weights of a layer against those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from helpers.tiny_models import make_model

from windlass.engine.errors import RequestError
from windlass.engine.execution.attention_maps import attention_weights
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer

IDS = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def load(directory: Path) -> Scorer:
    return Scorer(Scorer.load(directory, device="cpu", dtype="float32").decoder, torch.float32, chunk=16)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma4_e2b"])
def test_weights_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Grouped heads, norms of heads, soft caps and windows of 8 included, and layers that read the keys of others."""
    scorer = load(make_model(family, tmp_path, max_position_embeddings=64))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([IDS]), output_attentions=True).attentions
    assert len(wanted) > 1
    for layer, expected in enumerate(wanted):
        found = attention_weights(scorer, IDS, layer)
        torch.testing.assert_close(found, expected[0], atol=2e-5, rtol=1e-4)


def test_a_scaling_changes_them_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    scorer = load(make_model("llama", tmp_path, max_position_embeddings=64))
    plain = attention_weights(scorer, IDS, 0)
    scaled = attention_weights(scorer, IDS, 0, RopeScaling.from_dict({"rope_type": "linear", "factor": 8}))
    assert (scaled - plain).abs().max() > 1e-3
    torch.testing.assert_close(scaled.sum(-1), torch.ones(scaled.shape[:2]))
    assert torch.equal(attention_weights(scorer, IDS, 0), plain)


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    scorer = load(make_model("llama", tmp_path, max_position_embeddings=64))
    with pytest.raises(RequestError, match="layers 0 to"):
        attention_weights(scorer, IDS, 99)
    with pytest.raises(RequestError, match="plain attention"):
        attention_weights(scorer, IDS, 0, RopeScaling.from_dict({"rope_type": "rerope", "window": 8}))
