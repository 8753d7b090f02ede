"""Lengths, traces and schedules of load plans, against statistics of their distributions."""

from __future__ import annotations

import itertools
import json
import math
from random import Random

import numpy as np
import pytest

from windlass.clients.loadtest import load_plan
from windlass.clients.loadtest.load_plan import Arrivals, Lengths, Replay, intended_times, ramp, read_trace
from windlass.clients.loadtest.target import LoadTestError

LENGTHS = 20_000
ARRIVALS = 40_000
TRACE_LINE = {"timestamp": 1.0, "input_len": 10, "max_tokens": 4}


def drawn(text: str, **bounds) -> np.ndarray:
    lengths, random = Lengths.parse(text), Random(5)
    return np.array([lengths.sample(random, **bounds) for _ in range(LENGTHS)])


def test_fixed_length():
    assert set(drawn("8192")) == {8192}


def test_uniform_lengths():
    values = drawn("uniform:3:12")
    counts = np.bincount(values)[3:]
    assert values.min() == 3 and values.max() == 12
    assert np.all(np.abs(counts - LENGTHS / 10) < 6 * math.sqrt(LENGTHS / 10))


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_normal_and_lognormal_lengths(kind):
    values = drawn(f"{kind}:1000:150")
    assert values.mean() == pytest.approx(1000, abs=6 * 150 / math.sqrt(LENGTHS))
    assert values.std() == pytest.approx(150, rel=0.06)
    skew = (((values - values.mean()) / values.std()) ** 3).mean()
    assert abs(skew) < 0.15 if kind == "normal" else 0.25 < skew < 0.75  # of the lognormal: about 3 cv = 0.45


def test_lengths_are_clamped_to_the_bounds():
    values = drawn("normal:50:40", minimum=10, maximum=60)
    assert values.min() == 10 and values.max() == 60
    assert (drawn("normal:2:5") >= 1).all()


@pytest.mark.parametrize(
    "text",
    ["", "x", "1.5", "0", "-3", "nan", "inf", "uniform:5", "uniform:5:2", "uniform:0:4", "uniform:1:2.5", "normal:5:-1",
     "normal:a:b", "lognormal:0:1", "lognormal:5:1:2", "zipf:1:2", "normal:inf:1"],
)  # fmt: skip
def test_invalid_lengths_are_refused(text):
    with pytest.raises(LoadTestError, match="--input-len"):
        Lengths.parse(text, "--input-len")


@pytest.mark.parametrize("text", ["128", "uniform:1:2", "normal:500:20.5", "lognormal:500:300"])
def test_lengths_round_trip(text):
    assert str(Lengths.parse(text)) == text


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return write


def test_trace_fields_and_order(write):
    yarn = {"rope_type": "yarn", "factor": 2}
    path = write(
        {"timestamp": 2.5, "prompt": [1, 2, 3], "max_tokens": 7, "rope_scaling": yarn},
        "",
        {"timestamp": 1, "prompt": "hello", "output_length": 3, "rope_scaling": None},
        {"timestamp": 0, "input_length": 9, "output_tokens": 5},
    )
    first, second, third = read_trace(path)
    assert (first.timestamp, first.input_len, first.prompt, first.max_tokens) == (0, 9, None, 5)
    assert (second.prompt, second.rope_scaling, second.has_scaling) == ("hello", None, True)
    assert (third.prompt, third.rope_scaling, third.has_scaling) == ((1, 2, 3), yarn, True)
    assert [entry.line for entry in (first, second, third)] == [4, 3, 1]
    assert not first.has_scaling


