"""Retrieval of numbers hidden in a long text, under several rotary scalings.

    python benchmarks/real_model.py passkeys MODEL --text FILE_OR_DIR [--text …] --max-len 16384 --scaling JSON [--scaling …]

Notes ("The secret number of Alice is 48213.") are inserted before paragraphs, and the same sentence again later on. A number
counts as found if each of its five digits is the most likely next token at the second place, as greedy decoding would write
it. One pass per text and scaling answers all questions. Distances are random. The output is a Markdown table: found by
stretch of the text, with Wilson's 95 % intervals. Frequencies that follow the length are those of --max-len (`frozen`). An
interrupted run resumes from --keep.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness.long_text_report import make_parser, publish

from windlass.clients.loadtest.intervals import wilson
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.result_log import ResultLog, result_key
from windlass.lab.scoring import Scorer
from windlass.lab.sweep_texts import find_files, read_text
from windlass.server.text.tokenizer import Tokenizer

NAMES = (
    "Alice Bruno Clara David Elena Felix Greta Henry Irene Jacob Karen Louis Maria Nigel Olive Peter Queenie Ralph Susan "
    "Tobias Ursula Victor Wendy Xavier Yvonne Zachary Amelia Boris Cecily Dorian Esther Frank Gloria Hector Ingrid Jonas "
    "Kirsten Leonard Monica Norman Ophelia Philip Roberta Samuel Teresa Ulrich Vera Walter Agnes Basil Cora Dexter Edith "
    "Fergus Gwen Hugo Ivy Jerome Lydia Miles"
).split()
DIGITS = 5
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Question:
    """The position of the first digit, its distance to that of the note in tokens, and the tokens of the digits."""

    position: int
    distance: int
    answer: tuple[int, ...]


def hide(
    tokenizer: Tokenizer, text: str, length: int, seed: int, every: int, pool: int = 10
) -> tuple[list[int], list[Question]]:
    """The text with notes and questions, and where these are. every: tokens of text between two insertions.

    pool: notes before the first question.
    """
    chance = random.Random(seed)

    def encode(piece: str) -> list[int]:
        return tokenizer.encode(piece, add_special_tokens=False)

    paragraphs = (encode(paragraph + "\n\n") for paragraph in text.split("\n\n"))
    ids: list[int] = list(tokenizer.encode(""))
    names = list(NAMES)
    chance.shuffle(names)
    notes: list[tuple[str, tuple[int, ...], int]] = []
    questions, since = [], 0
    for paragraph in paragraphs:
        ids += paragraph
        since += len(paragraph)
        if since < every:
            continue
        since = 0
        old = [note for note in notes if len(ids) - note[2] >= every]
        if old and (len(notes) >= pool or not names):
            note = chance.choice(old)
            notes.remove(note)
            ids += encode(f"The secret number of {note[0]} is")
            questions.append(Question(len(ids), len(ids) - note[2], note[1]))
            ids += [*note[1], *encode(".\n\n")]
        if names:
            digits = tuple(encode(" " + "".join(str(chance.randrange(10)) for _ in range(DIGITS))))
            name = names.pop()
            ids += encode(f"The secret number of {name} is")
            notes.append((name, digits, len(ids)))
            ids += [*digits, *encode(".\n\n")]
        if len(ids) > length:
            break
    ids = ids[: length + 1]
    return ids, [question for question in questions if question.position + len(question.answer) <= length]


def ask(scorer: Scorer, ids: list[int], questions: list[Question], scaling: dict[str, Any]) -> list[bool]:
    """Whether all digits of each question are the most likely tokens."""
    plan = scorer.plan(len(ids), RopeScaling.from_dict(scaling), "frozen")
    rows = {q.position + i - 1: token for q in questions for i, token in enumerate(q.answer)}
    best: dict[int, int] = {}
    for places, hidden in scorer.rows(ids, plan, sorted(rows), prompt=1):
        best |= zip(places, scorer.decoder.logits(hidden).argmax(dim=1).tolist(), strict=True)
    return [all(best[q.position + i - 1] == token for i, token in enumerate(q.answer)) for q in questions]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_directory(options.model)
    scorer = Scorer.load(options.model, device="cpu", dtype="float32")
    scalings = [{"rope_type": "default"}, *map(json.loads, options.scaling)]
    kept = ResultLog(options.keep, lambda entry: [bool(right) for right in entry["found"]])
    found = []
    for index, file in enumerate(find_files(options.text)):
        ids, questions = hide(
            tokenizer, read_text(file), options.max_len, options.seed + index, options.every, options.pool
        )
        if len(ids) <= options.max_len:
            raise SystemExit(f"{file} is shorter than {options.max_len} tokens")
        for scaling in scalings:
            key = result_key(scorer.identity, ids, [question.position for question in questions], scaling)
            answers = kept.find(key)
            if answers is None:
                with torch.inference_mode():
                    answers = ask(scorer, ids, questions, scaling)
                kept.add(key, answers, text=file.name, scaling=scaling, found=answers)
            print(f"{file.name}, {json.dumps(scaling)}: {sum(answers)} of {len(answers)}", flush=True)
            found += [
                {"text": file.name, "scaling": scaling, "position": q.position, "distance": q.distance, "found": right}
                for q, right in zip(questions, answers, strict=True)
            ]
    return {
        "date": datetime.date.today().isoformat(),
        "model": options.model.name,
        "max_len": options.max_len,
        "stretch": options.stretch,
        "questions": found,
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: a row per scaling, a column per stretch of positions, then the far ones among all."""
    ends = [*range(0, report["max_len"], report["stretch"]), report["max_len"]]
    spans = list(pairwise(ends))
    heads = [f"asked at {low:,}–{high:,}" for low, high in spans]
    lines = ["| scaling | " + " | ".join(heads) + " |", "|---" + "|--:" * len(heads) + "|"]
    names = list(dict.fromkeys(json.dumps(question["scaling"]) for question in report["questions"]))
    for name in names:
        own = [q for q in report["questions"] if json.dumps(q["scaling"]) == name]
        cells = [share([q["found"] for q in own if low <= q["position"] < high]) for low, high in spans]
        scaling = json.loads(name)
        label = " ".join(f"{value:g}" if isinstance(value, float | int) else str(value) for value in scaling.values())
        lines.append(f"| {'no scaling' if label == 'default' else label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def share(found: list[bool]) -> str:
    if not found:
        return ""
    ends = wilson(sum(found), len(found), CONFIDENCE)
    return f"{sum(found)} of {len(found)} ({100 * ends.low:.0f} to {100 * ends.high:.0f} %)"


def main() -> None:
    parser = make_parser(__doc__, max_len=16384, stretch=4096)
    parser.add_argument("--every", type=int, default=256, help="tokens of text between two notes")
    parser.add_argument(
        "--scaling", action="append", default=[], help="rotary scaling, as JSON; no scaling is always read"
    )
    parser.add_argument("--pool", type=int, default=10, help="notes before the first question")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="file of finished passes, which are not repeated")
    options = parser.parse_args()
    publish(measure(options), options.out, table)


if __name__ == "__main__":
    main()
