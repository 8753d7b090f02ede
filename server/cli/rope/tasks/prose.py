"""Generated prose: the text around the facts where nobody gives one. Deterministic; knows no model and no task.

A cast of people goes about its days. Each time a person appears, trade and town are told again, so that those words follow
from what stands far back and from nothing nearer: what a long context is good for can be seen in the loss of such words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from windlass.server.cli.rope.tasks.vocabulary import EVENTS, FIRST_NAMES, LAST_NAMES, TOWNS, TRADES

_SENTENCES_EACH = 5  # a paragraph's


def paragraphs(rng: random.Random, cast: int) -> Iterator[str]:
    """Paragraphs without end. cast: people who take turns at random, so one comes back after as many sentences or so."""
    names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    people = [(name, rng.choice(TRADES), rng.choice(TOWNS)) for name in rng.sample(names, min(cast, len(names)))]
    while True:
        sentences = []
        for _ in range(_SENTENCES_EACH):
            name, trade, town = rng.choice(people)
            event = " ".join(rng.choice(EVENTS).split())
            sentences.append(f"{name}, the {trade} from {town}, {event}.")
        yield " ".join(sentences)
