"""The checks: each asks the same thing in two ways that must agree, and says how far the answers are apart."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import combinations
from statistics import median
from threading import Event

from windlass.clients.conformance.answers import Agreement, Answer, CheckUnavailableError, overlap
from windlass.clients.conformance.suite import REPEATS, CheckOutcome, ConformanceSuite

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
REQUESTS_PER_PHASE = (
    6  # requests beside one neighbour, at most: while it reads its prompt, and as many while it answers
)
FILLER = " the"
NUM_TAILS, TAIL_WORDS = 5, 40  # texts behind it, and words of each
SHIFT_ALLOWANCE = 5  # times the bound: more than the first token's moving away does to a median
NO_HIT = "the server tells of no prefix hit, so no kept key is known to have been used"


def continued(suite: ConformanceSuite) -> CheckOutcome:
    tally = Agreement()
    prompt, answer = suite.begin(lambda: suite.prompt(suite.short()), 32)
    compared = suite.compare_with_fresh(prompt, answer, range(1, 32, 3), tally)
    return CheckOutcome(tally, f"{answer.prompt_tokens} tokens and 32 of answer, against {compared} fresh requests")


def neighbour(suite: ConformanceSuite) -> CheckOutcome:
    past, tally, shown, num_requests = suite.past(), Agreement(), 0, 0
    prompt = suite.prompt(past // 4)
    alone = suite.asker.ask(prompt, 24, fresh=True)
    for _ in range(REPEATS):
        long, mine, began = suite.prompt(past + past // 4), [], Event()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(suite.asker.ask, long, 64, fresh=True, began=began)
            other.add_done_callback(partial(_set, began))
            for answering in (False, True):
                for _ in range(REQUESTS_PER_PHASE):
                    if other.done() or began.is_set() is not answering:
                        break
                    mine.append(suite.asker.ask(prompt, 24, fresh=True))
                began.wait()
            neighbours = other.result()
        num_requests += len(mine)
        shown += sum(overlap(one, neighbours) for one in mine)
        for one in mine:
            tally.answers(alone, one)
    asked = f"{alone.prompt_tokens} tokens alone, against {num_requests} times beside {past + past // 4}"
    if not shown:
        return CheckOutcome(
            tally, asked, "the two were never seen to be answered at the same time: their parts never interleaved"
        )
    return CheckOutcome(tally, f"{asked}, {shown} of them seen to be answered at the same time")


def _set(event: Event, done: Future[Answer]) -> None:
    event.set()


def together(suite: ConformanceSuite) -> CheckOutcome:
    prompts, tally = [suite.prompt(length) for length in (24, 40, suite.short(), suite.short() // 2)], Agreement()
    alone = [suite.asker.ask(text, 32, fresh=True) for text in prompts]
    # Short answers may miss each other on a busy machine: then they are asked for once more.
    for _ in range(REPEATS):
        with ThreadPoolExecutor(len(prompts)) as pool:
            at_once = list(pool.map(lambda text: suite.asker.ask(text, 32, fresh=True), prompts))
        for one, other in zip(alone, at_once, strict=True):
            tally.answers(one, other)
        pairs = list(combinations(at_once, 2))
        shown = sum(overlap(one, other) for one, other in pairs)
        if shown:
            break
    asked = f"{len(prompts)} requests alone, then at once; {shown} of {len(pairs)} pairs seen at the same time"
    return CheckOutcome(tally, asked, None if shown else "no two were seen to be answered at the same time")


def prefix(suite: ConformanceSuite) -> CheckOutcome:
    tally = Agreement()
    hits: dict[int, int] = {}  # by length: tokens of the longest hit
    lengths = [suite.short()] + ([suite.trained + suite.trained // 4] if suite.trained else [])
    for length in lengths:
        try:
            suite.fits(length + suite.short())
        except CheckUnavailableError:
            continue
        begin = suite.prompt(min(length, suite.short()))
        long = begin + " " + suite.prompt(length)
        cold = [suite.asker.ask(text, 12, fresh=True) for text in (begin, long)]
        # The beginning first, then what extends it; then the beginning after the longer text was kept.
        for text, reference in ((begin, cold[0]), (long, cold[1]), (begin, cold[0]), (long, cold[1])):
            warm = suite.asker.ask(text, 12)
            hits[length] = max(hits.get(length, 0), warm.cached or 0)
            tally.answers(reference, warm)
    if not hits:
        raise CheckUnavailableError(
            f"context {suite.context}: it needs more for two texts of which one begins the other"
        )
    hits_text = ", ".join(f"hits of up to {hit} tokens at about {length}" for length, hit in hits.items())
    asked = f"texts asked cold, then after their beginning and after a longer text: {hits_text}"
    return CheckOutcome(tally, asked, None if any(hits.values()) else NO_HIT)


def switch(suite: ConformanceSuite) -> CheckOutcome:
    past, tally = suite.past(), Agreement()
    # A quarter past it: the frequencies of dynamic NTK change little by little.
    length = min(max(past // 4, 36), 256)
    suite.fits(past, length)
    prompt, answer = suite.begin(lambda: suite.just_below(past - 6), length)
    first = max(past - answer.prompt_tokens, 0)
    if first + 2 >= len(answer.steps):
        raise CheckUnavailableError(f"the answer ended before position {past}")
    compared = suite.compare_with_fresh(
        prompt, answer, range(first + 1, len(answer.steps), max(length // 16, 3)), tally
    )
    asked = f"an answer from {answer.prompt_tokens} tokens across {past} to {answer.prompt_tokens + len(answer.steps)}"
    return CheckOutcome(tally, f"{asked}, against {compared} fresh requests")


def stale(suite: ConformanceSuite) -> CheckOutcome:
    past, tally = suite.past(), Agreement()
    prompt = suite.prompt(past - past // 8)
    answer = suite.asker.ask(prompt, 16)
    turn = prompt + answer.text + " " + suite.prompt(max(past // 4, 24))
    # The kept keys first: a server that keeps one text a slot would afterwards have those of the fresh request.
    warm = suite.asker.ask(turn, 12)
    tally.answers(suite.asker.ask(turn, 12, fresh=True), warm)
    kept, first = warm.cached or 0, answer.prompt_tokens + len(answer.steps)
    inconclusive = None if kept else NO_HIT
    if kept > first:
        inconclusive = "more was kept than the first turn had, so it is of an earlier run: give another --seed"
    asked = f"{answer.prompt_tokens} tokens, then a turn to {warm.prompt_tokens} past {past}"
    return CheckOutcome(tally, f"{asked}: {kept} kept against fresh ones", inconclusive)


def chunking(suite: ConformanceSuite) -> CheckOutcome:
    tally, compared, taken = Agreement(), 0, []
    top = min(suite.trained or 2048, suite.context or 2048)
    for chunk in CHUNKS:
        if chunk + 40 > top:
            break
        # An answer that begins just below the boundary: its fresh requests are read in one chunk more.
        try:
            prompt, answer = suite.begin(partial(suite.just_below, chunk - 3), 14)
            compared += suite.compare_with_fresh(prompt, answer, range(1, 14, 2), tally)
        except CheckUnavailableError:
            continue
        taken.append(chunk)
    if not taken:
        raise CheckUnavailableError("no length near a usual chunk fits: the context is too short")
    return CheckOutcome(tally, f"lengths around {', '.join(map(str, taken))} ({compared} requests)")


def far(suite: ConformanceSuite) -> CheckOutcome:
    """Texts behind n and behind n + 1, n + 2, … times the same word: rotation must not see the shift.

    Attention to the first token, then one or more further away, does see it a little. So the verdict goes by the median
    of several texts, and what is above the bound differs only when it is far above. Whether those texts' answers depend
    on the order of words at all goes by their median too.
    """
    suite.fits(suite.far_len)
    if suite.asker.by_text:
        raise CheckUnavailableError("it needs log-probabilities: a text does not tell angles that are slightly wrong")
    few, many = (suite.asker.ask(FILLER * count, 1).prompt_tokens for count in (32, 64))
    each = max((many - few) / 32, 0.1)
    tails = [suite.words(TAIL_WORDS).split() for _ in range(NUM_TAILS)]
    count = round(suite.far_len / each) - 2 * TAIL_WORDS

    def ask(more: int, words: list[str]) -> Answer:
        return suite.asker.ask(FILLER * (count + more) + " " + " ".join(words), 1)

    # Those behind as many words one after another: a server that keeps prefixes reads the long part once.
    first, apart, compared = [ask(0, tail) for tail in tails], [], Agreement()
    swapped = [
        Agreement.between(answer, ask(0, tail[:-4] + tail[:-5:-1])).far
        for answer, tail in zip(first, tails, strict=True)
    ]
    for more, (answer, tail) in enumerate(zip(first, tails, strict=True), 1):
        one = Agreement.between(answer, ask(more, tail))
        apart.append(one.far)
        compared.compared, compared.parted = compared.compared + one.compared, compared.parted + one.parted
    compared.far = median(apart)
    asked = (
        f"{NUM_TAILS} texts of {first[0].prompt_tokens} tokens, all but the end one word, then 1 to {NUM_TAILS} words more: the "
        f"median; the greatest {max(apart):.4f} nats, with the last words swapped {median(swapped):.4f}"
    )
    allowed = SHIFT_ALLOWANCE * suite.bound()
    blind = "the answer there hardly depends on the order of words, so wrong angles would not show"
    return CheckOutcome(compared, asked, blind if median(swapped) <= allowed else None, allowed)


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
