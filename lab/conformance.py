"""Rotary conformance checks of any server over HTTP, with verdicts and reports.

Each check makes two requests that must give the same answer, and reports the difference of their log-probabilities in nats.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from statistics import median
from threading import Event
from typing import Any

from windlass.clients.terminal import CommandError
from windlass.lab.conformance_client import (
    MAX_TIE_SHARE,
    Agreement,
    Answer,
    CheckUnavailableError,
    ConformanceClient,
    overlap,
)

WORDS = (
    "the river ran past old stone houses and a boat came in from sea with salt bread wool lamp oil letters for every "
    "child who waited on cold steps while bells rang above narrow streets where traders sold apples glass rope iron"
).split()

REPEATS = 3

ANSWER_RESERVE = 72  # most tokens of an answer and of a beginning of sequence

MIN_DIFFERING_TOKENS = 3  # where only texts can be compared; fewer may all be near ties


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """Measurements of one check.

    requests: their description. inconclusive: why equality shows nothing here, or None. allowed: largest harmless
    difference in nats; a difference above the bound but not above this is inconclusive.
    """

    tally: Agreement
    requests: str
    inconclusive: str | None = None
    allowed: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Verdict of one check.

    verdict: "holds"; "differs"; "not shown" (inconclusive: nothing differs, but the case did not occur, or only texts could be
    compared and a few tokens differ); "not askable".
    effect, noise, bound: nats; None where nothing was measured. compared, parted: number of steps, and of those whose tokens
    differ.
    """

    name: str
    question: str
    verdict: str
    detail: str
    effect: float | None = None
    noise: float | None = None
    bound: float | None = None
    compared: int = 0
    parted: int = 0


