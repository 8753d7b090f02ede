"""How far equal requests differ without `--deterministic`: a chat sent twice, whose beginning is cached the second time, and one
that is sent beside others.

    python benchmarks/equal_requests.py [--model smollm2]

Each of 36 short chats is asked for 16 tokens and the log-probabilities of the five likeliest of each, with rows rounded to 8 bits
and with float32. Two sendings differ by the largest difference among tokens that both name, up to where their answers part.
Prints a table; nothing is timed.
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
Answer = list[dict[str, float]]  # of each token the candidates' log-probabilities, the one taken first


def chats() -> list[list[dict[str, str]]]:
    roles = [{"role": "system", "content": role} for role in ROLES]
    return [[role, {"role": "user", "content": question}] for role in roles for question in QUESTIONS]


def answers(llm: LLM, *, at_once: bool = False) -> list[Answer]:
    """To each chat, one after the other or all beside each other."""
    asked = [chats()] if at_once else [[chat] for chat in chats()]
    found = []
    for some in asked:
        for answer in llm.chat(some, max_tokens=16, temperature=0, logprobs=True, top_logprobs=5):
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            found.append(
                [{each.token: each.logprob for each in (token, *token.top_logprobs)} for token in logprobs.content]
            )
    return found


def apart(one: Answer, other: Answer) -> tuple[float, bool]:
    """The largest difference, and whether both took the same tokens."""
    largest = 0.0
    for a, b in zip(one, other, strict=False):
        largest = max(largest, *(abs(a[token] - b[token]) for token in a.keys() & b.keys()))
        if next(iter(a)) != next(iter(b)):
            return largest, False
    return largest, len(one) == len(other)


def line(name: str, one: list[Answer], other: list[Answer]) -> str:
    """A row of the table."""
    found = [apart(a, b) for a, b in zip(one, other, strict=True)]
    differences = [difference for difference, _ in found]
    same = sum(is_same for _, is_same in found)
    return f"| {name} | {statistics.mean(differences):.2g}, {max(differences):.2g} nats | {same} of {len(found)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    model = parser.parse_args().model
    first = {}
    print("| | largest difference: mean, most | the same answer |\n|---|--:|--:|")
    for activations in ("int8", "float32"):
        options = {"max_model_len": 2048, "activations": activations}
        with LLM(model, **options) as llm:
            first[activations] = answers(llm)
            print(line(f"{activations}: first sending and second", first[activations], answers(llm)))
        with LLM(model, **options) as llm:
            print(line(f"{activations}: alone and beside the others", first[activations], answers(llm, at_once=True)))
    print(line("int8 and float32, first sending", first["int8"], first["float32"]))


if __name__ == "__main__":
    main()
