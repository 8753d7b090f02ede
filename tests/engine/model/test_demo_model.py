"""The bundled model in transformers: its shape, tokenizer and template, and the perplexity of held-out text."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[3] / "models" / "demo"
MAX_BYTES = 20_000_000


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def excerpt() -> dict[str, str]:
    return json.loads((DEMO / "heldout_excerpt.json").read_text())


def perplexity(model, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return math.exp(model(ids, labels=ids).loss)


def test_shape(model):
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert config.num_attention_heads == 2 * config.num_key_value_heads  # grouped queries
    assert config.max_position_embeddings == 512
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.rope_parameters["rope_type"] == "default"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert 3e6 <= sum(p.numel() for p in model.parameters()) <= 8e6


def test_weights_are_bf16_and_finite():
    with safe_open(DEMO / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a safe_open handle is not iterable
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert tensor.isfinite().all(), name


@pytest.mark.parametrize("source", ["bible", "postgresql", "python", "sqlite"])
def test_held_out_text_is_more_likely_than_its_shuffle(model, tokenizer, excerpt, source):
    ids = tokenizer(excerpt[source], return_tensors="pt")["input_ids"][:, :512]
    order = torch.randperm(ids.shape[1] - 1, generator=torch.Generator().manual_seed(0)) + 1
    shuffled = torch.cat((ids[:, :1], ids[:, order]), dim=1)
    # Chance is 4,096; word frequencies alone give several hundred. 52 to 78 were measured.
    assert perplexity(model, ids) < 110
    assert perplexity(model, shuffled) > 2000


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text):
    tokenizer = _tokenizer()
    for special in _SPECIAL:
        text = text.replace(special, "")
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


_SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_cache: list[Tokenizer] = []


def _tokenizer() -> Tokenizer:
    if not _cache:
        _cache.append(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    return _cache[0]


def test_special_tokens_agree_in_every_file(tokenizer):
    config = json.loads((DEMO / "config.json").read_text())
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert config["vocab_size"] == len(tokenizer) == _tokenizer().get_vocab_size() == 4096
    for name in ("bos", "eos", "pad"):
        token_id = getattr(tokenizer, f"{name}_token_id")
        assert token_id is not None
        assert config[f"{name}_token_id"] == generation[f"{name}_token_id"] == token_id
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert all(len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1 for text in _SPECIAL)


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What does boat mean?"},
        {"role": "assistant", "content": "A vessel."},
        {"role": "user", "content": "Why?"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\nWhat does boat mean?<|end|>\n"
        "<|assistant|>\nA vessel.<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n"
    )
    begun = [*messages, {"role": "assistant", "content": "Because"}]
    assert tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True) == rendered + "Because"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_generates_and_ends_a_turn(model, tokenizer):
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does boat mean?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    start = inputs["input_ids"].shape[1]
    ids = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    out = model.generate(**ids, do_sample=False, temperature=None, top_p=None, max_length=None, max_new_tokens=150)[0]
    assert out[-1] == tokenizer.eos_token_id
    answer = tokenizer.decode(out[start:], skip_special_tokens=True)
    assert re.match(r"[A-Z][a-z' -]+ is an? (noun|verb|adjective|adverb)\. It means ", answer), answer


def test_the_directory_is_small_and_card_and_notice_name_every_source():
    assert sum(path.stat().st_size for path in DEMO.iterdir() if path.is_file()) < MAX_BYTES
    card = (DEMO / "README.md").read_text()
    notice = (DEMO.parents[1] / "NOTICE").read_text()
    packages = json.loads((DEMO / "sources.json").read_text())["packages"]
    assert len(packages) >= 5
    for package in packages:
        assert f"| {package['package']} | {package['version']} |" in card
        assert package["package"] in notice
