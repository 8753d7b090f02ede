"""`/v1/rotary` and its inspection, against formulas written out here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.live_server import Live, live_server
from helpers.scripted_engine import ScriptedEngine, model_info

from windlass.engine.rotary.scaling import RopeScaling

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    scaling = RopeScaling.from_dict({"rope_type": "linear", "factor": 2.0})
    with live_server(ScriptedEngine(info=model_info(path=str(tmp_path), rope_scaling=scaling))) as live:
        yield live


def test_the_model_and_the_servers_default(live: Live) -> None:
    answer = live.http.get("/v1/rotary").json()
    assert answer["model"]["rope_type"] == "default" and answer["model"]["rotary_dim"] == 16
    assert answer["model"]["original_max_position_embeddings"] == 128
    assert answer["default"] == {"rope_type": "linear", "factor": 2.0}
    assert (answer["policy"], answer["profiles"], answer["max_model_len"]) == ("frozen", {}, 256)


def test_inspection(live: Live) -> None:
    plain = [10000 ** (-2 * j / 16) for j in range(8)]
    answers = {}
    for name, scaling, expected in (
        ("default", {"rope_type": "default"}, plain),
        ("server", None, [w / 2 for w in plain]),
        ("linear", {"rope_type": "linear", "factor": 8.0}, [w / 8 for w in plain]),
    ):
        answer = live.post("/v1/rotary/inspect", {"rope_scaling": scaling, "length": 100}).json()
        assert answer["inv_freq"] == pytest.approx(expected, rel=1e-12)
        assert answer["wavelengths"] == pytest.approx([2 * math.pi / w for w in expected], rel=1e-12)
        assert answer["attention_factor"] == 1.0 and answer["softmax_scale"] == 1.0
        answers[name] = answer["fingerprint"]
    assert len(set(answers.values())) == 3
    yarn = live.post("/v1/rotary/inspect", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}).json()
    assert yarn["attention_factor"] == pytest.approx(0.1 * math.log(4) + 1)
    assert yarn["rope_type"] == "yarn" and yarn["parameters"]["factor"] == 4.0


def test_what_cannot_be_inspected(live: Live) -> None:
    path = "/v1/rotary/inspect"
    assert live.refuse(path, {"rope_scaling": {"rope_type": "spiral"}})["param"] == "rope_scaling.rope_type"
    assert live.refuse(path, {"rope_scaling": "long"})["code"] == "unknown_profile"
    assert live.refuse(path, {"length": 0})["param"] == "length"
    live.engine.info = None
    live.engine.state = "starting"
    assert live.http.get("/v1/rotary").status_code == 503
    live.refuse(path, {}, 503)
