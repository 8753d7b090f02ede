"""Runs the tasks: checks what was asked, makes the documents, asks under every candidate, writes the reports.

Needs torch, which it imports when it runs.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.clients.terminal.lines import say
from windlass.clients.terminal.outputs import check_outputs
from windlass.engine.api.config import CacheConfig, ComputeConfig, EngineConfig
from windlass.engine.errors import LoadError, RequestError, did_you_mean
from windlass.engine.model.loading.preflight import check_start
from windlass.engine.rotary.groups import RotaryGroup, main_group
from windlass.engine.rotary.policy import RopeUpdate
from windlass.engine.rotary.scaling import original_len
from windlass.server.cli.rope.inspection import read_groups
from windlass.server.cli.rope.outputs import display_name, write_text
from windlass.server.cli.rope.sweep_progress import SweepProgress
from windlass.server.cli.rope.tasks.candidates import (
    TaskCandidate,
    chosen_task_candidates,
    task_candidates,
    window_candidate,
)
from windlass.server.cli.rope.tasks.documents import Document, DocumentMaker
from windlass.server.cli.rope.tasks.kinds import ALL_TASKS, KEY_TOKENS
from windlass.server.cli.rope.tasks.measuring import ReadingLog, RetrievalRunner
from windlass.server.cli.rope.tasks.results import DocumentReadings, TaskSweep
from windlass.server.cli.rope.texts import Encoder, find_files, read_text
from windlass.server.startup.display import LoadingDisplay

if TYPE_CHECKING:
    from windlass.engine.offline.batch_scoring import BatchScorer

_MAX_DOCUMENTS = 10_000
_MAX_TOTAL_TOKENS = 1 << 26  # of all documents, which are made before one is read


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What `windlass rope sweep --tasks` was asked. texts: files or directories, empty for generated prose.

    documents: of each length. report_only: nothing is read, the report is of the documents that `keep` has whole. The other
    fields are those of `SweepOptions`.
    """

    model: Path
    tasks: tuple[str, ...]
    html: Path
    model_name: str
    load_tokenizer: Callable[[Path], Encoder]
    lengths: tuple[int, ...] = ()
    documents: int = 4
    seed: int = 1
    texts: tuple[Path, ...] = ()
    trained_len: int | None = None
    scalings: tuple[dict[str, Any], ...] = ()
    policies: tuple[RopeUpdate, ...] = ()
    cut: bool = True
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | None = None
    report_only: bool = False
    attention_window: int | None = None
    attention_sinks: int = 4
    device: str = "auto"
    dtype: str = "auto"
    json: Path | None = None
    png: Path | None = None
    markdown: Path | None = None
    keep: Path | None = None


def parse_tasks(given: Sequence[str]) -> tuple[str, ...]:
    """Names of tasks from `--tasks A,B`, or `all`; raises LoadError, one line."""
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return ALL_TASKS
    for name in names:
        if name not in ALL_TASKS:
            meant = did_you_mean(name, ALL_TASKS)
            raise LoadError(f"--tasks: {name!r} is not known{meant}: use {', '.join(ALL_TASKS)} or all")
    if not names:
        raise LoadError(f"--tasks names none: use {', '.join(ALL_TASKS)} or all")
    return tuple(task for task in ALL_TASKS if task in names)


def parse_lengths(given: Sequence[str]) -> tuple[int, ...]:
    """Lengths from `--lengths 2048,4096`, ascending; raises LoadError, one line."""
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and 0 < int(word[:12]) < 2**31 for word in words):
        raise LoadError("--lengths takes numbers of tokens: write them like 2048,4096")
    return tuple(sorted({int(word) for word in words}))


def run_tasks(options: TaskOptions) -> TaskSweep:
    """Measure and write; what is wrong with the options is said before the model loads. Raises EngineError, one line."""
    if not 1 <= options.documents <= _MAX_DOCUMENTS:
        raise LoadError(f"--documents must lie between 1 and {_MAX_DOCUMENTS:,}, got {options.documents}")
    if options.attention_window is not None and (options.attention_window < 1 or options.attention_sinks < 0):
        raise LoadError("--attention-window must be at least 1, --attention-sinks at least 0")
    if options.report_only and options.keep is None:
        raise LoadError("--report-only reports on what --keep has: give that file too")
    group = main_group(read_groups(options.model))
    trained = options.trained_len or original_len(group.scaling, group.base)
    lengths = options.lengths or (trained, 2 * trained)
    outputs = {
        "--out": options.html,
        "--json": options.json,
        "--png": options.png,
        "--markdown": options.markdown,
        "--keep": options.keep,
    }
    files = find_files(options.texts)
    check_outputs(outputs)
    for file in files:
        check_outputs(outputs, {"--text": file})
    _check_lengths(options, lengths)
    documents = _make_documents(options, files, lengths, trained)
    candidates = _candidates(options, group, trained, max(lengths))
    if any(c.cut_to is not None for c in candidates):
        _check_cut(documents, trained)
    result_log = ReadingLog(options.keep)

    from windlass.engine.offline.batch_scoring import BatchScorer

    display, progress = LoadingDisplay(), SweepProgress()
    try:
        scorer = BatchScorer.load(
            options.model,
            max_model_len=max(lengths),
            device=options.device,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            kv_cache_memory=options.kv_cache_memory,
            progress=display,
        )
        display.stop()
        candidates, refused = _runnable(scorer, candidates, max(lengths))
        measure = RetrievalRunner(
            scorer, candidates, trained, result_log, progress, with_segment=KEY_TOKENS in options.tasks
        )
        if options.report_only:
            documents, lengths = _known(measure, documents, lengths)
        for document in documents:
            measure.announce(document)
        read = [DocumentReadings(document, *measure(document)) for document in documents]
    finally:
        display.stop()
        progress.stop()
    judge = next((c for c in candidates if c.kind == "cut"), candidates[0])
    result = TaskSweep(
        model=options.model_name,
        model_name=display_name(options.model, options.model_name),
        trained_len=trained,
        lengths=lengths,
        tasks=options.tasks,
        candidates=tuple(candidates),
        documents=tuple(read),
        judge=judge.name,
        texts=tuple(file.name for file in files),
        seed=options.seed,
        kv_cache_dtype=options.kv_cache_dtype,
        refused=tuple(refused),
    )
    _write(result, options)
    return result


