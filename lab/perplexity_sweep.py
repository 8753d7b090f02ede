"""Perplexity sweep: the loss of texts under every candidate, with a report.

Equal rotary plans of a window are computed once. Torch is imported when the sweep runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windlass.clients.terminal import print_status
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryGroup, original_len
from windlass.engine.rotary.rotary_policy import ROPE_UPDATES
from windlass.lab.candidates import (
    SweepCandidate,
    chosen_candidates,
    factor_of,
    frozen_candidates,
    moving_candidates,
    own_candidates,
    static_candidates,
    window_sweep_candidate,
)
from windlass.lab.perplexity_report import to_html, to_markdown
from windlass.lab.perplexity_results import Curve, ExactComparison, ExactPoint, ScalingSweep, recommend
from windlass.lab.result_log import PassLog, result_key
from windlass.lab.scaling_inspection import display_name, read_groups
from windlass.lab.sweep_options import CommonSweepOptions
from windlass.lab.sweep_progress import SweepProgress
from windlass.lab.sweep_texts import SweptText, find_files, make_windows

if TYPE_CHECKING:
    from windlass.engine.interface.context import ContextRule
    from windlass.engine.rotary.rotary_policy import RotaryPlan
    from windlass.lab.scoring import Scorer
    from windlass.lab.sweep_texts import Window


def sample_rows(trained_len: int, max_len: int, samples: int, window: int, windows: int) -> list[int]:
    """Rows past the trained length at which one window is recomputed for the exact length, one in each of `samples` ranges.

    The rows of different windows differ, so that together they cover every range evenly.
    """
    span = (max_len - trained_len) / samples if samples else 0.0
    return sorted({trained_len + int((j + (window + 0.5) / windows) * span) for j in range(samples)})


_POINTS = 8  # of the exact comparison in the plot


class PerplexityRunner:
    """Measures the loss of every row of every window under a candidate.

    Passes that `result_log` holds are not repeated, and new ones are added to it. The `announce` methods report to `progress`
    how much work follows.
    """

    def __init__(
        self,
        scorer: Scorer,
        texts: Sequence[SweptText],
        windows: Sequence[Window],
        trained_len: int,
        result_log: PassLog,
        progress: SweepProgress,
    ) -> None:
        self.scorer, self.windows, self.trained_len = scorer, windows, trained_len
        self._texts, self._result_log, self._progress = texts, result_log, progress
        self.rows = len(windows[0].ids) - 1
        self._announced: set[tuple[str, int]] = set()

    def announce(self, candidates: Sequence[SweepCandidate]) -> None:
        """Announce the passes of candidates, without known ones and those that an equal plan computes."""
        for candidate in candidates:
            plan, end = self._span(candidate)
            for window in self.windows:
                key = self._key(window, self._plan_key(plan, candidate.context))
                if (key, end) not in self._announced and self._result_log.find_rows(key, end) is None:
                    self._announced.add((key, end))
                    self._progress.expect(self.scorer.work(plan, range(end)))

    def announce_cut(self) -> None:
        for window in self.windows:
            if self._result_log.find_rows(self._cut_key(window), self.rows) is None:
                self._progress.expect(sum(len(ids) - 1 for _, _, ids in self._pieces(window)))

    def announce_exact(self, candidate: SweepCandidate, samples: int) -> None:
        plan = self.plan(replace(candidate, policy="recompute"), self.rows, exact=True)
        for index in range(len(self.windows)):
            self._progress.expect(self.scorer.work(plan, self._sampled(samples, index)))

    def __call__(self, candidate: SweepCandidate) -> Curve:
        plan, end = self._span(candidate)
        nll = np.full((len(self.windows), self.rows), np.nan)
        for index, window in enumerate(self.windows):
            key = self._key(window, self._plan_key(plan, candidate.context))
            known = self._result_log.find_rows(key, end)
            if known is None:
                known = self._losses(candidate.name, window, window.ids[: end + 1], plan, context=candidate.context)
                self._finish(key, known, candidate.name, window)
            nll[index, :end] = known
        measured = {field.name: getattr(candidate, field.name) for field in fields(SweepCandidate)}
        return Curve(**measured | {"longest": candidate.longest if candidate.policy == "frozen" else None}, nll=nll)

    def _losses(
        self, name: str, window: Window, ids: Sequence[int], plan: RotaryPlan, **more: Any
    ) -> NDArray[np.float64]:
        """Losses of a text. name: of the pass, for the progress. more: of `Scorer.logprobs`."""
        self._progress.begin(f"{name}: {self._place(window)}")
        return -self.scorer.logprobs(ids, plan, computed=self._progress.computed, **more).double().numpy()

    def _finish(self, key: str, nll: NDArray[np.float64], name: str, window: Window) -> None:
        if not np.isfinite(nll).all():
            raise RequestError(f"the model gives no finite numbers under {name}")
        text = self._texts[window.text].name
        self._result_log.add(key, nll, scaling=name, text=text, start=window.start, nll=nll.tolist())
        tail = nll[max(0, len(nll) - max(self.trained_len // 2, 1)) :]
        both = [math.exp(min(float(part.mean()), 700.0)) for part in (nll, tail)]
        self._progress.finished(f"{name}: {self._place(window)}: perplexity {both[0]:.2f}, at the end {both[1]:.2f}")

    def _place(self, window: Window) -> str:
        text = self._texts[window.text]
        several = len(text.starts) > 1
        return f"{text.name} from token {window.start:,}" if several else text.name

    def plan(self, candidate: SweepCandidate, longest: int, *, exact: bool = False) -> RotaryPlan:
        return self.scorer.plan(longest, candidate.parsed, candidate.policy, exact=exact)

    def _span(self, candidate: SweepCandidate) -> tuple[RotaryPlan, int]:
        longest = candidate.longest or self.rows
        return self.plan(candidate, longest), min(longest, self.rows)

    def _plan_key(self, plan: RotaryPlan, context: ContextRule) -> list[str]:
        window = context.attention_window
        seen = [] if window is None else [f"window {window} and {context.attention_sinks} sinks"]
        if plan.policy == "frozen":  # candidates of equal frequencies have equal results
            return [spec.fingerprint for spec in plan.stage(plan.longest).specs] + seen
        return [plan.policy, str(plan.longest), repr(plan.groups), *seen]

    def _key(self, window: Window, what: list[str]) -> str:
        prefix = list(window.ids[: window.num_prefix])
        return result_key(self.scorer.identity, window.digest, window.start, prefix, what)

    def _cut_key(self, window: Window) -> str:
        return self._key(window, ["cut", str(self.trained_len), str(self.rows)])

    def _pieces(self, window: Window) -> list[tuple[int, int, tuple[int, ...]]]:
        """(first row, end row, tokens of the pass that computes them), all within the trained length."""
        half, found = self.trained_len // 2, []
        prefix = window.ids[: window.num_prefix]
        for low in range(self.trained_len, self.rows, half):
            high = min(low + half, self.rows)
            first = high - self.trained_len + len(prefix)  # text token, so that everything fits the trained length
            found.append((low, high, (*prefix, *window.ids[first : high + 1])))
        return found

    def cut(self, none: Curve) -> Curve:
        """The loss of every token after only the last half to full trained length: that of short contexts."""
        half = self.trained_len // 2
        nll = none.nll.copy()
        plan = self.scorer.plan(self.trained_len, RopeScaling())
        name = "text cut to the trained length"
        for index, window in enumerate(self.windows):
            known = self._result_log.find_rows(self._cut_key(window), self.rows)
            if known is None:
                known = nll[index].copy()
                for low, high, piece in self._pieces(window):
                    rows = range(len(piece) - 1 - (high - low), len(piece) - 1)
                    known[low:high] = self._losses(name, window, piece, plan, rows=rows)
                self._finish(self._cut_key(window), known, name, window)
            nll[index] = known
        label = f"no scaling, text cut to {half:,}–{self.trained_len:,} tokens"
        return Curve(name, "cut", None, label=label, plotted=True, nll=nll)

    def _sampled(self, samples: int, window: int) -> list[int]:
        return sample_rows(self.trained_len, self.rows, samples, window, len(self.windows))

    def exact(self, candidate: SweepCandidate, policies: Sequence[Curve], samples: int) -> ExactComparison:
        """Compare each policy with recomputing for the exact length, at the same sampled rows."""
        plan = self.plan(replace(candidate, policy="recompute"), self.rows, exact=True)
        rows = [self._sampled(samples, index) for index in range(len(self.windows))]
        losses = []
        name = "dynamic, recomputed for the exact length"
        for window, chosen in zip(self.windows, rows, strict=True):
            losses.append(self._losses(name, window, window.ids, plan, rows=chosen))
            self._progress.finished(f"{name}: {self._place(window)}")
        exact, sampled = np.stack(losses), np.array(rows)  # [windows, samples]
        above = {str(c.policy): np.take_along_axis(c.nll, sampled, axis=1) - exact for c in policies}
        grid = next(curve for curve in policies if curve.policy == "recompute")
        above_grid = above["recompute"]
        edges = np.linspace(self.trained_len, self.rows, min(samples, _POINTS) + 1).astype(int)
        points = []
        for low, high in pairwise(edges.tolist()):
            excess = above_grid[(sampled >= low) & (sampled < high)]
            level, error = float(grid.nll[:, low:high].mean() - excess.mean()), _standard_error(excess)
            points.append(
                ExactPoint((low + high) / 2, math.exp(level), math.exp(level - error), math.exp(level + error))
            )
        return ExactComparison(
            name=candidate.name.split(",")[0],
            rows=exact.size,
            points=tuple(points),
            difference={name: float(values.mean()) for name, values in above.items()},
            error={name: _standard_error(values) for name, values in above.items()},
        )


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(CommonSweepOptions):
    """Options of `windlass rope sweep`. texts: files or directories. windows: per text."""

    texts: tuple[Path, ...]
    max_len: int = 4096
    target_len: int | None = None
    windows: int = 8
    samples: int = 16


def run_sweep(options: SweepOptions) -> ScalingSweep:
    """Measure all candidates and write the reports. Options are checked before the model loads. Raises EngineError."""
    groups = read_groups(options.model)
    main = groups[0]
    trained = options.trained_len or original_len(main.scaling, main.base)
    target = options.target_len or options.max_len
    if options.max_len <= trained:
        raise LoadError(
            f"--max-len must be more than the trained length of {trained:,} tokens, got {options.max_len}: shorter "
            "contexts need no scaling"
        )
    if not trained < target <= options.max_len:
        raise LoadError(
            f"--target-len must lie above the trained length of {trained:,} and at most at --max-len "
            f"{options.max_len}, got {target}"
        )
    window = options.attention_window
    if window is not None and not (1 <= window <= options.max_len and 0 <= options.attention_sinks <= options.max_len):
        raise LoadError(
            f"--attention-window must be between 1 and --max-len {options.max_len}, --attention-sinks between 0 and that"
        )
    files = find_files(options.texts)
    options.check_outputs(files)
    texts, windows = make_windows(options.model, files, options.max_len, options.windows, options.load_tokenizer)
    result_log = PassLog(options.keep)

    from windlass.lab.scoring import Scorer

    scorer = options.load_scorer(Scorer.load)
    with SweepProgress() as progress:
        runner = PerplexityRunner(scorer, texts, windows, trained, result_log, progress)
        curves, exact = _measure_all(runner, options, main, target)
    result = ScalingSweep(
        model=options.model_name,
        model_name=display_name(options.model, options.model_name),
        texts=texts,
        trained_len=trained,
        max_len=options.max_len,
        target_len=target,
        curves=tuple(curves),
        exact=exact,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    recommendation = recommend(result)
    from windlass.lab.sweep_plots import draw_sweep

    options.write_reports(
        html=lambda svg, date: to_html(result, recommendation, svg, date),
        markdown=lambda picture, date: to_markdown(result, recommendation, picture, date),
        content={**result.to_json(), "recommendation": recommendation.to_json()},
        draw=lambda ink: draw_sweep(result, ink),
    )
    print_status(f"{recommendation.curve} for {result.target_len:,} tokens: {recommendation.command}")
    return result


def _measure_all(
    runner: PerplexityRunner, options: SweepOptions, group: RotaryGroup, target: int
) -> tuple[list[Curve], ExactComparison | None]:
    max_len, own = options.max_len, group.scaling
    windowed = [] if options.window is None else [window_sweep_candidate(options.window)]
    if options.scalings:
        chosen = chosen_candidates(options.scalings, options.policies or ROPE_UPDATES, max_len, target) + windowed
        runner.announce(chosen)
        if options.cut:
            runner.announce_cut()
        curves = [runner(candidate) for candidate in chosen]
        if options.cut:
            curves.insert(1, runner.cut(curves[0]))
        return curves, None
    statics = static_candidates(
        trained_len=runner.trained_len,
        config_trained_len=group.base.trained_len,
        max_len=max_len,
        target_len=target,
        own=own,
    )
    follow = own_candidates(own, max_len, target)
    frozen_ones = frozen_candidates(max_len=max_len, target_len=target)
    moving_ones = moving_candidates(factor_of(frozen_ones[0].name), max_len)
    samples = min(options.samples, max_len - runner.trained_len)
    statics += windowed
    runner.announce([*statics, *follow, *frozen_ones, *moving_ones])
    if options.cut:
        runner.announce_cut()
    if samples:
        runner.announce_exact(frozen_ones[0], samples)
    curves = [runner(candidate) for candidate in statics]
    if options.cut:
        curves.insert(1, runner.cut(curves[0]))
    curves += [runner(candidate) for candidate in follow]
    frozen = [(c, runner(c)) for c in frozen_ones]
    # The policies are compared at the factor that is best when frozen for max_len.
    full = [(c, curve) for c, curve in frozen if c.longest == max_len]
    best, best_curve = min(full, key=lambda pair: float(pair[1].nll.mean()))
    best_curve = replace(best_curve, plotted=True)
    moving = [replace(runner(c), plotted=True) for c in moving_candidates(factor_of(best.name), max_len)]
    for candidate, curve in frozen:
        curves.append(best_curve if candidate is best else curve)
        if candidate is best:
            curves += moving
    exact = runner.exact(best, [best_curve, *moving], samples) if samples else None
    return curves, exact
