"""Token classification by decoders compared with transformers, in chunks of any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.engines import greedy, make_core, run

from windlass.engine.errors import RequestError
from windlass.engine.interface.request import PoolingRule

TEXT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
MORE = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": MORE,
    "Qwen3": MORE,
    "Mistral": {**MORE, "sliding_window": 8, "token_classification_bias": False},
    "GPTNeoX": {"intermediate_size": 96},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_tokens(family: str, tmp_path: Path) -> None:
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    config = getattr(transformers, f"{family}Config")(**COMMON, **FAMILIES[family], **labels)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForTokenClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.3) if parameter.dim() == 1 else parameter.mul_(4.0)
    model.config._attn_implementation = "eager"
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    for budget in (64, 7):
        core = make_core(tmp_path, max_num_batched_tokens=budget)
        assert core.info.classifier is not None and core.info.classifier.per_token
        request = replace(greedy("a", TEXT, 0), pooling=PoolingRule("classify tokens"))
        (output,) = run(core, [request])["a", 0].outputs
        assert output.pooled is not None
        found = torch.from_numpy(np.frombuffer(output.pooled.values, "<f4").reshape(-1, 3).copy())
        assert (found - expected).abs().max() / expected.abs().max() < 2e-5  # angles are float32 in the reference
    with pytest.raises(RequestError, match="classifies each token"):
        core.add(replace(greedy("b", TEXT, 0), pooling=PoolingRule("classify")))
    with pytest.raises(RequestError, match="generates nothing"):
        core.add(greedy("c", TEXT))
