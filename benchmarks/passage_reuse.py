"""Questions over documents that the cache holds from other prompts: time to the first token, and what reuse changes.

    python benchmarks/passage_reuse.py MODEL --text FILE_OR_DIR [--text …] [--questions 20] [--out FILE.json]

Documents of 300 to 4,000 tokens are cut from the texts, and each is read once behind a system prompt. Every question stands
behind 2 to 5 of them in an order of its own, at most 7,500 tokens in all. It is answered with everything computed, with an
equal beginning taken from the cache, and with passages taken wherever they stand, of which each share is computed anew.
The answer of the first way is then forced on the others: `agreement` is how often their most likely token is the same, `KL`
what their distributions differ by, `perplexity` theirs of that answer. Times are medians; ways go in turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig, SchedulerConfig
from windlass.engine.interface.context import NonPrefixReuseParams
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.lab.sweep_texts import find_files, read_text
from windlass.server.text.tokenizer import Tokenizer

SYSTEM = "<|im_start|>system\nYou answer questions about the documents below, briefly.<|im_end|>\n<|im_start|>user\n"
QUESTIONS = (
    "What is the first document about? Answer in one sentence.",
    "Which names occur in the documents? List some of them.",
    "Summarize the last document in one sentence.",
    "What do these documents have in common?",
)
MOST, ANSWER = 7500, 24


class Answers:
    """One engine, and what it computes for prompts."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = EngineConfig(
            model=str(options.model),
            max_model_len=8192,
            compute=ComputeConfig(device="cpu", quantization=options.quantization),
            cache=CacheConfig(dtype=options.kv_cache_dtype, memory=14 << 30),
            scheduling=SchedulerConfig(burst_seconds=0.0),  # each token is drawn where its logits are looked at
        )
        self.core = EngineCore(config)
        self.core.warm_up()
        self.count = 0

    def answer(
        self, prompt: list[int], forced: list[int] | None, salt: str, reuse: NonPrefixReuseParams | None
    ) -> tuple[list[int], list[Tensor], float, int]:
        """The greedy or forced answer, its log-probabilities [V] token by token, seconds to the first, cached tokens."""
        self.count += 1
        sampling = SamplingParams(
            max_tokens=ANSWER if forced is None else len(forced), temperature=0.0, ignore_eos=True
        )
        request = EngineRequest(f"q{self.count}", prompt, sampling, cache_salt=salt, reuse=reuse)
        found: list[Tensor] = []
        sample = self.core.runner.sampler.sample

        def forcing(logits: Tensor, slots: Any, *args: Any, **kwargs: Any) -> Any:
            ((row, slot),) = slots
            found.append(logits[row].float().log_softmax(-1))
            if forced is not None:
                logits[row, forced[len(slot.token_ids) - slot.num_prompt_tokens]] = 1e9
            return sample(logits, slots, *args, **kwargs)

        self.core.runner.sampler.sample = forcing  # type: ignore[method-assign]
        tokens: list[int] = []
        first, cached, started = 0.0, 0, time.perf_counter()
        self.core.add(request)
        while self.core.has_work():
            for output in self.core.step():
                if output.error is not None:
                    raise output.error
                first = first or time.perf_counter() - started
                tokens += output.token_ids
                cached = output.cached_tokens
        self.core.runner.sampler.sample = sample  # type: ignore[method-assign]
        return tokens, found, first, cached


def make_documents(texts: list[list[int]], rng: random.Random) -> list[list[int]]:
    """Pieces of the texts, of lengths spread evenly on a logarithmic scale."""
    documents = []
    for index in range(16):
        text, length = texts[index % len(texts)], int(math.exp(rng.uniform(math.log(300), math.log(4000))))
        start = rng.randrange(len(text) - length)
        documents.append(text[start : start + length])
    return documents


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rng, tokenizer = random.Random(1), Tokenizer.from_directory(options.model)

    def ids(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    texts = [ids(read_text(file)) for file in find_files(options.text)]
    documents, engine = make_documents(texts, rng), Answers(options)
    system, frame = ids(SYSTEM), "\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ways: dict[str, tuple[bool, NonPrefixReuseParams | None]] = {
        "computed": (False, None),
        "equal beginning": (True, None),
    }
    for share in options.shares:
        way = f"reuse, {100 * share:g} % anew"
        ways[way] = True, NonPrefixReuseParams(64, recompute=share, scope=way)
    for way, (cached, reuse) in ways.items():  # each way has a cache of its own, which holds every document once
        for document in documents if cached else ():
            engine.answer(system + document, [0], way, reuse and replace(reuse, at_least=0))
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(options.questions):
        chosen, size = [], len(system) + 64
        for document in rng.sample(documents, rng.randint(2, 5)):
            if size + len(document) <= MOST:
                chosen.append(document)
                size += len(document)
        question = ids(frame.format(question=QUESTIONS[number % len(QUESTIONS)]))
        prompt = [*system, *(token for document in chosen for token in document), *question]
        right: list[int] | None = None
        reference: list[Tensor] = []
        for way, (cached, reuse) in ways.items():
            salt = way if cached else f"fresh {number}"
            tokens, logprobs, seconds, hit = engine.answer(prompt, right, salt, reuse)
            if right is None:
                right, reference = tokens, logprobs
            pairs = list(zip(reference, logprobs, strict=True))
            rows[way].append(
                {
                    "tokens": len(prompt),
                    "cached": hit,
                    "seconds": seconds,
                    "agreement": statistics.mean(float(a.argmax() == b.argmax()) for a, b in pairs),
                    "kl": statistics.mean(float((a.exp() * (a - b)).sum()) for a, b in pairs),
                    "nats": -statistics.mean(float(b[token]) for (_, b), token in zip(pairs, right, strict=True)),
                }
            )
        print(f"question {number + 1}: {len(chosen)} documents, {len(prompt)} tokens", flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "model": options.model.name,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        "| | tokens from the cache | to the first token, s | times quicker | same most likely token | KL, nats | perplexity |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    plain = [row["seconds"] for row in report["rows"]["computed"]]
    for way, rows in report["rows"].items():
        share = sum(row["cached"] for row in rows) / sum(row["tokens"] for row in rows)
        quicker = statistics.median(a / row["seconds"] for a, row in zip(plain, rows, strict=True))
        means = {name: statistics.mean(row[name] for row in rows) for name in ("agreement", "kl", "nats")}
        lines.append(
            f"| {way} | {100 * share:.0f} % | {statistics.median(row['seconds'] for row in rows):.2f} | {quicker:.1f} "
            f"| {100 * means['agreement']:.1f} % | {means['kl']:.4f} | {math.exp(means['nats']):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory")
    parser.add_argument("--text", type=Path, action="append", required=True, help="UTF-8 text, or a directory of *.txt")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.0, 0.05, 0.15, 0.3], help="of a passage computed anew"
    )
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--out", type=Path, help="write every number as JSON")
    options = parser.parse_args()
    report = measure(options)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