class ConformanceSuite:
    """Checks of one server.

    trained: positions the model was trained on, None if unknown. context: the server's longest context, None if it does not
    report it. tolerance: differences up to this many nats are rounding. far_len: tokens of the texts that check the precision of
    angles. lost: why the server stopped answering, None if it did not.
    """

    def __init__(
        self,
        client: ConformanceClient,
        trained: int | None,
        context: int | None,
        tolerance: float,
        seed: int = 0,
        far_len: int = 100_000,
    ) -> None:
        self.client, self.trained, self.context, self.tolerance = client, trained, context, tolerance
        self.far_len = far_len
        self.lost: str | None = None
        self._random = random.Random(seed)
        self.noise = Agreement()
        once, twice = len(WORDS), 2 * len(WORDS)
        few, many = (self.client.ask(self.words(n), 1, fresh=True).prompt_tokens for n in (once, twice))
        self._per_word = max((many - few) / once, 0.1)
        self._extra = few - once * self._per_word

    def run(
        self,
        checks: Sequence[tuple[str, str, Callable[[ConformanceSuite], CheckOutcome]]],
        report: Callable[[str], None] = lambda line: None,
    ) -> list[CheckResult]:
        """Run the checks in order; `report` is called with each check's name before it runs.

        If the server stops answering, the remaining checks are "not askable" and earlier results are retained.
        """
        report("noise")
        self.noise = self._measure_noise()
        results = []
        for name, question, check in checks:
            report(name)
            try:
                results.append(self._judge(name, question, check(self)))
            except CheckUnavailableError as reason:
                results.append(CheckResult(name, question, "not askable", str(reason)))
            except CommandError as error:
                self.lost = str(error)
                results.append(CheckResult(name, question, "not askable", self.lost))
        return results

    def _judge(self, name: str, question: str, outcome: CheckOutcome) -> CheckResult:
        tally, detail = outcome.tally, outcome.requests
        if self.client.by_text:
            share = tally.parted / max(tally.compared, 1)
            usual = self.noise.parted / max(self.noise.compared, 1)
            detail += f"; by text alone: {tally.parted} of {tally.compared} tokens differ"
            differs = tally.parted >= MIN_DIFFERING_TOKENS and share > max(MAX_TIE_SHARE, 3 * usual)
            effect = noise = bound = None
        else:
            effect, noise, bound = tally.max_distance, self.noise.max_distance, self.bound()
            differs = effect > max(bound, outcome.allowed)
        inconclusive = None if differs else outcome.inconclusive
        if effect is not None and bound is not None and bound < effect <= outcome.allowed:
            inconclusive = inconclusive or f"up to {outcome.allowed:.4f} nats may be harmless"
        if not differs and self.client.by_text and tally.parted:
            inconclusive = inconclusive or "this few may be near ties"
        verdict = "differs" if differs else "not shown" if inconclusive else "holds"
        if inconclusive:
            detail += f"; {inconclusive}"
        return CheckResult(name, question, verdict, detail, effect, noise, bound, tally.compared, tally.parted)

    def bound(self) -> float:
        """Largest difference in nats that counts as rounding."""
        return max(self.tolerance, 3 * self.noise.max_distance)

    def words(self, count: int) -> str:
        """Random words, each about equally often, so that the number of tokens follows from the number of words."""
        sampled: list[str] = []
        while len(sampled) < count:
            sampled += self._random.sample(WORDS, len(WORDS))
        return " ".join(sampled[:count])

    def prompt(self, tokens: int) -> str:
        """A text of about `tokens` tokens with a beginning that no earlier request had."""
        self.fits(tokens)
        return self.words(max(round((tokens - self._extra) / self._per_word), 4))

    def fits(self, tokens: int, reserve: int = ANSWER_RESERVE) -> None:
        """Raise CheckUnavailableError if `tokens` tokens and an answer of `reserve` exceed the context."""
        if self.context is not None and tokens + reserve > self.context:
            raise CheckUnavailableError(f"context {self.context}: it needs {tokens + reserve} tokens")

    def just_below(self, tokens: int) -> str:
        """A text of `tokens` tokens or up to 7 fewer, measured by at most four requests."""
        words = self.prompt(tokens).split()
        for _ in range(4):
            over = self.client.ask(" ".join(words), 1, fresh=True).prompt_tokens - tokens
            if -8 < over <= 0:
                return " ".join(words)
            count = max(round(abs(over) / self._per_word), 1)
            words = words[:-count] if over > 0 else words + self.words(count).split()
        raise CheckUnavailableError(
            f"no text of {tokens} tokens was found: the number of tokens does not follow the number of words"
        )

    def begin_answer(self, make: Callable[[], str], length: int) -> tuple[str, Answer]:
        """A prompt of `make` and its answer of `length` tokens, to be sent again as one text.

        Of up to four tries, the first answer that does not continue the prompt's last word: a continued word could be tokenized
        differently, even into the same number of tokens.
        """
        for _ in range(4):
            prompt = make()
            answer = self.client.ask(prompt, length, fresh=True)
            if not (prompt[-1:].isalnum() and answer.text[:1].isalnum()):
                break
        return prompt, answer

    def require_trained_len(self) -> int:
        """The trained length. Raises CheckUnavailableError if it is unknown."""
        if self.trained is None:
            raise CheckUnavailableError("the trained length is not known: give --trained-len")
        return self.trained

    def short_len(self) -> int:
        """Length in tokens of a text well within the trained length."""
        return min((self.trained or 512) // 2, 256)

    def _measure_noise(self) -> Agreement:
        prompt, tally = self.prompt(self.short_len()), Agreement()
        answers = [self.client.ask(prompt, 12, fresh=True) for _ in range(REPEATS)]
        for other in answers[1:]:
            tally.answers(answers[0], other)
        return tally

    def compare_with_fresh(self, prompt: str, answer: Answer, cuts: Iterable[int], tally: Agreement) -> int:
        """Compare the answer's steps with fresh requests of the prompt + the answer up to each cut; return their number.

        A cut whose text is tokenized into another number of tokens is skipped.
        """
        compared = 0
        for cut in cuts:
            if cut >= len(answer.steps):
                continue
            text = "".join(step.token for step in answer.steps[:cut])
            if not answer.text.startswith(text):
                continue
            again = self.client.ask(prompt + text, 1, fresh=True)
            if again.prompt_tokens != answer.prompt_tokens + cut:
                continue
            compared += 1
            tally.step(answer.steps[cut], again.steps[0])
        if not compared:
            raise CheckUnavailableError(
                "no beginning of the answer is tokenized into the same tokens: the answer is not plain text"
            )
        return compared


CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)

