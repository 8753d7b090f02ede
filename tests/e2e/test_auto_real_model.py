"""`auto` on a real model: at each length the logits are transformers' under the chosen scaling, and at short ones none's.

For a directory with float32 weights and a plain rotation, named by WINDLASS_TEST_MODEL; skipped without one. Transformers gets
cos and sin of float64 angles, as its own float32 angles are off by more than is asked for here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers
from helpers.engines import greedy, make_core, run
from helpers.rotary_formulas import by_formula

from windlass.engine.rotary.auto_scaling import AUTO
from windlass.engine.rotary.rope_scaling import RotaryBase

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("WINDLASS_TEST_MODEL", "")
TOKENS = 4
ROOM = 32_768
LENGTHS = (500, 4_000, 12_000, 30_000)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def text() -> list[int]:
    if not Path(MODEL, "config.json").is_file():
        pytest.skip("WINDLASS_TEST_MODEL names no model directory")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer(pages)["input_ids"]
    assert len(ids) > max(LENGTHS)
    return list(ids)


@torch.no_grad()
def reference(ids: list[int], factor: int) -> torch.Tensor:
    """[TOKENS, V]: those that draw the last tokens of `ids`; frequencies by the formula, and as its config gives them."""
    config = transformers.AutoConfig.from_pretrained(MODEL)
    theta = config.rope_parameters["rope_theta"]
    if factor > 1:
        config.rope_parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": float(factor)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, config=config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    own = model.model.rotary_emb
    scaling = {"rope_type": "yarn", "factor": float(factor)} if factor > 1 else {"rope_type": "default"}
    dim, trained = 2 * len(own.inv_freq), config.max_position_embeddings
    formula, scale = by_formula(scaling, len(ids), RotaryBase(theta, dim, dim, trained))
    inv_freq = torch.from_numpy(formula)  # float64, where the buffer has float32
    assert torch.allclose(inv_freq.float(), own.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(own.attention_scaling)

    def rotary(hidden: torch.Tensor, position_ids: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].double() * inv_freq
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * scale).float(), (angle.sin() * scale).float()

    own.forward = rotary
    given = torch.tensor([ids[:-1]])
    return model(given, use_cache=False, logits_to_keep=TOKENS).logits[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_each_length_has_transformers_logits_under_what_it_needs(text: list[int], length: int) -> None:
    core = make_core(Path(MODEL), max_model_len=ROOM, kv_cache_memory=2 << 30, dtype="float32")
    trained = core.info.trained_len
    factor = next(2**k for k in range(8) if length <= trained << k)
    prompt = text[: length - TOKENS]
    got = run(core, [greedy("a", prompt, TOKENS, rope_scaling=AUTO)])["a", 0]
    report = got.outputs[-1].rotary
    assert report is not None and report.auto == {"length": length, "up_to": trained * factor}
    logits = torch.stack(got.logits)
    if factor == 1:
        fresh = make_core(Path(MODEL), max_model_len=ROOM, kv_cache_memory=2 << 30, dtype="float32")
        plain = run(fresh, [greedy("b", prompt, TOKENS)])["b", 0]
        assert torch.equal(logits, torch.stack(plain.logits))
    right = reference(prompt + got.token_ids, factor)
    difference = float((logits - right).abs().max() / right.abs().max())
    print(f"{length} tokens, factor {factor}: largest difference {difference:.1e} of the largest logit")
    assert difference < 1e-5
    assert torch.equal(logits.argmax(-1), right.argmax(-1))
