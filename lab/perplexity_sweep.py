"""Perplexity sweep: texts read under every candidate scaling, with a report.

Torch is imported when the sweep runs. Equal rotary plans of a window are computed once.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windlass.clients.terminal.lines import say
from windlass.clients.terminal.loading_display import LoadingDisplay
from windlass.clients.terminal.outputs import check_outputs
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.rotary.rope_scaling import RopeScaling, original_len
from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.lab.candidates import (
    POLICIES,
    Candidate,
    chosen_candidates,
    factor_of,
    frozen_candidates,
    moving_candidates,
    own_candidates,
    static_candidates,
    window_sweep_candidate,
)
from windlass.lab.perplexity_report import write_text
from windlass.lab.perplexity_results import Curve, ExactComparison, ExactPoint, ScalingSweep, recommend
from windlass.lab.result_log import PassLog, result_key
from windlass.lab.scaling_inspection import display_name, read_groups
from windlass.lab.sweep_progress import SweepProgress
from windlass.lab.sweep_texts import Encoder, SweptText, find_files, make_windows

if TYPE_CHECKING:
    from windlass.engine.interface.context import ContextRule
    from windlass.engine.rotary.rotary_policy import RotaryPlan
    from windlass.lab.scoring import Scorer
    from windlass.lab.sweep_texts import Window


def sample_rows(trained_len: int, max_len: int, samples: int, window: int, windows: int) -> list[int]:
    """Rows past the trained length at which one window is recomputed for the exact length, one per equal stretch.

    Each window takes other rows, so that together they cover every stretch evenly.
    """
    span = (max_len - trained_len) / samples if samples else 0.0
    return sorted({trained_len + int((j + (window + 0.5) / windows) * span) for j in range(samples)})


_POINTS = 8  # of the exact recompute in the plot


class PerplexityRunner:
    """Loss of every row of every window under a candidate.

    kept: what is known from before, and where new passes go. `announce` what is to come, so that `progress` knows its end.
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

    def announce(self, candidates: Sequence[Candidate]) -> None:
        """Count the passes to come, leaving out those that are known and those that an equal plan does."""
        for candidate in candidates:
            plan, end = self._span(candidate)
            for window in self.windows:
                key = self._key(window, self._plan_key(plan, candidate.context))
                if (key, end) not in self._announced and self._result_log.find(key, end) is None:
                    self._announced.add((key, end))
                    self._progress.expect(self.scorer.work(plan, range(end)))

    def is_known(self, candidate: Candidate) -> bool:
        """Whether every window was read under it before, so that a call computes nothing."""
        plan, end = self._span(candidate)
        keys = [self._key(window, self._plan_key(plan, candidate.context)) for window in self.windows]
        return all(self._result_log.find(key, end) is not None for key in keys)

    def is_cut_logged(self) -> bool:
        return all(self._result_log.find(self._cut_key(window), self.rows) is not None for window in self.windows)

    def announce_cut(self) -> None:
        for window in self.windows:
            if self._result_log.find(self._cut_key(window), self.rows) is None:
                self._progress.expect(sum(len(ids) - 1 for _, _, ids in self._pieces(window)))

    def announce_exact(self, candidate: Candidate, samples: int) -> None:
        plan = self.plan(replace(candidate, policy="recompute"), self.rows, exact=True)
        for index in range(len(self.windows)):
            self._progress.expect(self.scorer.work(plan, self._sampled(samples, index)))

    def __call__(self, candidate: Candidate) -> Curve:
        plan, end = self._span(candidate)
        nll = np.full((len(self.windows), self.rows), np.nan)
        for index, window in enumerate(self.windows):
            key = self._key(window, self._plan_key(plan, candidate.context))
            known = self._result_log.find(key, end)
            if known is None:
                self._progress.begin(f"{candidate.name}: {self._place(window)}")
                ids = window.ids[: end + 1]
                read = self.scorer.logprobs(ids, plan, context=candidate.context, computed=self._progress.computed)
                known = -read.double().numpy()
                self._finish(key, known, candidate.name, window)
            nll[index, :end] = known
        return Curve(
            candidate.name,
            candidate.label,
            candidate.kind,
            candidate.scaling,
            candidate.policy,
            candidate.longest if candidate.policy == "frozen" else None,
            candidate.plotted,
            nll,
            candidate.context,
        )

    def _finish(self, key: str, nll: NDArray[np.float64], name: str, window: Window) -> None:
        if not np.isfinite(nll).all():
            raise RequestError(f"the model gives no finite numbers under {name}")
        text = self._texts[window.text].name
        self._result_log.add(key, nll.tolist(), scaling=name, text=text, start=window.start)
        tail = nll[max(0, len(nll) - max(self.trained_len // 2, 1)) :]
        both = [math.exp(min(float(part.mean()), 700.0)) for part in (nll, tail)]
        self._progress.finished(f"{name}: {self._place(window)}: perplexity {both[0]:.2f}, at the end {both[1]:.2f}")

    def _place(self, window: Window) -> str:
        text = self._texts[window.text]
        several = len(text.starts) > 1
        return f"{text.name} from token {window.start:,}" if several else text.name

    def plan(self, candidate: Candidate, longest: int, *, exact: bool = False) -> RotaryPlan:
        scaling = None if candidate.scaling is None else RopeScaling.from_dict(candidate.scaling)
        return self.scorer.plan(longest, scaling, candidate.policy, exact=exact)

    def _span(self, candidate: Candidate) -> tuple[RotaryPlan, int]:
        longest = candidate.longest or self.rows
        return self.plan(candidate, longest), min(longest, self.rows)

    def _plan_key(self, plan: RotaryPlan, context: ContextRule) -> list[str]:
        window = context.attention_window
        seen = [] if window is None else [f"window {window} and {context.attention_sinks} sinks"]
        if plan.policy == "frozen":  # whatever the name, equal frequencies give equal numbers
            return [spec.fingerprint for spec in plan.stage(plan.longest).specs] + seen
        return [plan.policy, str(plan.longest), repr(plan.groups), *seen]

    def _key(self, window: Window, what: list[str]) -> str:
        prefix = list(window.ids[: window.num_prefix])
        return result_key(self.scorer.identity, window.digest, window.start, prefix, what)

    def _cut_key(self, window: Window) -> str:
        return self._key(window, ["cut", str(self.trained_len), str(self.rows)])

    def _pieces(self, window: Window) -> list[tuple[int, int, tuple[int, ...]]]:
        """(first row, end row, tokens to read for them), all within the trained length."""
        half, found = self.trained_len // 2, []
        prefix = window.ids[: window.num_prefix]
        for low in range(self.trained_len, self.rows, half):
            high = min(low + half, self.rows)
            first = high - self.trained_len + len(prefix)  # of the text, so that all fits the trained length
            found.append((low, high, (*prefix, *window.ids[first : high + 1])))
        return found

    def cut(self, none: Curve) -> Curve:
        """Every token read with the last half to whole trained length alone: what the model makes of short contexts."""
        half = self.trained_len // 2
        nll = none.nll.copy()
        plan = self.scorer.plan(self.trained_len, RopeScaling())
        name = "text cut to the trained length"
        for index, window in enumerate(self.windows):
            known = self._result_log.find(self._cut_key(window), self.rows)
            if known is None:
                self._progress.begin(f"{name}: {self._place(window)}")
                known = nll[index].copy()
                for low, high, piece in self._pieces(window):
                    rows = range(len(piece) - 1 - (high - low), len(piece) - 1)
                    read = self.scorer.logprobs(piece, plan, rows=rows, computed=self._progress.computed)
                    known[low:high] = -read.double().numpy()
                self._finish(self._cut_key(window), known, name, window)
            nll[index] = known
        label = f"no scaling, text cut to {half:,}–{self.trained_len:,} tokens"
        return Curve(name, label, "cut", None, None, None, True, nll)

    def _sampled(self, samples: int, window: int) -> list[int]:
        return sample_rows(self.trained_len, self.rows, samples, window, len(self.windows))

    def exact(self, candidate: Candidate, policies: Sequence[Curve], samples: int) -> ExactComparison:
        """Recompute for the exact length at sampled rows, beside each policy's loss at the very same rows."""
        plan = self.plan(replace(candidate, policy="recompute"), self.rows, exact=True)
        rows = [self._sampled(samples, index) for index in range(len(self.windows))]
        losses = []
        name = "dynamic, recomputed for the exact length"
        for window, chosen in zip(self.windows, rows, strict=True):
            self._progress.begin(f"{name}: {self._place(window)}")
            read = self.scorer.logprobs(window.ids, plan, rows=chosen, computed=self._progress.computed)
            losses.append(-read.double().numpy())
            self._progress.finished(f"{name}: {self._place(window)}")
        exact, where = np.stack(losses), np.array(rows)  # [K, S]
        above = {str(c.policy): np.take_along_axis(c.nll, where, axis=1) - exact for c in policies}
        grid = next(curve for curve in policies if curve.policy == "recompute")
        above_grid = above["recompute"]
        edges = np.linspace(self.trained_len, self.rows, min(samples, _POINTS) + 1).astype(int)
        points = []
        for low, high in pairwise(edges.tolist()):
            here = above_grid[(where >= low) & (where < high)]
            level, error = float(grid.nll[:, low:high].mean() - here.mean()), _standard_error(here)
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
class SweepOptions:
    """What `windlass rope sweep` was asked. model: the directory; model_name: what `windlass serve` takes for it.

    texts: files or directories. windows: per text. scalings, policies: empty for those the sweep chooses itself.
    attention_window, attention_sinks: of a curve under a window, None for no such curve. keep: the file that grows by each pass.
    load_tokenizer: from the model's directory.
    """

    model: Path
    texts: tuple[Path, ...]
    html: Path
    model_name: str
    load_tokenizer: Callable[[Path], Encoder]
    max_len: int = 4096
    target_len: int | None = None
    windows: int = 8
    samples: int = 16
    trained_len: int | None = None
    scalings: tuple[dict[str, Any], ...] = ()
    policies: tuple[RopeUpdate, ...] = ()
    cut: bool = True
    attention_window: int | None = None
    attention_sinks: int = 4
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    json: Path | None = None
    png: Path | None = None
    markdown: Path | None = None
    keep: Path | None = None


def run_sweep(options: SweepOptions) -> ScalingSweep:
    """Measure and write; what is wrong with the options is said before the model loads. Raises EngineError, one line."""
    groups = read_groups(options.model)
    main = groups[0]
    trained = options.trained_len or original_len(main.scaling, main.base)
    target = options.target_len or options.max_len
    if options.max_len <= trained:
        raise LoadError(
            f"--max-len must be more than the trained length of {trained:,} tokens, got {options.max_len}: there is "
            "nothing to see below it"
        )
    if not trained < target <= options.max_len:
        raise LoadError(
            f"--target-len must lie above the trained length of {trained:,} and at most at --max-len "
            f"{options.max_len}, got {target}"
        )
    window = options.attention_window
    if window is not None and not (1 <= window <= options.max_len and 0 <= options.attention_sinks <= options.max_len):
        raise LoadError(
            f"--attention-window must lie between 1 and --max-len {options.max_len}, --attention-sinks between 0 and that"
        )
    outputs = {
        "--out": options.html,
        "--json": options.json,
        "--png": options.png,
        "--markdown": options.markdown,
        "--keep": options.keep,
    }
    files = find_files(options.texts)
    for file in files:
        check_outputs(outputs, {"--text": file})
    texts, windows = make_windows(options.model, files, options.max_len, options.windows, options.load_tokenizer)
    result_log = PassLog(options.keep)

    from windlass.lab.scoring import Scorer

    display, progress = LoadingDisplay(), SweepProgress()
    try:
        scorer = Scorer.load(
            options.model,
            device=options.device,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            progress=display,
        )
        display.stop()
        measure = PerplexityRunner(scorer, texts, windows, trained, result_log, progress)
        curves, exact = _measure_all(measure, options, main.scaling, main.base.trained_len, target)
    finally:
        display.stop()
        progress.stop()
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
    _write(result, options)
    return result


def _measure_all(
    measure: PerplexityRunner, options: SweepOptions, own: RopeScaling, config_trained_len: int, target: int
) -> tuple[list[Curve], ExactComparison | None]:
    max_len, window = options.max_len, options.attention_window
    windowed = [] if window is None else [window_sweep_candidate(window, options.attention_sinks)]
    if options.scalings:
        chosen = chosen_candidates(options.scalings, options.policies or POLICIES, max_len, target) + windowed
        measure.announce(chosen)
        if options.cut:
            measure.announce_cut()
        curves = [measure(candidate) for candidate in chosen]
        if options.cut:
            curves.insert(1, measure.cut(curves[0]))
        return curves, None
    statics = static_candidates(
        trained_len=measure.trained_len,
        config_trained_len=config_trained_len,
        max_len=max_len,
        target_len=target,
        own=own,
    )
    follow = own_candidates(own, max_len, target)
    frozen_ones = frozen_candidates(max_len=max_len, target_len=target)
    moving_ones = moving_candidates(factor_of(frozen_ones[0].name), max_len)
    samples = min(options.samples, max_len - measure.trained_len)
    statics += windowed
    measure.announce([*statics, *follow, *frozen_ones, *moving_ones])
    if options.cut:
        measure.announce_cut()
    if samples:
        measure.announce_exact(frozen_ones[0], samples)
    curves = [measure(candidate) for candidate in statics]
    if options.cut:
        curves.insert(1, measure.cut(curves[0]))
    curves += [measure(candidate) for candidate in follow]
    frozen = [(c, measure(c)) for c in frozen_ones]
    # The policies are compared at the factor that does best frozen for the whole length.
    full = [(c, curve) for c, curve in frozen if c.longest == max_len]
    best, best_curve = min(full, key=lambda pair: float(pair[1].nll.mean()))
    best_curve = replace(best_curve, plotted=True)
    moving = [replace(measure(c), plotted=True) for c in moving_candidates(factor_of(best.name), max_len)]
    for candidate, curve in frozen:
        curves.append(best_curve if candidate is best else curve)
        if candidate is best:
            curves += moving
    exact = measure.exact(best, [best_curve, *moving], samples) if samples else None
    return curves, exact


def _write(result: ScalingSweep, options: SweepOptions) -> None:
    from windlass.lab.perplexity_report import to_html, to_markdown
    from windlass.lab.plotting import save_png, to_svg
    from windlass.lab.sweep_plots import draw_sweep

    recommendation = recommend(result)
    date = datetime.date.today().isoformat()
    figure = draw_sweep(result)
    write_text(options.html, to_html(result, recommendation, to_svg(figure), date))
    if options.json is not None:
        payload = {"date": date, **result.to_json(), "recommendation": recommendation.to_json()}
        write_text(options.json, json.dumps(payload, indent=1) + "\n")
    if options.png is not None:
        save_png(draw_sweep(result, ink="#222222"), options.png)
    if options.markdown is not None:
        picture = None if options.png is None else options.png.name
        write_text(options.markdown, to_markdown(result, recommendation, picture, date))
    say(f"{recommendation.curve} for {result.target_len:,} tokens: {recommendation.command}")
