"""Runs a sweep: checks the request, reads the text through the model under every scaling, writes the reports.

The only module of `windlass rope` that needs torch, which it imports when it runs.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from windlass.clients.terminal.lines import say
from windlass.clients.terminal.outputs import check_outputs
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.rotary.scaling import RopeScaling, original_len
from windlass.server.cli.rope.candidates import (
    Candidate,
    factor_of,
    frozen_candidates,
    moving_candidates,
    own_candidates,
    sample_rows,
    static_candidates,
    window_starts,
)
from windlass.server.cli.rope.inspection import read_groups
from windlass.server.cli.rope.recommendation import recommend
from windlass.server.cli.rope.sweep_results import Curve, ExactComparison, ExactPoint, ScalingSweep
from windlass.server.startup.display import LoadingDisplay

if TYPE_CHECKING:
    from windlass.engine.evaluation.scoring import Scorer
    from windlass.engine.rotary.policy import RotaryPlan

_POINTS = 8  # of the exact recompute in the plot

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What `windlass rope sweep` was asked. model: the directory; model_name: as the user gave it, None for the bundled."""

    model: Path
    text: Path
    html: Path
    model_name: str | None = None
    max_len: int = 4096
    target_len: int | None = None
    windows: int = 8
    samples: int = 16
    trained_len: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    json: Path | None = None
    png: Path | None = None
    markdown: Path | None = None


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
    outputs = {"--out": options.html, "--json": options.json, "--png": options.png, "--markdown": options.markdown}
    check_outputs(outputs, {"--text": options.text})
    text = _read_text(options.text)
    from windlass.server.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(options.model)
    prefix = tokenizer.encode("")  # what the model expects before any text, such as a BOS token
    ids = tokenizer.encode(text, add_special_tokens=False)
    needed = options.max_len + 1 - len(prefix)
    starts = window_starts(len(ids), needed, options.windows, max_len=options.max_len, text=str(options.text))
    windows = [[*prefix, *ids[start : start + needed]] for start in starts]

    from windlass.engine.evaluation.scoring import Scorer

    display = LoadingDisplay()
    try:
        scorer = Scorer.load(options.model, device=options.device, dtype=options.dtype, progress=display)
        measure = _Measure(scorer, windows, len(prefix), trained, display)
        curves, exact = _measure_all(measure, options, main.scaling, main.base.trained_len, target)
    finally:
        display.stop()
    result = ScalingSweep(
        model=options.model_name,
        model_name=_display_name(options),
        text_name=options.text.name,
        text_tokens=len(ids),
        text_digest=hashlib.sha256(text.encode()).hexdigest(),
        trained_len=trained,
        max_len=options.max_len,
        target_len=target,
        starts=starts,
        curves=tuple(curves),
        exact=exact,
    )
    _write(result, options)
    return result