def test_trace_without_timestamps(write):
    path = write({"input_len": 5, "max_tokens": 1}, {"input_len": 6, "max_tokens": 1})
    assert [(entry.timestamp, entry.input_len) for entry in read_trace(path)] == [(None, 5), (None, 6)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "line 2"),
        ("3", "should be an object"),
        ({**TRACE_LINE, "timestamp": "soon"}, "timestamp should be a number"),
        ({**TRACE_LINE, "timestamp": True}, "timestamp should be a number"),
        ('{"timestamp": NaN, "input_len": 1, "max_tokens": 1}', "timestamp should be a number"),
        ({**TRACE_LINE, "input_len": 0}, "input_len should be a whole number"),
        ({**TRACE_LINE, "input_len": 1.5}, "input_len should be a whole number"),
        ({**TRACE_LINE, "max_tokens": -1}, "max_tokens should be a whole number"),
        ({"timestamp": 1, "input_len": 10}, "no max_tokens"),
        ({"timestamp": 1, "max_tokens": 1}, "a prompt or an input_len"),
        ({**TRACE_LINE, "prompt": "x"}, "a prompt or an input_len"),
        ({"timestamp": 1, "max_tokens": 1, "prompt": []}, "prompt should be text"),
        ({"timestamp": 1, "max_tokens": 1, "prompt": [1, -2]}, "prompt should be text"),
        ({**TRACE_LINE, "input_length": 3}, "input_len twice"),
        ({**TRACE_LINE, "rope_scalling": None}, "unknown field 'rope_scalling'"),
        ({**TRACE_LINE, "rope_scaling": 4}, "rope_scaling should be a JSON object"),
        ({"input_len": 10, "max_tokens": 4}, "has no timestamp unlike line 1"),
    ],
)
def test_invalid_trace_lines_are_named(write, line, message):
    path = write(TRACE_LINE, line, TRACE_LINE)
    with pytest.raises(LoadTestError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line 2: ") and message in text and "\n" not in text


def test_unreadable_traces_are_refused(write, tmp_path):
    for path in (write(""), tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(LoadTestError) as caught:
            read_trace(path)
        assert str(path) in str(caught.value)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(LoadTestError):
        read_trace(binary)


def gaps(schedule, seed=1, count=ARRIVALS):
    times = list(itertools.islice(schedule.times(seed), count + 1))
    assert times[0] == 0
    return np.diff(times)


def offered(schedule, count=None, seconds=None):
    return schedule.offered_rate(intended_times(schedule, 1, count, seconds))


def test_constant_arrivals_are_evenly_spaced():
    assert np.allclose(gaps(Arrivals(8.0, None)), 1 / 8, rtol=1e-9)


def test_poisson_gaps_are_exponential():
    drawn = gaps(Arrivals(5.0))
    # Six standard errors: of the mean 1/sqrt(ARRIVALS), of the variance sqrt(8/ARRIVALS) for the exponential.
    assert drawn.mean() == pytest.approx(0.2, rel=6 / math.sqrt(ARRIVALS))
    assert drawn.var() == pytest.approx(0.04, rel=6 * math.sqrt(8 / ARRIVALS))
    for quantile in (0.1, 0.5, 0.9, 0.99):
        expected = -math.log(1 - quantile) / 5
        assert (drawn <= expected).mean() == pytest.approx(
            quantile, abs=6 * math.sqrt(quantile * (1 - quantile) / ARRIVALS)
        )
    correlation = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(correlation) < 6 / math.sqrt(ARRIVALS)  # successive gaps are independent


def test_poisson_counts():
    times = np.cumsum(gaps(Arrivals(10.0)))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(10, rel=0.02)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=6 * math.sqrt(2 / len(counts)))


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 2.0, 4.0])
def test_gamma_gaps(burstiness):
    drawn = gaps(Arrivals(3.0, burstiness))
    cv = 1 / math.sqrt(burstiness)
    assert drawn.mean() == pytest.approx(1 / 3, rel=6 * cv / math.sqrt(ARRIVALS))
    # Kurtosis of the gamma distribution: 3 + 6/shape; the relative error of a standard deviation follows from it.
    error = math.sqrt((2 + 6 / burstiness) / ARRIVALS) / 2
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=6 * (error + cv / math.sqrt(ARRIVALS)))


@pytest.mark.parametrize("burstiness", [None, 1.0])
@pytest.mark.parametrize(("start", "end"), [(10.0, 100.0), (100.0, 10.0), (0.0, 50.0), (20.0, 20.0)])
def test_ramp_has_its_rate_at_every_time(start, end, burstiness):
    seconds = 400.0
    times = np.array(intended_times(ramp(start, end, None, seconds, burstiness), 3, None, seconds))
    assert np.all(np.diff(times) >= 0)
    total = (start + end) / 2 * seconds
    assert len(times) == pytest.approx(total, abs=2 if burstiness is None else 6 * math.sqrt(total))
    for begin in range(0, 400, 50):
        expected = 50 * (start + (end - start) * (begin + 25) / seconds)
        seen = ((times >= begin) & (times < begin + 50)).sum()
        assert seen == pytest.approx(expected, abs=2 if burstiness is None else 6 * math.sqrt(expected))


