"""Reads the windows of a sweep through the model under every candidate. Computes each distinct plan of a window once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from windlass.engine.errors import RequestError
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli.rope.candidates import Candidate, sample_rows
from windlass.server.cli.rope.kept_lines import result_key
from windlass.server.cli.rope.kept_passes import PassLog
from windlass.server.cli.rope.sweep_progress import SweepProgress
from windlass.server.cli.rope.sweep_results import Curve, ExactComparison, ExactPoint, SweptText

if TYPE_CHECKING:
    from windlass.engine.api.context import ContextRule
    from windlass.engine.evaluation.scoring import Scorer
    from windlass.engine.rotary.policy import RotaryPlan
    from windlass.server.cli.rope.texts import Window

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
