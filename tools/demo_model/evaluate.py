"""Measure the exported model on the held-out documents and write the figures into its card.

    python tools/demo_model/evaluate.py --work work/demo

Writes `evaluation.json`, `loss.png` and the parts of `README.md` between `measured` marks. The exported directory is read
by transformers, so the published files are measured.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
BUCKET = 64
TRAINED = 512
COMPLETIONS = (
    "# Genesis 51\n\nAnd it came to pass",
    "The database file is",
    "# Lists\n\nA list is",
)
CHATS = (
    "What does kindness mean?",
    "What is a boat?",
    "Tell me about indexes in SQLite.",
    "What is another word for big?",
    "Read me John 3:16.",
    "Who are you?",
)


def token_losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Nats per token of [B, T + 1] ids, [B, T]."""
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
        len(ids), -1
    )


def windows(documents: list[np.ndarray], length: int) -> torch.Tensor:
    """Windows [N, length + 1] of token ids, each inside one document, without overlap."""
    cut = [d[i : i + length + 1] for d in documents for i in range(0, len(d) - length, length)]
    return torch.from_numpy(np.stack(cut).astype(np.int64))


def by_position(model: PreTrainedModel, documents: list[np.ndarray], length: int) -> list[float]:
    """Perplexity of each run of 64 positions in windows of `length` that lie inside one document."""
    losses = torch.cat([token_losses(model, part) for part in windows(documents, length).split(8)])
    return losses.view(len(losses), -1, BUCKET).mean(dim=(0, 2)).exp().tolist()


def by_source(model: PreTrainedModel, documents: list[np.ndarray], sources: list[str]) -> dict[str, dict[str, float]]:
    """Every document read from its start in chunks of at most 512 tokens, each chunk without the one before it."""
    totals: dict[str, list[float]] = {}
    for document, source in zip(documents, sources, strict=True):
        for start in range(0, len(document) - 1, TRAINED):
            chunk = torch.from_numpy(document[start : start + TRAINED + 1].astype(np.int64))[None]
            losses = token_losses(model, chunk)
            for name in (source, "all"):
                total = totals.setdefault(name, [0.0, 0])
                total[0] += float(losses.sum())
                total[1] += losses.numel()
    return {name: {"tokens": n, "perplexity": math.exp(nats / n)} for name, (nats, n) in sorted(totals.items())}


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """One sample each at temperature 0.7, top-p 0.9 and seed 0, taken as it comes, and never picked from several."""
    samples = []
    for prompt in COMPLETIONS:
        samples.append({"prompt": prompt, "text": _generate(model, tokenizer, tokenizer(prompt, return_tensors="pt"))})
    for question in CHATS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        samples.append({"chat": question, "text": _generate(model, tokenizer, inputs)})
    return samples


def _generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, torch.Tensor]) -> str:
    torch.manual_seed(0)
    ids = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_length": None}
    out = model.generate(**ids, **settings, max_new_tokens=100, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def plot(log: Path, out: Path) -> list[dict[str, float]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    per_step = training[-1]["tokens"] / training[-1]["step"]
    heldout = [line for line in lines if "heldout_loss" in line]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot([t["tokens"] / 1e6 for t in training], [t["loss"] for t in training], lw=1, label="training")
    seen = [h["step"] * per_step / 1e6 for h in heldout]
    axis.plot(seen, [h["heldout_loss"] for h in heldout], "o-", ms=3, label="held out")
    axis.set(xlabel="tokens seen (millions)", ylabel="loss (nats a token)", ylim=(None, 7))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out, dpi=90)
    return lines


def markdown(result: dict, record: dict) -> dict[str, str]:
    """The measured parts of the card, by name."""
    sizes = record["sizes"]
    sources = ["| package | version | what | licence |", "|---|---|---|---|"]
    sources += [f"| {p['package']} | {p['version']} | {p['what']} | {p['licence']} |" for p in record["packages"]]
    amounts = ["| part | documents | tokens trained on | tokens held out |", "|---|---|---|---|"]
    for name in sorted(sizes["train"]):
        train, held = sizes["train"][name], sizes["heldout"].get(name, {"tokens": 0})
        amounts.append(f"| {name} | {train['documents']:,} | {train['tokens']:,} | {held['tokens']:,} |")
    run = result["training"]
    training = (
        f"{run['steps']:,} steps of {run['tokens_per_step']:,} tokens, {run['tokens'] / 1e6:.1f} million tokens in all "
        f"({run['epochs']:.1f} passes over the text), in {run['seconds'] / 60:.0f} minutes on two shared CPU cores."
    )
    perplexity = ["| held-out part | tokens | perplexity |", "|---|---|---|"]
    perplexity += [f"| {n} | {v['tokens']:,} | {v['perplexity']:.1f} |" for n, v in result["by_source"].items()]
    position = ["| positions | trained length (512) | read on to 1,024, no scaling |", "|---|---|---|"]
    for i, beyond in enumerate(result["by_position_1024"]):
        inside = f"{result['by_position_512'][i]:.1f}" if i < TRAINED // BUCKET else ""
        position.append(f"| {i * BUCKET}-{(i + 1) * BUCKET - 1} | {inside} | {beyond:.1f} |")
    samples = []
    for s in result["samples"]:
        head = f"Prompt: `{json.dumps(s['prompt'])}`" if "prompt" in s else f"Chat: {s['chat']}"
        samples.append(f"{head}\n\n```text\n{s['text']}\n```\n")
    parts = {"sources": sources, "amounts": amounts, "training": [training], "perplexity": perplexity}
    return {name: "\n".join(lines) for name, lines in {**parts, "position": position, "samples": samples}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/demo"))
    parser.add_argument("--model", type=Path, default=DEMO)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = np.load(args.work / "heldout_tokens.npy")
    starts = np.load(args.work / "heldout_starts.npy")
    documents = [tokens[a:b] for a, b in pairwise(starts)]
    record = json.loads((args.model / "sources.json").read_text())
    lines = plot(args.work / "train_log.jsonl", args.model / "loss.png")
    last = [line for line in lines if "loss" in line][-1]
    trained_on = sum(size["tokens"] for size in record["sizes"]["train"].values())
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": {
            "steps": last["step"], "tokens": last["tokens"], "tokens_per_step": last["tokens"] // last["step"],
            "seconds": last["seconds"], "epochs": last["tokens"] / trained_on,
        },
        "by_source": by_source(model, documents, json.loads((args.work / "heldout_sources.json").read_text())),
        "by_position_512": by_position(model, documents, TRAINED),
        "by_position_1024": by_position(model, documents, 2 * TRAINED),
        "samples": sample(model, tokenizer),
    }  # fmt: skip
    (args.model / "evaluation.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    card = (args.model / "README.md").read_text()
    for name, text in markdown(result, record).items():
        marks = f"<!-- measured: {name} -->\n", f"\n<!-- end: {name} -->"
        card = re.sub(re.escape(marks[0]) + ".*?" + re.escape(marks[1]), lambda _, m=marks, t=text: m[0] + t + m[1], card, flags=re.S)  # noqa: E501  # fmt: skip
    (args.model / "README.md").write_text(card)
    print(json.dumps({k: v for k, v in result.items() if k != "by_source"}, indent=1, ensure_ascii=False))
    print(result["by_source"])


if __name__ == "__main__":
    main()
