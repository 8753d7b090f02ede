"""Mean loss of an exported OpenVINO graph over windows of tokens. Runs in that peer's own environment.

python openvino_quality.py MODEL < {"ids": […], "window": 768, "skip": 384}; prints {"loss": nats a token}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import openvino as ov


def loss_of(model: str, ids: list[int], window: int, skip: int) -> float:
    """Without the first `skip` predictions of each window."""
    request = ov.Core().compile_model(f"{model}/openvino_model.xml", "CPU").create_infer_request()
    names = {name for tensor in request.model_inputs for name in tensor.names}
    total, count = 0.0, 0
    for start in range(0, len(ids) - window + 1, window):
        part = np.array([ids[start : start + window]], dtype=np.int64)
        given: dict[str, Any] = {
            "input_ids": part,
            "attention_mask": np.ones_like(part),
            "position_ids": np.arange(window, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        request.reset_state()
        request.infer({name: value for name, value in given.items() if name in names})
        logits = request.get_tensor("logits").data[0, skip:-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= float(likely[np.arange(len(likely)), part[0, skip + 1 :]].sum())
        count += len(likely)
    return total / count


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps({"loss": loss_of(sys.argv[1], asked["ids"], asked["window"], asked["skip"])}))
