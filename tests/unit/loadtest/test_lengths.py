"""Distributions of lengths against their mean and spread, and their spelling."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from windlass.clients.loadtest.load_plan import Lengths
from windlass.clients.loadtest.target import LoadTestError

N = 20_000


def drawn(text: str, **bounds) -> np.ndarray:
    lengths, random = Lengths.parse(text), Random(5)
    return np.array([lengths.sample(random, **bounds) for _ in range(N)])


def test_a_number_is_that_number():
    assert set(drawn("8192")) == {8192}


def test_uniform_lengths_reach_both_ends_evenly():
    values = drawn("uniform:3:12")
    counts = np.bincount(values)[3:]
    assert values.min() == 3 and values.max() == 12
    assert np.all(np.abs(counts - N / 10) < 6 * math.sqrt(N / 10))


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_bell_curves_have_their_mean_and_deviation(kind):
    values = drawn(f"{kind}:1000:150")
    assert values.mean() == pytest.approx(1000, abs=6 * 150 / math.sqrt(N))
    assert values.std() == pytest.approx(150, rel=0.06)
    skew = (((values - values.mean()) / values.std()) ** 3).mean()
    assert abs(skew) < 0.15 if kind == "normal" else 0.25 < skew < 0.75  # of the lognormal: about 3 cv = 0.45


def test_what_lies_outside_is_moved_to_the_bound():
    values = drawn("normal:50:40", minimum=10, maximum=60)
    assert values.min() == 10 and values.max() == 60
    assert (drawn("normal:2:5") >= 1).all()


@pytest.mark.parametrize(
    "text",
    ["", "x", "1.5", "0", "-3", "nan", "inf", "uniform:5", "uniform:5:2", "uniform:0:4", "uniform:1:2.5", "normal:5:-1",
     "normal:a:b", "lognormal:0:1", "lognormal:5:1:2", "zipf:1:2", "normal:inf:1"],
)  # fmt: skip
def test_what_is_no_length_is_refused_by_name(text):
    with pytest.raises(LoadTestError, match="--input-len"):
        Lengths.parse(text, "--input-len")


@pytest.mark.parametrize("text", ["128", "uniform:1:2", "normal:500:20.5", "lognormal:500:300"])
def test_lengths_are_written_as_they_are_read(text):
    assert str(Lengths.parse(text)) == text
