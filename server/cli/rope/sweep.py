"""Runs a sweep: checks the request, reads the text through the model under every scaling, writes the reports.

Needs torch, which it imports when it runs. `measuring.py` reads, `texts.py` says what, `candidates.py` under what.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.clients.terminal.lines import say
from windlass.clients.terminal.outputs import check_outputs
from windlass.engine.errors import LoadError
from windlass.engine.rotary.policy import RopeUpdate
from windlass.engine.rotary.scaling import RopeScaling, original_len
from windlass.server.cli.rope.candidates import (
    POLICIES,
    chosen_candidates,
    factor_of,
    frozen_candidates,
    moving_candidates,
    own_candidates,
    static_candidates,
    window_sweep_candidate,
)
from windlass.server.cli.rope.inspection import read_groups
from windlass.server.cli.rope.kept_passes import PassLog
from windlass.server.cli.rope.measuring import PerplexityRunner
from windlass.server.cli.rope.outputs import display_name, write_text
from windlass.server.cli.rope.recommendation import recommend
from windlass.server.cli.rope.sweep_progress import SweepProgress
from windlass.server.cli.rope.sweep_results import Curve, ExactComparison, ScalingSweep
from windlass.server.cli.rope.texts import Encoder, find_files, make_windows
from windlass.server.startup.display import LoadingDisplay


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

    from windlass.engine.evaluation.scoring import Scorer

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
    from windlass.server.cli.rope.pictures import draw_sweep, save_png, to_svg
    from windlass.server.cli.rope.report import to_html, to_markdown

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
