"""Adapters saved by PEFT compared with transformers on the model into which PEFT merged them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError
from windlass.engine.interface.model_info import AdapterSource

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

PROMPT = [3, 17, 42, 8, 99, 23, 54, 11, 76, 5, 31, 90]


def trained(model: Path, target: Path, **config: Any) -> torch.nn.Module:
    """Save an adapter as PEFT does, every matrix of it random, and return the model with it merged."""
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    adapted.save_pretrained(target)
    return adapted.merge_and_unload().eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"r": 8, "lora_alpha": 12, "target_modules": "all-linear"}),
        ("llama", {"r": 4, "lora_alpha": 9, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}),
        (
            "llama",
            {
                "r": 6,
                "lora_alpha": 6,
                "target_modules": "all-linear",
                "rank_pattern": {"down_proj": 3, r"layers\.1\.self_attn\.q_proj": 11},
                "alpha_pattern": {"k_proj": 20},
            },
        ),
        (
            "qwen3",
            {"r": 16, "lora_alpha": 32, "target_modules": ["o_proj", "gate_proj", "up_proj"], "lora_dropout": 0.1},
        ),
        ("phi3", {"r": 5, "lora_alpha": 10, "target_modules": "all-linear"}),
        ("gemma3", {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
        ("gemma4_e2b", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}),
    ],
    ids=["all", "rslora", "patterns", "qwen3", "phi3", "gemma3", "gemma4"],
)
def test_adapter_equals_the_model_that_peft_merged(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    merged = trained(model, tmp_path / "adapter", **config)
    core = make_core(model, lora=(AdapterSource(1, "a", str(tmp_path / "adapter")),))
    found = run(core, [greedy("r", PROMPT, adapter=1)])["r", 0]
    plain = run(core, [greedy("r", PROMPT)])["r", 0]
    ids = torch.tensor([[*PROMPT, *found.token_ids]])
    with torch.no_grad():
        wanted = merged(ids).logits[0, len(PROMPT) - 1 : -1]
    logits = torch.stack(found.logits)
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (logits[0] - plain.logits[0]).abs().max() > 1e-2 * wanted.abs().max()


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"bias": "all"}, "bias"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
    ],
    ids=["dora", "saved modules", "pissa", "biases", "embedding"],
)
def test_other_kinds_of_peft_are_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    trained(model, tmp_path / "adapter", **{"r": 4, "target_modules": ["q_proj"], **config})
    with pytest.raises(LoadError, match=f"(?i){reason}"):
        make_core(model, lora=(AdapterSource(1, "a", str(tmp_path / "adapter")),))