REQUESTS_PER_PHASE = 6  # most requests during a neighbour's prefill, and during its answer

FILLER = " the"

NUM_TAILS, TAIL_WORDS = 5, 40  # texts after the filler, and words of each

SHIFT_ALLOWANCE = 5  # times the bound; above the effect on a median of the first token moving away

NO_HIT = "the server reports no prefix hit, so no cached key is known to have been used"


def continued(suite: ConformanceSuite) -> CheckOutcome:
    tally = Agreement()
    prompt, answer = suite.begin_answer(lambda: suite.prompt(suite.short_len()), 32)
    compared = suite.compare_with_fresh(prompt, answer, range(1, 32, 3), tally)
    return CheckOutcome(
        tally, f"{answer.prompt_tokens} tokens and an answer of 32, compared with {compared} fresh requests"
    )


def neighbour(suite: ConformanceSuite) -> CheckOutcome:
    trained, tally, shown, num_requests = suite.require_trained_len(), Agreement(), 0, 0
    prompt = suite.prompt(trained // 4)
    alone = suite.client.ask(prompt, 24, fresh=True)
    for _ in range(REPEATS):
        long, mine, began = suite.prompt(trained + trained // 4), [], Event()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(suite.client.ask, long, 64, fresh=True, began=began)
            other.add_done_callback(lambda _, began=began: began.set())  # type: ignore[misc]
            for answering in (False, True):
                for _ in range(REQUESTS_PER_PHASE):
                    if other.done() or began.is_set() is not answering:
                        break
                    mine.append(suite.client.ask(prompt, 24, fresh=True))
                began.wait()
            neighbours = other.result()
        num_requests += len(mine)
        shown += sum(overlap(one, neighbours) for one in mine)
        for one in mine:
            tally.answers(alone, one)
    requests = f"{alone.prompt_tokens} tokens alone, and {num_requests} times next to {trained + trained // 4}"
    if not shown:
        return CheckOutcome(
            tally,
            requests,
            "the two were never observed to be answered at the same time: their parts never interleaved",
        )
    return CheckOutcome(tally, f"{requests}, {shown} of them observed to be answered at the same time")


def together(suite: ConformanceSuite) -> CheckOutcome:
    prompts, tally = (
        [suite.prompt(length) for length in (24, 40, suite.short_len(), suite.short_len() // 2)],
        Agreement(),
    )
    alone = [suite.client.ask(text, 32, fresh=True) for text in prompts]
    # On a busy machine short answers may not overlap; then they are requested again.
    for _ in range(REPEATS):
        with ThreadPoolExecutor(len(prompts)) as pool:
            at_once = list(pool.map(lambda text: suite.client.ask(text, 32, fresh=True), prompts))
        for one, other in zip(alone, at_once, strict=True):
            tally.answers(one, other)
        pairs = list(combinations(at_once, 2))
        shown = sum(overlap(one, other) for one, other in pairs)
        if shown:
            break
    requests = (
        f"{len(prompts)} requests alone, then concurrently; {shown} of {len(pairs)} pairs observed at the same time"
    )
    return CheckOutcome(tally, requests, None if shown else "no two were observed to be answered at the same time")


def prefix(suite: ConformanceSuite) -> CheckOutcome:
    tally = Agreement()
    hits: dict[int, int] = {}  # length -> tokens of the longest hit
    lengths = [suite.short_len()] + ([suite.trained + suite.trained // 4] if suite.trained else [])
    for length in lengths:
        try:
            suite.fits(length + suite.short_len())
        except CheckUnavailableError:
            continue
        begin = suite.prompt(min(length, suite.short_len()))
        long = begin + " " + suite.prompt(length)
        cold = [suite.client.ask(text, 12, fresh=True) for text in (begin, long)]
        # The beginning, then the text that extends it; then both again, when the longer text is cached.
        for text, reference in ((begin, cold[0]), (long, cold[1]), (begin, cold[0]), (long, cold[1])):
            warm = suite.client.ask(text, 12)
            hits[length] = max(hits.get(length, 0), warm.cached or 0)
            tally.answers(reference, warm)
    if not hits:
        raise CheckUnavailableError(f"context {suite.context}: too short for two texts of which one begins the other")
    hits_text = ", ".join(f"hits of up to {hit} tokens at about {length}" for length, hit in hits.items())
    requests = f"texts requested cold, then after their beginning and after a longer text: {hits_text}"
    return CheckOutcome(tally, requests, None if any(hits.values()) else NO_HIT)


def switch(suite: ConformanceSuite) -> CheckOutcome:
    trained, tally = suite.require_trained_len(), Agreement()
    # A quarter past the trained length, because the frequencies of dynamic NTK change gradually.
    length = min(max(trained // 4, 36), 256)
    suite.fits(trained, length)
    prompt, answer = suite.begin_answer(lambda: suite.just_below(trained - 6), length)
    first = max(trained - answer.prompt_tokens, 0)
    if first + 2 >= len(answer.steps):
        raise CheckUnavailableError(f"the answer ended before position {trained}")
    compared = suite.compare_with_fresh(
        prompt, answer, range(first + 1, len(answer.steps), max(length // 16, 3)), tally
    )
    requests = (
        f"an answer from {answer.prompt_tokens} tokens across {trained} to {answer.prompt_tokens + len(answer.steps)}"
    )
    return CheckOutcome(tally, f"{requests}, compared with {compared} fresh requests")


def stale(suite: ConformanceSuite) -> CheckOutcome:
    trained, tally = suite.require_trained_len(), Agreement()
    prompt = suite.prompt(trained - trained // 8)
    answer = suite.client.ask(prompt, 16)
    turn = prompt + answer.text + " " + suite.prompt(max(trained // 4, 24))
    # Cached keys first: a server that caches one text per slot would later use those of the fresh request.
    warm = suite.client.ask(turn, 12)
    tally.answers(suite.client.ask(turn, 12, fresh=True), warm)
    cached, first = warm.cached or 0, answer.prompt_tokens + len(answer.steps)
    inconclusive = None if cached else NO_HIT
    if cached > first:
        inconclusive = "more was cached than the first turn had, so it is from an earlier run: give another --seed"
    requests = f"{answer.prompt_tokens} tokens, then a turn to {warm.prompt_tokens} past {trained}"
    return CheckOutcome(tally, f"{requests}: {cached} cached, compared with fresh ones", inconclusive)


def chunking(suite: ConformanceSuite) -> CheckOutcome:
    tally, compared, used = Agreement(), 0, []
    top = min(suite.trained or 2048, suite.context or 2048)
    for chunk in CHUNKS:
        if chunk + 40 > top:
            break
        # The answer begins just below a chunk boundary, so its fresh requests take one chunk more.
        try:
            prompt, answer = suite.begin_answer(partial(suite.just_below, chunk - 3), 14)
            compared += suite.compare_with_fresh(prompt, answer, range(1, 14, 2), tally)
        except CheckUnavailableError:
            continue
        used.append(chunk)
    if not used:
        raise CheckUnavailableError("no length near a usual chunk fits: the context is too short")
    return CheckOutcome(tally, f"lengths around {', '.join(map(str, used))} ({compared} requests)")


def far(suite: ConformanceSuite) -> CheckOutcome:
    """Texts after n, n + 1, n + 2, … repetitions of one word: rotary attention must not depend on the shift.

    It does a little, because the first token moves further away. So the median over several texts decides, and only a
    difference far above the bound counts. Whether the answers depend on the order of words at all is decided by a median too.
    """
    suite.fits(suite.far_len)
    if suite.client.by_text:
        raise CheckUnavailableError("it needs log-probabilities: texts do not reveal slightly wrong angles")
    few, many = (suite.client.ask(FILLER * count, 1).prompt_tokens for count in (32, 64))
    each = max((many - few) / 32, 0.1)
    tails = [suite.words(TAIL_WORDS).split() for _ in range(NUM_TAILS)]
    count = round(suite.far_len / each) - 2 * TAIL_WORDS

    def ask(more: int, words: list[str]) -> Answer:
        return suite.client.ask(FILLER * (count + more) + " " + " ".join(words), 1)

    # Texts after the same filler are requested in sequence: a server with a prefix cache computes the filler once.
    first, distances, tally = [ask(0, tail) for tail in tails], [], Agreement()
    swapped = [
        Agreement.between(answer, ask(0, tail[:-4] + tail[:-5:-1])).max_distance
        for answer, tail in zip(first, tails, strict=True)
    ]
    for more, (answer, tail) in enumerate(zip(first, tails, strict=True), 1):
        one = Agreement.between(answer, ask(more, tail))
        distances.append(one.max_distance)
        tally.compared, tally.parted = tally.compared + one.compared, tally.parted + one.parted
    tally.max_distance = median(distances)
    requests = (
        f"{NUM_TAILS} texts of {first[0].prompt_tokens} tokens, one repeated word except for the end, then 1 to "
        f"{NUM_TAILS} words more: the median; the largest {max(distances):.4f} nats, with the last words swapped "
        f"{median(swapped):.4f}"
    )
    allowed = SHIFT_ALLOWANCE * suite.bound()
    insensitive = "the answer there hardly depends on the order of words, so wrong angles would not show"
    return CheckOutcome(tally, requests, insensitive if median(swapped) <= allowed else None, allowed)


CHECKS: tuple[tuple[str, str, Callable[[ConformanceSuite], CheckOutcome]], ...] = (
    ("continued", "Does a long answer equal a fresh one at that length?", continued),
    ("neighbour", "Does a neighbour's length leave mine alone?", neighbour),
    ("together", "Does a batch leave the answer alone?", together),
    ("prefix", "Does a prefix hit leave the answer alone?", prefix),
    ("switch", "Is a scaling's change in mid-generation right?", switch),
    ("stale", "Are kept keys those of the new length?", stale),
    ("chunking", "Do chunks leave the answer alone?", chunking),
    ("far", "Are angles precise at far positions?", far),
)


def to_json(server: str, model: str, results: Sequence[CheckResult], seed: int) -> dict[str, Any]:
    return {"server": server, "model": model, "seed": seed, "checks": [asdict(result) for result in results]}


def to_lines(results: Sequence[CheckResult]) -> list[str]:
    """Two lines per check: the verdict with its figures, then the question and its details."""
    lines = []
    for result in results:
        lines.append(f"{result.name:<10} {result.verdict:<12} {_figures(result)}".rstrip())
        lines.append(f"{'':<10} {result.question} {result.detail}")
    return lines


def to_markdown(server: str, model: str, results: Sequence[CheckResult]) -> str:
    lines = [
        f"# Rotary positions of `{model}` at {server}",
        "",
        "Distances are the largest change of a token's log-probability, in nats.",
        "",
        "| check | verdict | distance | repeated request | allowed | details |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        figures = " | ".join("–" if value is None else f"{value:.4f}" for value in (one.effect, one.noise, one.bound))
        detail = " ".join(f"{one.question} {one.detail}".replace("|", "\\|").split())
        lines.append(f"| {one.name} | {one.verdict} | {figures} | {detail} |")
    return "\n".join(lines) + "\n"


def exit_status(results: Sequence[CheckResult]) -> int:
    """0: something holds and nothing differs; 1: something differs; 2: every check is inconclusive or unavailable."""
    if any(result.verdict == "differs" for result in results):
        return 1
    return 0 if any(result.verdict == "holds" for result in results) else 2


def _figures(result: CheckResult) -> str:
    if result.effect is None or result.noise is None or result.bound is None:
        return ""
    return f"{result.effect:.4f} nats (repeated request {result.noise:.4f}, allowed {result.bound:.4f})"