def _check_lengths(options: TaskOptions, lengths: Sequence[int]) -> None:
    """LoadError where the longest does not fit the model and this machine, or all together are too much."""
    cache = CacheConfig(dtype=options.kv_cache_dtype, memory=options.kv_cache_memory)
    compute = ComputeConfig(device=options.device, dtype=options.dtype)
    if not options.report_only:
        check_start(EngineConfig(model=str(options.model), max_model_len=max(lengths), compute=compute, cache=cache))
    if (tokens := sum(lengths) * options.documents) > _MAX_TOTAL_TOKENS:
        raise LoadError(
            f"--lengths and --documents come to {tokens:,} tokens, at most {_MAX_TOTAL_TOKENS:,} are made: ask for fewer"
        )


def _make_documents(options: TaskOptions, files: list[Path], lengths: Sequence[int], trained: int) -> list[Document]:
    """The first of every length, then the second …: what an interrupted run has is balanced."""
    texts = {file.name: read_text(file) for file in files}
    if len(texts) < len(files):
        raise LoadError("--text: two files have the same name: rename one")
    tokenizer = options.load_tokenizer(options.model)
    maker = DocumentMaker(tokenizer, options.tasks, texts, seed=options.seed, trained_len=trained)
    return [maker.make(length, number) for number in range(options.documents) for length in lengths]


def _candidates(options: TaskOptions, group: RotaryGroup, trained: int, longest: int) -> list[TaskCandidate]:
    cut = options.cut or KEY_TOKENS in options.tasks  # key tokens are told by it
    if options.scalings:
        found = chosen_task_candidates(group, options.scalings, options.policies, trained, longest, cut=cut)
    else:
        found = [c for c in task_candidates(group, trained, longest) if cut or c.kind != "cut"]
    if options.attention_window is not None:
        found.append(window_candidate(group, options.attention_window, options.attention_sinks))
    return found


def _known(
    measure: RetrievalRunner, documents: Sequence[Document], lengths: Sequence[int]
) -> tuple[list[Document], tuple[int, ...]]:
    """The documents that were read whole, and their lengths. Raises LoadError where there are none."""
    found = [document for document in documents if measure.is_known(document)]
    if not found:
        raise LoadError("--report-only: --keep has no document whole that was read so: run without it first")
    there = {document.length for document in found}
    return found, tuple(length for length in lengths if length in there)


def _check_cut(documents: Sequence[Document], trained: int) -> None:
    need = max((d.head + d.segment + d.tail + 1 for d in documents if d.length > trained), default=0)
    if need > trained:
        raise LoadError(
            f"a text cut to the trained length of {trained} tokens has no room for the questions, which need {need}: leave it "
            "out with --no-cut, and key-tokens out of --tasks"
        )


def _runnable(
    scorer: BatchScorer, candidates: list[TaskCandidate], longest: int
) -> tuple[list[TaskCandidate], list[tuple[str, str]]]:
    """Those that this model can run, and the others with the reason. Raises RequestError for one that a person asked for."""
    from windlass.engine.offline.batch_scoring import TextToScore

    found, refused = [], []
    for candidate in candidates:
        if candidate.plain_to >= longest:  # nothing is asked of the model that it does not do anyway
            found.append(candidate)
            continue
        text = TextToScore((0,) * longest, longest - 1, candidate.parsed, candidate.policy, candidate.context)
        try:
            scorer.check(text)
        except RequestError as error:
            if candidate.chosen or candidate.kind == "none":
                raise
            refused.append((candidate.name, str(error)))
        else:
            found.append(candidate)
    return found, refused


def _write(result: TaskSweep, options: TaskOptions) -> None:
    from windlass.server.cli.rope.pictures import save_png, to_svg
    from windlass.server.cli.rope.tasks.pictures import draw_tasks
    from windlass.server.cli.rope.tasks.report import to_html, to_markdown
    from windlass.server.cli.rope.tasks.verdict import judge

    verdicts = judge(result)
    date = datetime.date.today().isoformat()
    write_text(options.html, to_html(result, verdicts, to_svg(draw_tasks(result)), date))
    if options.json is not None:
        payload = {"date": date, **result.to_json(), "verdicts": [verdict.to_json() for verdict in verdicts]}
        write_text(options.json, json.dumps(payload, indent=1) + "\n")
    if options.png is not None:
        save_png(draw_tasks(result, ink="#222222"), options.png)
    if options.markdown is not None:
        picture = None if options.png is None else options.png.name
        write_text(options.markdown, to_markdown(result, verdicts, picture, date))
    for verdict in verdicts:
        if verdict.command is not None:
            say(f"{verdict.chosen} for {verdict.length:,} tokens: {verdict.command}")
        else:
            say(f"{verdict.length:,} tokens: {verdict.reasons[0]}")
