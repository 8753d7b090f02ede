"""Documents, statistics and verdicts of `rope sweep --tasks`."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.toy_tokenizers import byte_level, llama_style

from windlass.engine.errors import LoadError
from windlass.engine.interface.context import ContextRule
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup
from windlass.lab import retrieval_documents
from windlass.lab.candidates import TaskCandidate, task_candidates
from windlass.lab.retrieval_documents import (
    ALL_TASKS,
    TASKS,
    THINGS,
    Document,
    DocumentKind,
    DocumentMaker,
    Materials,
    Question,
)
from windlass.lab.retrieval_results import (
    DocumentReadings,
    PairedDifference,
    Reading,
    TaskSweep,
    judge,
    mcnemar,
    paired_bootstrap,
)
from windlass.server.text.tokenizer import Tokenizer

LENGTH = 12_000


def maker(
    tokenizer: Tokenizer, seed: int = 1, texts: dict[str, str] | None = None, kind: DocumentKind = "prose"
) -> DocumentMaker:
    return DocumentMaker(tokenizer, ALL_TASKS, texts or {}, seed=seed, trained_len=2048, kind=kind)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def test_length_facts_and_final_segment_of_a_document(tokenizer: Tokenizer) -> None:
    document = maker(tokenizer).make(LENGTH, 0)
    longest = max(len(q.ending) + max(map(len, q.choices)) for q in document.questions)
    assert len(document.ids) + longest == LENGTH
    assert Counter(q.task for q in document.questions) == {
        "passkey": 1,
        "needle": 9,
        "recall": 9,
        "multihop": 6,
        "tally": 4,
    }
    text = tokenizer.decode(document.ids)
    for question in document.questions:
        right, *wrong = (tokenizer.decode(choice) for choice in question.choices)
        ending = tokenizer.decode(question.ending)
        assert len({right, *wrong}) == 4 and right.endswith(".")
        assert tokenizer.decode(question.choices[0][: question.answer_len]) == right.removesuffix(".")
        statement = ending.splitlines()[-1].split("? ")[-1]
        if question.task == "tally":
            store = statement.removeprefix("The item that was delivered most often to the ").removesuffix(" store is:")
            items = Counter(re.findall(rf"Delivery to the {store} store: (\w+)\.", text))
            assert items == {right.strip(" ."): 5} | {item.strip(" ."): 2 for item in wrong}
            continue
        if question.task == "multihop":
            name = statement.removeprefix("So the value of ").removesuffix(" is")
            for _ in range(2):
                (line,) = [part for part in text.split(".") if part.strip().startswith(f"Let {name} be the same as ")]
                name = line.split()[-1]
            statement = f"Let {name} be"
        assert f"{statement}{right}" in text
        assert sum(choice in text for choice in wrong) >= 2  # most wrong choices are in the text, too
    segment = tokenizer.decode(document.ids[-document.segment :])
    assert not any(mark in segment for mark in ("pass key", "magic number", "Entry:", "be the same", "Delivery"))
    needles = [q.depth for q in document.questions if q.task == "needle"]
    assert needles == [i / 8 for i in range(9)]
    values = [tokenizer.decode(q.choices[0]) for q in document.questions if q.task == "needle"]
    places = [text.index(value) / len(text) for value in values]
    assert places == sorted(places) and places[0] < 0.1 and 0.8 < places[-1] < 1


def test_documents_of_code(tokenizer: Tokenizer) -> None:
    """Python itself answers the questions: the document is executed, but for its last, cut function."""
    document = maker(tokenizer, kind="code").make(LENGTH, 0)
    assert document.label == "12,000 tokens, code 1"
    assert Counter(q.task for q in document.questions) == {"function": 9, "calls": 6}
    program: dict[str, Any] = {}
    text = tokenizer.decode(document.ids)
    exec(text[: text.rindex("\n\n\n")], program)
    described = {f.__doc__: name for name, f in program.items() if getattr(f, "__doc__", None) and name[0] != "_"}
    for question in document.questions:
        right, *wrong = (tokenizer.decode(choice).strip(" .") for choice in question.choices)
        asked = tokenizer.decode(question.ending).splitlines()[-1]
        if question.task == "function":
            assert described[asked.split("'")[1]] == right and set(wrong) < set(described.values())
        else:
            assert program[asked.removeprefix("# ").removesuffix("() returns")]() == int(right)


def test_code_is_divided_at_definitions(tokenizer: Tokenizer) -> None:
    file = Path(retrieval_documents.__file__).read_text(encoding="utf-8")
    document = maker(tokenizer, texts={"own.py": file}, kind="code").make(LENGTH, 0)
    text = tokenizer.decode(document.ids)
    assert "# Below is a long program" in text and "def paragraphs(" in text
    for after in re.findall(r"    return count \* \d+\n+(.*)\n", text):
        assert re.match(r"\s*(@|def |async def |class )", after), after


def test_documents_depend_on_seed_number_and_length(tokenizer: Tokenizer) -> None:
    first = maker(tokenizer).make(LENGTH, 0)
    assert maker(tokenizer).make(LENGTH, 0) == first
    others = [
        maker(tokenizer, 2).make(LENGTH, 0),
        maker(tokenizer).make(LENGTH, 1),
        maker(tokenizer).make(LENGTH + 100, 0),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 4


def test_no_double_space_with_tokenizers_that_add_one() -> None:
    tokenizer = Tokenizer(llama_style())
    text = tokenizer.decode(maker(tokenizer).make(15_000, 0).ids)
    assert "  Entry:" not in text and " Entry:" in text


def test_custom_text_is_read_from_its_beginning(tokenizer: Tokenizer) -> None:
    text = "\n\n".join(f"Paragraph {i}. It says little. It ends here." for i in range(800))
    made = maker(tokenizer, texts={"a": text}).make(LENGTH, 0)
    words = tokenizer.decode(made.ids)
    assert "\n\nParagraph 0." in words and words.index("Paragraph 10.") < words.index("Paragraph 30.")
    with pytest.raises(LoadError, match=r"--text a has fewer than .* tokens"):
        maker(tokenizer, texts={"a": "Too short."}).make(LENGTH, 0)


def test_reported_minimum_length_suffices(tokenizer: Tokenizer) -> None:
    with pytest.raises(LoadError, match="documents of about") as refused:
        maker(tokenizer).make(500, 0)
    least = int(str(refused.value).split("about ")[1].split()[0])
    assert maker(tokenizer).make(int(least * 1.05), 0).questions


@pytest.mark.parametrize("task", TASKS)
def test_tasks_draw_without_repetition(task: str) -> None:
    assert len(set(THINGS)) == len(THINGS)
    rng = random.Random(3)
    hidden = TASKS[task](Materials(rng, iter(THINGS)))
    for question in hidden.questions:
        assert question.answer not in question.wrong and len(set(question.wrong)) == 3
        assert 0 <= question.depth <= 1


def test_mcnemar_is_the_binomial_test_of_discordant_pairs() -> None:
    """Compare with all outcomes of as many fair coins."""
    for a, b, both in [(1, 9, 4), (0, 5, 0), (3, 3, 7), (0, 0, 5)]:
        first = [True] * a + [False] * b + [True] * both
        second = [False] * a + [True] * b + [True] * both
        outcomes = [sum(coins) for coins in itertools.product((0, 1), repeat=a + b)]
        as_far = [o for o in outcomes if abs(o - (a + b) / 2) >= abs(a - b) / 2]
        assert mcnemar(first, second) == pytest.approx(len(as_far) / len(outcomes))


def test_bootstrap_resamples_units() -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(0.5, 1.0, 200).tolist()
    alone = paired_bootstrap([[value] for value in values])
    assert alone.mean == pytest.approx(np.mean(values)) and alone.interval is not None
    half_width = 1.96 * np.std(values) / np.sqrt(200)
    assert alone.interval.low == pytest.approx(alone.mean - half_width, abs=0.02)
    assert alone.interval.high == pytest.approx(alone.mean + half_width, abs=0.02)
    # Twenty equal values of a unit count as one.
    together = paired_bootstrap([[value] * 20 for value in values[:10]])
    single = paired_bootstrap([[value] for value in values[:10]])
    assert together.interval is not None and single.interval is not None
    assert together.interval.low == pytest.approx(single.interval.low)
    assert together.interval.high == pytest.approx(single.interval.high)
    assert paired_bootstrap([[1.0]] * 5).interval is None  # too few
    assert paired_bootstrap([[]] * 9).interval is None


def test_difference_is_certain_if_interval_and_test_agree() -> None:
    sure = paired_bootstrap([[1.0]] * 8 + [[0.0]] * 2)
    assert sure.is_certain and not replace(sure, p_value=0.06).is_certain
    assert not PairedDifference(1.0, None, 0.001).is_certain


PLAIN = TaskCandidate("no scaling", "none", None)
YARN = TaskCandidate("yarn 2", "yarn", {"rope_type": "yarn", "factor": 2})
ROTATE = TaskCandidate("dynamic 2", "dynamic", {"rope_type": "dynamic", "factor": 2}, "rotate")
WINDOW = TaskCandidate("window", "window", None, context=ContextRule("stop", 16, 28, 4))
CUT = TaskCandidate("cut", "cut", None, cut_to=512)


def sweep(*right: tuple[TaskCandidate, int], documents: int = 4, each: int = 10) -> TaskSweep:
    """`each` needles per document, of which each candidate answers the given number correctly, the first ones."""

    def reading(hits: int) -> Reading:
        return Reading(
            tuple((-1.0, -2.0) if i < hits else (-2.0, -1.0) for i in range(each)),
            tuple(i < hits // 2 for i in range(each)),
            (-1.0, -0.5, -9.0),
        )

    question = Question("needle", 0.5, (1,), ((2,), (3,)), 1)
    read = tuple(
        DocumentReadings(
            Document(1024, number, (1,) * 900, 4, 3, (question,) * each, f"{number}"),
            {candidate.name: reading(hits) for candidate, hits in right},
            (-4.0, -1.0, -20.0),
        )
        for number in range(documents)
    )
    return TaskSweep(
        "m", "m", 512, (1024,), ("needle", "key-tokens"), tuple(c for c, _ in right), read, judge="no scaling"
    )


def test_most_correct_choices_win_then_lowest_cost() -> None:
    (verdict,) = judge(sweep((PLAIN, 2), (ROTATE, 9), (YARN, 9), (WINDOW, 6)))
    assert verdict.chosen == "yarn 2"
    assert verdict.command == (
        'windlass serve m --max-model-len 1024 --rope-scaling \'{"rope_type": "yarn", "factor": 2}\''
    )
    needle = next(reason for reason in verdict.reasons if reason.startswith("needle"))
    assert needle.startswith("needle: yarn 2 chooses 36 of 40 (77 % to 96 %), no scaling 8: +70 points")
    assert needle.endswith("certain. Its lead is not certain over dynamic 2.")
    (verdict,) = judge(sweep((PLAIN, 9), (YARN, 9)))
    assert verdict.chosen == "no scaling" and "no scaling is needed" in verdict.reasons[0]


def test_few_questions_are_reported() -> None:
    (verdict,) = judge(sweep((PLAIN, 0), (YARN, 1), documents=2, each=1))
    assert "too few for an interval" in verdict.reasons[1] and "lead is certain over none" in verdict.reasons[1]


def test_documents_are_the_units_if_there_are_many() -> None:
    few, many = sweep((PLAIN, 2), (YARN, 9)), sweep((PLAIN, 2), (YARN, 9), documents=8)
    assert (few.unit(1024), many.unit(1024)) == ("question", "document")
    assert few.difference("no scaling", "yarn 2", 1024, "needle", "chosen").interval is not None
    apart = many.difference("no scaling", "yarn 2", 1024, "needle", "chosen")
    assert apart.interval is not None and apart.interval.low == apart.interval.high == pytest.approx(
        0.7
    )  # all are equal
    assert many.difference("no scaling", "yarn 2", 1024, "needle", "written").mean == pytest.approx(0.3)


def test_key_token_losses() -> None:
    result = sweep((PLAIN, 1))
    assert [losses.tolist() for losses in result.key_losses("no scaling", 1024)] == [[1.0]] * 4
    assert result.key_perplexity("no scaling", 1024) == pytest.approx(np.e)


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (PLAIN, "windlass serve m --max-model-len 2048"),
        (
            ROTATE,
            'windlass serve m --max-model-len 2048 --rope-scaling \'{"rope_type": "dynamic", "factor": 2}\' --rope-update rotate',
        ),
        (WINDOW, "windlass serve m --max-model-len 2048 --attention-window 28,4"),
        (CUT, "windlass serve m --max-model-len 512"),
    ],
)
def test_commands(candidate: TaskCandidate, words: str) -> None:
    assert candidate.command("m", 2048) == words


def test_no_scaling_is_explicit_for_scaled_models() -> None:
    base = RotaryBase(10_000.0, 16, 16, 512)
    own = RotaryGroup("full_attention", base, RopeScaling.from_dict({"rope_type": "linear", "factor": 2.0}))
    plain, named, *others = task_candidates(own, 512, 1024)
    assert plain.body() == {"rope_scaling": {"rope_type": "default"}} and named.body() == {}
    assert {c.kind for c in others} == {
        "cut", "linear", "ntk", "dynamic", "yarn", "llama3", "dual_chunk", "self_extend", "rerope", "log_n",
        "longrope",
    }  # fmt: skip
    bare = RotaryGroup("full_attention", base, RopeScaling())
    assert task_candidates(bare, 512, 1024)[0].body() == {}
    ramp = next(c for c in others if c.kind == "longrope").scaling["long_factor"]
    assert ramp == sorted(ramp) and ramp[0] == 1.0 and ramp[-1] == 2.0 and len(ramp) == 8