def _display_name(options: SweepOptions) -> str:
    """A hub id as it was given; of a directory its name alone."""
    given = options.model_name
    return options.model.name if given is None or Path(given).expanduser().is_dir() else given


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot read --text {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LoadError(f"--text {path} is not UTF-8 text: convert it, for example with iconv") from None


class _Measure:
    """Loss of every row of every window under a plan, computed once per distinct plan."""

    def __init__(
        self, scorer: Scorer, windows: list[list[int]], num_prefix: int, trained_len: int, progress: Progress
    ) -> None:
        self.scorer, self.windows, self._progress = scorer, windows, progress
        self._num_prefix, self.trained_len = num_prefix, trained_len
        self._known: dict[tuple[str, ...], NDArray[np.float64]] = {}

    def __call__(self, candidate: Candidate) -> Curve:
        longest = candidate.longest or len(self.windows[0]) - 1
        plan = self.plan(candidate, longest)
        key: tuple[str, ...] = (plan.policy, *(group.scaling.rope_type for group in plan.groups), repr(plan.groups))
        if plan.policy == "frozen":  # whatever the name, equal frequencies give equal numbers
            key = tuple(spec.fingerprint for spec in plan.stage(longest).specs)
            key = (*key, str(min(longest, len(self.windows[0]) - 1)))
        if key not in self._known:
            self._known[key] = self._losses(candidate.label, plan, longest)
        return Curve(
            candidate.name,
            candidate.label,
            candidate.kind,
            candidate.scaling,
            candidate.policy,
            candidate.longest if candidate.policy == "frozen" else None,
            candidate.plotted,
            self._known[key],
        )

    def plan(self, candidate: Candidate, longest: int, *, exact: bool = False) -> RotaryPlan:
        scaling = None if candidate.scaling is None else RopeScaling.from_dict(candidate.scaling)
        return self.scorer.plan(longest, scaling, candidate.policy, exact=exact)

    def _losses(self, label: str, plan: RotaryPlan, longest: int) -> NDArray[np.float64]:
        rows = len(self.windows[0]) - 1
        found = np.full((len(self.windows), rows), np.nan)
        for index, window in enumerate(self.windows):
            self._progress(label, index, len(self.windows))
            end = min(longest, rows)
            found[index, :end] = -self.scorer.logprobs(window[: end + 1], plan).double().numpy()
        if np.isinf(found).any() or np.isnan(found[:, : min(longest, rows)]).any():
            raise RequestError(f"the model gives no finite numbers under {label}")
        return found

    def cut(self, none: Curve) -> Curve:
        """Every token read with the last half to whole trained length alone: what the model makes of short contexts."""
        half = self.trained_len // 2
        nll = none.nll.copy()
        plan = self.scorer.plan(self.trained_len, RopeScaling())
        for index, window in enumerate(self.windows):
            self._progress("text cut to the trained length", index, len(self.windows))
            prefix = window[: self._num_prefix]
            for low in range(self.trained_len, nll.shape[1], half):
                high = min(low + half, nll.shape[1])
                first = high - self.trained_len + len(prefix)  # of the text, so that all fits the trained length
                piece = [*prefix, *window[first : high + 1]]
                rows = range(len(piece) - 1 - (high - low), len(piece) - 1)
                nll[index, low:high] = -self.scorer.logprobs(piece, plan, rows=rows).double().numpy()
        label = f"no scaling, text cut to {half:,}–{self.trained_len:,} tokens"
        return Curve("text cut to the trained length", label, "cut", None, None, None, True, nll)

    def exact(self, candidate: Candidate, policies: Sequence[Curve], samples: int) -> ExactComparison:
        """Recompute for the exact length at sampled rows, beside each policy's loss at the very same rows."""
        length = len(self.windows[0]) - 1
        plan = self.plan(replace(candidate, policy="recompute"), length, exact=True)
        rows = [sample_rows(self.trained_len, length, samples, w, len(self.windows)) for w in range(len(self.windows))]
        losses = []
        for index, (window, chosen) in enumerate(zip(self.windows, rows, strict=True)):
            self._progress("dynamic, recomputed for the exact length", index, len(self.windows))
            losses.append(-self.scorer.logprobs(window, plan, rows=chosen).double().numpy())
        exact, where = np.stack(losses), np.array(rows)  # [K, S]
        above = {str(c.policy): np.take_along_axis(c.nll, where, axis=1) - exact for c in policies}
        grid = next(curve for curve in policies if curve.policy == "recompute")
        above_grid = above["recompute"]
        edges = np.linspace(self.trained_len, length, min(samples, _POINTS) + 1).astype(int)
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


def _measure_all(
    measure: _Measure, options: SweepOptions, own: RopeScaling, config_trained_len: int, target: int
) -> tuple[list[Curve], ExactComparison | None]:
    max_len = options.max_len
    statics = static_candidates(
        trained_len=measure.trained_len,
        config_trained_len=config_trained_len,
        max_len=max_len,
        target_len=target,
        own=own,
    )
    curves = [measure(candidate) for candidate in statics]
    curves.insert(1, measure.cut(curves[0]))
    curves += [measure(candidate) for candidate in own_candidates(own, max_len, target)]
    frozen = [(c, measure(c)) for c in frozen_candidates(max_len=max_len, target_len=target)]
    # The policies are compared at the factor that does best frozen for the whole length.
    full = [(c, curve) for c, curve in frozen if c.longest == max_len]
    best, best_curve = min(full, key=lambda pair: float(pair[1].nll.mean()))
    best_curve = replace(best_curve, plotted=True)
    moving = [replace(measure(c), plotted=True) for c in moving_candidates(factor_of(best.name), max_len)]
    for candidate, curve in frozen:
        curves.append(best_curve if candidate is best else curve)
        if candidate is best:
            curves += moving
    samples = min(options.samples, max_len - measure.trained_len)
    exact = measure.exact(best, [best_curve, *moving], samples) if samples else None
    return curves, exact


def _write(result: ScalingSweep, options: SweepOptions) -> None:
    from windlass.server.cli.rope.pictures import draw_sweep, save, to_svg
    from windlass.server.cli.rope.report import to_html, to_markdown

    recommendation = recommend(result)
    date = datetime.date.today().isoformat()
    figure = draw_sweep(result)
    _write_text(options.html, to_html(result, recommendation, to_svg(figure), date))
    if options.json is not None:
        payload = {"date": date, **result.to_json(), "recommendation": recommendation.to_json()}
        _write_text(options.json, json.dumps(payload, indent=1) + "\n")
    if options.png is not None:
        save(draw_sweep(result, ink="#222222"), options.png)
    if options.markdown is not None:
        picture = None if options.png is None else options.png.name
        _write_text(options.markdown, to_markdown(result, recommendation, picture, date))
    say(f"{recommendation.curve} for {result.target_len:,} tokens: {recommendation.command}")


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from None
