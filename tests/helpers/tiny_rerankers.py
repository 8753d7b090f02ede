"""Tiny random Qwen 3 rerankers in the published formats, and transformers' scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import transformers
from helpers.tiny_models import make_model
from helpers.toy_tokenizers import taught

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Template of sentence-transformers, with the roles of a pair.
PAIR_TEMPLATE = (
    '{%- set q = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}\n'
    '{%- set d = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}\n'
    '{%- set i = messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("find what fits") -%}\n'
    "<|im_start|>{{ i }}\nq: {{ q }}\nd: {{ d | trim }}<|im_end|>\n"
)


def tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with tokens for the markers of Qwen's prompt and both answers."""
    made = taught(("<|im_start|>", "<|im_end|>"))
    made.add_tokens(["<think>", "</think>", "yes", "no"])
    return made


def make_reranker(directory: Path, *, chat_template: str | None = None, seed: int = 5) -> Path:
    """Save a Qwen3ForCausalLM whose files do not identify it as a reranker."""
    made = tokenizer()
    make_model("qwen3", directory, seed=seed, vocab_size=448, max_position_embeddings=512)
    made.save(str(directory / "tokenizer.json"))
    config = {} if chat_template is None else {"chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def say_in_config(directory: Path, **keys: object) -> Path:
    """Write keys to config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return directory


def add_logit_score(directory: Path, yes: int, no: int | None, default_prompt: str | None = None) -> Path:
    """Write the files of sentence-transformers for a cross-encoder of a causal model."""
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir()
    tokens = {"true_token_id": yes, "false_token_id": no}
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    if default_prompt is not None:
        prompts = {"prompts": {"web": default_prompt}, "default_prompt_name": "web"}
        (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return directory


def make_classifier(directory: Path, source: Path) -> Path:
    """Save it as a `Qwen3ForSequenceClassification` of one class, whose head is the difference of the two answers' rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    rows, words = model.lm_head.weight.detach(), tokenizer()
    head = rows[words.token_to_id("yes")] - rows[words.token_to_id("no")]
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    with torch.no_grad():
        classifier.score.weight.copy_(head[None])
    classifier.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text((source / name).read_text())
    return directory


def qwen3_prompt(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    """Return the prompt of a pair by the model card of Qwen3-Reranker."""
    begin = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return begin + pair + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def scores_of(directory: Path, prompts: Sequence[str], *, yes: str = "yes", no: str | None = "no") -> torch.Tensor:
    """Return transformers' scores of prompts: the probability of one answer among the two, or the sigmoid of a logit."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    words, found = tokenizer(), []
    for prompt in prompts:
        ids = torch.tensor([words.encode(prompt, add_special_tokens=False).ids])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, -1]
        wanted = logits[words.token_to_id(yes)]
        if no is None:
            found.append(torch.sigmoid(wanted))
        else:
            both = torch.stack([logits[words.token_to_id(no)], wanted])
            found.append(torch.log_softmax(both, dim=0)[1].exp())
    return torch.stack(found)
