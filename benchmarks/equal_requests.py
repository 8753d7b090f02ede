"""How far equal requests differ without `--deterministic`: a chat sent twice, whose beginning is cached the second time.

    python benchmarks/equal_requests.py [--model smollm2]

Each of 36 short chats is asked for one token and the log-probabilities of the five likeliest, with rows rounded to 8 bits and
with float32. Two sendings differ by the largest difference among tokens that both name. Prints a table; nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics

from windlass import LLM

ROLES = ("Be a pirate", "Be brief and kind.", "You are a teacher of physics.")
QUESTIONS = (
    "Hi",
    "What does horse mean?",
    "Tell me of the sea.",
    "Name three colours.",
    "Who wrote Hamlet?",
    "What is 2+2?",
    "Say hello in French.",
    "What is a cache?",
    "Describe winter.",
    "Give me a recipe.",
    "Why is the sky blue?",
    "How do birds fly?",
)
Likeliest = dict[str, float]


def likeliest(llm: LLM) -> list[Likeliest]:
    """Of each chat, one after the other: the first token's candidates and their log-probabilities."""
    found = []
    for role in ROLES:
        for question in QUESTIONS:
            chat = [{"role": "system", "content": role}, {"role": "user", "content": question}]
            (answer,) = llm.chat(chat, max_tokens=1, temperature=0, logprobs=True, top_logprobs=5)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            found.append({entry.token: entry.logprob for entry in logprobs.content[0].top_logprobs})
    return found


def line(name: str, one: list[Likeliest], other: list[Likeliest]) -> str:
    """A row of the table."""
    apart = [max(abs(a[token] - b[token]) for token in a.keys() & b.keys()) for a, b in zip(one, other, strict=True)]
    same = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in zip(one, other, strict=True))
    return f"| {name} | {statistics.mean(apart):.2g}, {max(apart):.2g} nats | {same} of {len(apart)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    model = parser.parse_args().model
    sent = {}
    for activations in ("int8", "float32"):
        with LLM(model, max_model_len=2048, activations=activations) as llm:
            sent[activations] = likeliest(llm), likeliest(llm)
    print("| | largest difference: mean, most | the same likeliest token |\n|---|--:|--:|")
    for activations, (first, second) in sent.items():
        print(line(f"{activations}: first sending and second", first, second))
    print(line("int8 and float32, first sending", sent["int8"][0], sent["float32"][0]))


if __name__ == "__main__":
    main()