def test_ramp_over_a_number_of_requests():
    times = intended_times(ramp(1.0, 9.0, 100, None, None), 0, 100, None)
    assert len(times) == 100 and times[-1] == pytest.approx(20, abs=0.2)
    assert times[-1] - times[-2] == pytest.approx(1 / 9, rel=0.05)


def test_ramp_stays_at_its_end_rate():
    times = np.array(list(itertools.islice(Arrivals(1.0, None, 4.0, 10.0).times(0), 200)))
    late = np.diff(times[times > 10])
    assert len(late) > 100 and np.allclose(late, 0.25)


def test_times_depend_on_the_seed():
    schedule = Arrivals(5.0, 0.5)
    assert np.array_equal(gaps(schedule, 7, 100), gaps(schedule, 7, 100))
    assert not np.array_equal(gaps(schedule, 7, 100), gaps(schedule, 8, 100))


def test_replay_scales_recorded_gaps():
    schedule = Replay([100.0, 100.5, 102.0], speed=2.0)
    assert list(schedule.times(0)) == [0.0, 0.25, 1.0]
    assert offered(schedule) == 2.0
    assert offered(Replay([1.0, 1.0])) is None and offered(Replay([3.0])) is None
    assert offered(Replay([0.0, 1e-320])) is None  # infinite


def test_offered_rate_covers_the_scheduled_requests():
    trace = Replay([0.0, 1.0, 2.0, 2.1, 2.2, 2.3])
    assert offered(trace, 3, None) == offered(trace, None, 2.05) == 1.0
    assert offered(ramp(1.0, 9.0, 100, None, None), 100, None) == pytest.approx(5.0, rel=0.02)
    assert offered(ramp(0.0, 8.0, None, 50.0, None), None, 50.0) == pytest.approx(4.0, rel=0.03)
    # A run that ends before its ramp covers the beginning only.
    assert offered(ramp(1.0, 9.0, None, 100.0, None), 12, None) == pytest.approx(1.4, rel=0.1)


@pytest.mark.parametrize("burstiness", [None, 1.0, 0.5])
def test_constant_rate_is_the_offered_rate(burstiness):
    assert offered(Arrivals(5.0, burstiness), 3, None) == offered(Arrivals(5.0, burstiness), 1, None) == 5.0


def test_number_of_scheduled_requests_is_limited(monkeypatch):
    monkeypatch.setattr(load_plan, "MAX_REQUESTS", 100)
    assert len(intended_times(Arrivals(1e12, None), 0, 100, None)) == 100
    for count, seconds in ((101, None), (None, 60.0)):
        with pytest.raises(LoadTestError, match="more than 100 requests"):
            intended_times(Arrivals(1e12, None), 0, count, seconds)


def test_schedule_is_limited_by_count_and_duration():
    schedule = Arrivals(10.0, None)
    assert intended_times(schedule, 0, 3, None) == [0.0, 0.1, 0.2]
    assert len(intended_times(schedule, 0, None, 0.95)) == 10
    assert len(intended_times(schedule, 0, 4, 0.95)) == 4
    assert intended_times(Replay([0.0, 1.0, 2.0]), 0, None, 1.5) == [0.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrivals(0.0),
        lambda: Arrivals(-1.0),
        lambda: Arrivals(math.inf),
        lambda: Arrivals(math.nan),
        lambda: Arrivals(1.0, 0.0),
        lambda: Arrivals(1.0, math.nan),
        lambda: Arrivals(1.0, 1.0, 0.0, 5.0),
        lambda: ramp(1.0, 2.0, None, None, None),
        lambda: Replay([0.0], speed=0.0),
    ],
)
def test_invalid_schedules_are_refused(make):
    with pytest.raises(LoadTestError):
        make()
