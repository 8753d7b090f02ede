"""The checks: each asks the same thing in two ways that must agree, and says how far the answers are apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from windlass.clients.conformance.asking import Answer, Asker, NotAskableError, distance

WORDS = (
    "the river ran past old stone houses and a boat came in from sea with salt bread wool lamp oil letters for every "
    "child who waited on cold steps while bells rang above narrow streets where traders sold apples glass rope iron"
).split()
REPEATS = 3
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found. effect, noise and bound: nats; None where nothing was measured."""

    name: str
    question: str
    verdict: str  # "holds", "differs" or "not askable"
    detail: str
    effect: float | None = None
    noise: float | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """effect: the largest distance between what must agree, in nats; asked: what was asked, for a reader."""

    effect: float
    asked: str


class Suite:
    """The checks against one server.

    trained: positions the model was trained on, None where unknown. context: the longest the server takes, None where
    it does not say. tolerance: nats below which a difference is rounding.
    """

    def __init__(self, asker: Asker, trained: int | None, context: int | None, tolerance: float, seed: int = 0) -> None:
        self.asker, self.trained, self.context, self.tolerance = asker, trained, context, tolerance
        self._random = random.Random(seed)
        self.noise = 0.0
        few, many = (self.asker.ask(self._words(n), 1, fresh=True).prompt_tokens for n in (16, 80))
        self._per_word = max((many - few) / 64, 0.1)
        self._extra = few - 16 * self._per_word

    def run(self, say: Callable[[str], None] = lambda line: None) -> list[CheckResult]:
        """Every check, one after another; `say` is told each check's name before it runs."""
        say("noise")
        self.noise = self._measure_noise()
        results = []
        for name, question, check in CHECKS:
            say(name)
            bound = max(self.tolerance, 3 * self.noise)
            try:
                found = check(self)
            except NotAskableError as reason:
                results.append(CheckResult(name, question, "not askable", str(reason)))
                continue
            verdict = "holds" if found.effect <= bound else "differs"
            results.append(CheckResult(name, question, verdict, found.asked, found.effect, self.noise, bound))
        return results

    # What the checks are made of.

    def _words(self, count: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(count))

    def _prompt(self, tokens: int) -> str:
        """A text of about `tokens` tokens that no earlier request began with."""
        if self.context is not None and tokens + 40 > self.context:
            raise NotAskableError(f"needs {tokens + 40} tokens, and the server takes {self.context}")
        return self._words(max(round((tokens - self._extra) / self._per_word), 4))

    def _just_below(self, tokens: int) -> str:
        """A text of `tokens` tokens or a few less, measured by asking; at most four requests."""
        words = self._prompt(tokens).split()
        for _ in range(4):
            over = self.asker.ask(" ".join(words), 1, fresh=True).prompt_tokens - tokens
            if -8 < over <= 0:
                return " ".join(words)
            count = max(round(abs(over) / self._per_word), 1)
            words = words[:-count] if over > 0 else words + self._words(count).split()
        raise NotAskableError(f"no text of {tokens} tokens was found: the tokenizer does not go by words")

    def _past(self) -> int:
        if self.trained is None:
            raise NotAskableError("the trained length is not known: give --trained-len")
        return self.trained

    def _short(self) -> int:
        return min((self.trained or 512) // 2, 256)

    def _measure_noise(self) -> float:
        prompt = self._prompt(self._short())
        answers = [self.asker.ask(prompt, 12, fresh=True) for _ in range(REPEATS)]
        return max(_apart(answers[0], other) for other in answers[1:])

    def _against_fresh(
        self, prompt: str, answer: Answer, cuts: Iterable[int], *, fresh: bool = True
    ) -> tuple[float, int]:
        """The greatest distance between the answer's steps and fresh requests of prompt + the answer so far.

        A cut where the text is not read back as the same number of tokens is passed over.
        """
        far, compared = 0.0, 0
        for cut in cuts:
            if cut >= len(answer.steps):
                continue
            text = "".join(step.token for step in answer.steps[:cut])
            if not answer.text.startswith(text):
                continue
            again = self.asker.ask(prompt + text, 1, fresh=fresh)
            if again.prompt_tokens != answer.prompt_tokens + cut:
                continue
            compared += 1
            far = max(far, distance(answer.steps[cut], again.steps[0]))
        if not compared:
            raise NotAskableError("no cut of the answer is read back as the same tokens: the answer is no plain text")
        return far, compared


def _apart(one: Answer, other: Answer) -> float:
    """The greatest distance of two answers to one prompt, up to the first step after their texts part."""
    far = 0.0
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        far = max(far, distance(mine, theirs))
        if mine.token != theirs.token:
            break
    return far


def continued(suite: Suite) -> Found:
    prompt = suite._prompt(suite._short())
    answer = suite.asker.ask(prompt, 32, fresh=True)
    far, compared = suite._against_fresh(prompt, answer, range(1, 32, 3))
    return Found(far, f"{answer.prompt_tokens} tokens and 32 of answer, against {compared} fresh requests")


def neighbour(suite: Suite) -> Found:
    past = suite._past()
    prompt, far, beside = suite._prompt(past // 4), 0.0, 0
    alone = suite.asker.ask(prompt, 24, fresh=True)
    for _ in range(REPEATS):
        long = suite._prompt(past + past // 4)
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(suite.asker.ask, long, 32, fresh=True)
            while True:
                mine = suite.asker.ask(prompt, 24, fresh=True)
                beside += 1
                far = max(far, _apart(alone, mine))
                if other.done() or beside >= 24:
                    break
            other.result()
    return Found(far, f"{alone.prompt_tokens} tokens alone, against {beside} times beside {past + past // 4}")


def prefix(suite: Suite) -> Found:
    far, hits = 0.0, []
    lengths = [suite._short()] + ([suite.trained + suite.trained // 4] if suite.trained else [])
    for length in lengths:
        try:
            begin = suite._prompt(min(length, suite._short()))
            long = begin + " " + suite._prompt(length)
        except NotAskableError:
            continue
        cold = [suite.asker.ask(text, 12, fresh=True) for text in (begin, long)]
        # The beginning first, then what extends it; then the beginning after the longer text was kept.
        for text, reference in ((begin, cold[0]), (long, cold[1]), (begin, cold[0]), (long, cold[1])):
            warm = suite.asker.ask(text, 12)
            hits.append(warm.cached or 0)
            far = max(far, _apart(reference, warm))
    told = f"the server tells of hits up to {max(hits)} tokens" if any(hits) else "the server tells of no hit"
    return Found(far, f"texts asked cold, then after their beginning and after a longer text; {told}")


def switch(suite: Suite) -> Found:
    past = suite._past()
    prompt = suite._just_below(past - 6)
    answer = suite.asker.ask(prompt, 36, fresh=True)
    first = max(past - answer.prompt_tokens, 0)
    if first + 2 >= len(answer.steps):
        raise NotAskableError(f"the answer ended before position {past}")
    far, compared = suite._against_fresh(prompt, answer, range(first + 1, len(answer.steps), 3))
    return Found(far, f"an answer from {answer.prompt_tokens} tokens across {past}, against {compared} fresh requests")


def stale(suite: Suite) -> Found:
    past = suite._past()
    prompt = suite._prompt(past - past // 8)
    answer = suite.asker.ask(prompt, 16)
    turn = prompt + answer.text + " " + suite._prompt(max(past // 4, 24))
    reference = suite.asker.ask(turn, 12, fresh=True)
    warm = suite.asker.ask(turn, 12)
    return Found(
        _apart(reference, warm),
        f"{answer.prompt_tokens} tokens, then a turn to {warm.prompt_tokens} past {past}: kept keys against fresh ones",
    )


def chunking(suite: Suite) -> Found:
    far, compared, taken = 0.0, 0, []
    top = min(suite.trained or 2048, suite.context or 2048)
    for chunk in CHUNKS:
        if chunk + 40 > top:
            break
        prompt = suite._just_below(chunk - 2)
        answer = suite.asker.ask(prompt, 14, fresh=True)
        try:
            apart, count = suite._against_fresh(prompt, answer, range(1, 14, 2))
        except NotAskableError:
            continue
        far, compared = max(far, apart), compared + count
        taken.append(chunk)
    if not taken:
        raise NotAskableError("no length near a usual chunk fits: the context is too short")
    prompts = [suite._prompt(length) for length in (24, 40, suite._short(), suite._short() // 2)]
    alone = [suite.asker.ask(text, 12, fresh=True) for text in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda text: suite.asker.ask(text, 12, fresh=True), prompts))
    far = max([far, *(_apart(one, other) for one, other in zip(alone, together, strict=True))])
    return Found(far, f"lengths around {', '.join(map(str, taken))} ({compared} requests), and 4 together")


CHECKS: tuple[tuple[str, str, Callable[[Suite], Found]], ...] = (
    ("continued", "Does a long answer equal a fresh one at that length?", continued),
    ("neighbour", "Does a neighbour's length leave mine alone?", neighbour),
    ("prefix", "Does a prefix hit leave the answer alone?", prefix),
    ("switch", "Is a scaling's change in mid-generation right?", switch),
    ("stale", "Are kept keys those of the new length?", stale),
    ("chunking", "Do chunks and batches leave the answer alone?", chunking),
)
