"""Retrieval sweep: answers to questions about generated documents under every candidate, with a report.

A reading is one document under one rotation and one context rule: the log-probabilities of its last segment and of every
choice of every question. All readings of a document form one batch; the texts of a reading share the document through the
prefix cache. Torch is imported when the sweep runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.clients.terminal import print_status
from windlass.engine.errors import LoadError, RequestError, did_you_mean
from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig
from windlass.engine.interface.context import ContextRule
from windlass.engine.model.loading.preflight import check_start
from windlass.engine.rotary.rope_scaling import RotaryGroup, main_group, original_len
from windlass.lab.candidates import TaskCandidate, chosen_task_candidates, task_candidates, window_candidate
from windlass.lab.result_log import ResultLog, result_key
from windlass.lab.retrieval_documents import (
    ALL_TASKS,
    CODE_TASKS,
    KEY_TOKENS,
    PROSE_TASKS,
    Document,
    DocumentKind,
    DocumentMaker,
)
from windlass.lab.retrieval_report import to_html, to_markdown
from windlass.lab.retrieval_results import DocumentReadings, Reading, TaskSweep, judge
from windlass.lab.scaling_inspection import display_name, read_groups
from windlass.lab.sweep_options import CommonSweepOptions
from windlass.lab.sweep_progress import SweepProgress
from windlass.lab.sweep_texts import find_files, read_text

if TYPE_CHECKING:
    from windlass.lab.scoring import BatchScorer, TextToScore


_SHORT_SHARE = 8  # long context / short context, for key tokens

_VERSION = 2  # of the layout of texts; increase it when equal documents are read differently


def reading_log(path: Path | None) -> ResultLog[Reading]:
    """Finished readings, stored in the file `path` if there is one."""

    def parse(entry: Any) -> Reading:
        choices = tuple(tuple(float(value) for value in row) for row in entry["choices"])
        return Reading(choices, tuple(map(bool, entry["exact"])), tuple(map(float, entry["segment"])))

    return ResultLog(path, parse)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Texts of one reading, and its key in the result log."""

    key: str
    name: str
    texts: list[TextToScore]
    with_segment: bool

    @property
    def work(self) -> int:
        """Estimate of tokens to compute: the document once, then each ending and about half a block."""
        first = len(self.texts[0].token_ids)
        return first + sum(len(text.token_ids) - text.first + 24 for text in self.texts[1:])


class RetrievalRunner:
    """Reads documents under candidates. with_segment: whether to score their last segments."""

    def __init__(
        self,
        scorer: BatchScorer,
        candidates: Sequence[TaskCandidate],
        trained_len: int,
        result_log: ResultLog[Reading],
        progress: SweepProgress,
        *,
        with_segment: bool,
    ) -> None:
        self._scorer, self._candidates, self._trained_len = scorer, candidates, trained_len
        self._result_log, self._progress, self._with_segment = result_log, progress, with_segment
        self._plain = next(candidate for candidate in candidates if candidate.kind == "none")

    def announce(self, document: Document) -> None:
        """Announce the readings of a document that the result log does not hold."""
        for layout in self._missing(document):
            self._progress.expect(layout.work)

    def is_known(self, document: Document) -> bool:
        """Whether the result log holds every reading of a document."""
        return not self._missing(document)

    def __call__(self, document: Document) -> tuple[dict[str, Reading], tuple[float, ...]]:
        """Readings by candidate, and the segment's log-probabilities after a short context (empty without key tokens)."""
        layouts = self._missing(document)
        if layouts:
            self._progress.begin(document.label)
            self._run(document, layouts)
        found = {c.name: self._known(self._layout(document, c).key) for c in self._candidates}
        short = self._known(self._short(document).key).segment if self._with_segment else ()
        return found, short

    def _known(self, key: str) -> Reading:
        reading = self._result_log.find(key)
        if reading is None:
            raise RuntimeError(f"reading {key} is missing")
        return reading

    def _missing(self, document: Document) -> list[_Layout]:
        wanted = [self._layout(document, candidate) for candidate in self._candidates]
        if self._with_segment:
            wanted.append(self._short(document))
        by_key = {layout.key: layout for layout in reversed(wanted)}  # the first of equal ones gives its name
        return [layout for key, layout in reversed(by_key.items()) if self._result_log.find(key) is None]

    def _run(self, document: Document, layouts: list[_Layout]) -> None:
        owners = [(layout, index) for layout in layouts for index in range(len(layout.texts))]
        texts = [layout.texts[index] for layout, index in owners]
        entries: dict[str, dict[int, tuple[tuple[float, bool], ...]]] = {layout.key: {} for layout in layouts}
        before = sum(layout.work for layout in layouts)
        done = 0

        def computed(tokens: int) -> None:
            nonlocal done
            step = min(tokens, before - done)  # the announced work is an estimate
            done += step
            self._progress.computed(step)

        for place, scored in self._scorer.scores(texts, computed):
            layout, index = owners[place]
            found = entries[layout.key]
            found[index] = tuple((entry.logprob, entry.rank == 1) for entry in scored)
            if len(found) == len(layout.texts):
                if layout is layouts[-1] and before > done:
                    computed(before - done)
                self._finish(document, layout, [entries for _, entries in sorted(found.items())])

    def _finish(self, document: Document, layout: _Layout, scored: list[tuple[tuple[float, bool], ...]]) -> None:
        segment: tuple[float, ...] = ()
        if layout.with_segment:
            segment, scored = tuple(logprob for logprob, _ in scored[0]), scored[1:]
        choices, exact = [], []
        for question in document.questions if scored else ():
            own, scored = scored[: len(question.choices)], scored[len(question.choices) :]
            choices.append(tuple(sum(logprob for logprob, _ in entries) for entries in own))
            exact.append(all(first for _, first in own[0][: question.answer_len]))
        reading = Reading(tuple(choices), tuple(exact), segment)
        self._result_log.add(
            layout.key,
            reading,
            scaling=layout.name,
            length=document.length,
            document=document.number,
            kind=document.kind,
            choices=[[round(value, 5) for value in row] for row in choices],
            exact=exact,
            segment=[round(value, 5) for value in segment],
        )
        right = sum(row[0] == max(row) for row in choices)
        summary = f"{right} of {len(choices)} answers chosen, {sum(exact)} written" if choices else "segment read"
        self._progress.finished(f"{layout.name}: {document.label}: {summary}")

    def _layout(self, document: Document, candidate: TaskCandidate) -> _Layout:
        from windlass.lab.scoring import TextToScore

        as_read = self._plain if document.length <= candidate.plain_to else candidate
        ids = document.ids
        cut = as_read.cut_to
        if cut is not None:
            ids = ids[: document.head] + ids[len(ids) - (cut - document.tail - document.head) :]
        scaling, rule = as_read.parsed, as_read.context

        def text(token_ids: tuple[int, ...], first: int) -> TextToScore:
            return TextToScore(token_ids, first, scaling, as_read.policy, rule)

        texts = [text(ids, len(ids) - document.segment)] if self._with_segment else []
        for question in document.questions:
            start = (*ids, *question.ending)
            texts += [text((*start, *choice), len(start)) for choice in question.choices]
        what = [self._scorer.fingerprint(texts[0]), _rule_key(rule), cut, self._with_segment, _VERSION]
        return _Layout(self._key(document, what), candidate.name, texts, self._with_segment)

    def _short(self, document: Document) -> _Layout:
        """The segment after an eighth of the context, at most of the trained length, without scaling."""
        from windlass.lab.scoring import TextToScore

        before = min(document.length, self._trained_len) // _SHORT_SHARE
        ids = document.ids[-(before + document.segment) :]
        text = TextToScore(ids, before, self._plain.parsed)
        return _Layout(self._key(document, ["short", before, _VERSION]), "a short context", [text], True)

    def _key(self, document: Document, what: list[Any]) -> str:
        return result_key(self._scorer.identity, document.digest, what)


def _rule_key(rule: ContextRule) -> list[int | None]:
    return [rule.attention_window, rule.attention_sinks]


_MAX_DOCUMENTS = 10_000

_MAX_TOTAL_TOKENS = 1 << 26  # of all documents, which are generated before the first is read


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(CommonSweepOptions):
    """Options of `windlass rope sweep --tasks`.

    texts: files or directories, empty for generated documents; files named *.py are the code. documents: per length and kind.
    report_only: report on the documents of which the result log holds all readings, and compute nothing.
    """

    tasks: tuple[str, ...]
    texts: tuple[Path, ...] = ()
    lengths: tuple[int, ...] = ()
    documents: int = 4
    seed: int = 1
    kv_cache_memory: int | None = None
    report_only: bool = False


def parse_tasks(given: Sequence[str]) -> tuple[str, ...]:
    """Names of tasks from `--tasks A,B`, or `all`; raises LoadError, one line."""
    names = _split(given)
    if names == ["all"]:
        return ALL_TASKS
    for name in names:
        if name not in ALL_TASKS:
            meant = did_you_mean(name, ALL_TASKS)
            raise LoadError(f"--tasks: {name!r} is not known{meant}: use {', '.join(ALL_TASKS)} or all")
    if not names:
        raise LoadError(f"--tasks names none: use {', '.join(ALL_TASKS)} or all")
    return tuple(task for task in ALL_TASKS if task in names)


def _split(given: Sequence[str]) -> list[str]:
    """The words between commas that are not empty."""
    return [word.strip() for text in given for word in text.split(",") if word.strip()]


def parse_lengths(given: Sequence[str]) -> tuple[int, ...]:
    """Lengths from `--lengths 2048,4096`, ascending; raises LoadError, one line."""
    words = _split(given)
    if not words or not all(word.isascii() and word.isdigit() and 0 < int(word[:12]) < 2**31 for word in words):
        raise LoadError("--lengths takes numbers of tokens: write them like 2048,4096")
    return tuple(sorted({int(word) for word in words}))


def run_tasks(options: TaskOptions) -> TaskSweep:
    """Read all documents and write the reports. Options are checked before the model loads. Raises EngineError."""
    if not 1 <= options.documents <= _MAX_DOCUMENTS:
        raise LoadError(f"--documents must be between 1 and {_MAX_DOCUMENTS:,}, got {options.documents}")
    if options.attention_window is not None and (options.attention_window < 1 or options.attention_sinks < 0):
        raise LoadError("--attention-window must be at least 1, --attention-sinks at least 0")
    if options.report_only and options.keep is None:
        raise LoadError("--report-only reports on the results in --keep: give that file too")
    group = main_group(read_groups(options.model))
    trained = options.trained_len or original_len(group.scaling, group.base)
    lengths = options.lengths or (trained, 2 * trained)
    files = find_files(options.texts)
    options.check_outputs(files)
    _check_lengths(options, lengths)
    documents = _make_documents(options, files, lengths, trained)
    candidates = _candidates(options, group, trained, max(lengths))
    if any(c.cut_to is not None for c in candidates):
        _check_cut(documents, trained)
    result_log = reading_log(options.keep)

    from windlass.lab.scoring import BatchScorer

    scorer = options.load_scorer(BatchScorer.load, max_model_len=max(lengths), kv_cache_memory=options.kv_cache_memory)
    candidates, refused = _runnable(scorer, candidates, max(lengths))
    with SweepProgress() as progress:
        runner = RetrievalRunner(
            scorer, candidates, trained, result_log, progress, with_segment=KEY_TOKENS in options.tasks
        )
        if options.report_only:
            documents, lengths = _known(runner, documents, lengths)
        for document in documents:
            runner.announce(document)
        readings = [DocumentReadings(document, *runner(document)) for document in documents]
    key_judge = next((c for c in candidates if c.kind == "cut"), candidates[0])
    result = TaskSweep(
        model=options.model_name,
        model_name=display_name(options.model, options.model_name),
        trained_len=trained,
        lengths=lengths,
        tasks=options.tasks,
        candidates=tuple(candidates),
        documents=tuple(readings),
        judge=key_judge.name,
        texts=tuple(file.name for file in files),
        seed=options.seed,
        kv_cache_dtype=options.kv_cache_dtype,
        refused=tuple(refused),
    )
    verdicts = judge(result)
    from windlass.lab.sweep_plots import draw_tasks

    options.write_reports(
        html=lambda svg, date: to_html(result, verdicts, svg, date),
        markdown=lambda picture, date: to_markdown(result, verdicts, picture, date),
        content={**result.to_json(), "verdicts": [asdict(verdict) for verdict in verdicts]},
        draw=lambda ink: draw_tasks(result, ink),
    )
    for verdict in verdicts:
        if verdict.command is not None:
            print_status(f"{verdict.chosen} for {verdict.length:,} tokens: {verdict.command}")
        else:
            print_status(f"{verdict.length:,} tokens: {verdict.reasons[0]}")
    return result


def _check_lengths(options: TaskOptions, lengths: Sequence[int]) -> None:
    """Raise LoadError if the longest does not fit the model and this machine, or the total exceeds _MAX_TOTAL_TOKENS."""
    cache = CacheConfig(dtype=options.kv_cache_dtype, memory=options.kv_cache_memory)
    compute = ComputeConfig(device=options.device, dtype=options.dtype)
    if not options.report_only:
        check_start(EngineConfig(model=str(options.model), max_model_len=max(lengths), compute=compute, cache=cache))
    if (tokens := sum(lengths) * options.documents) > _MAX_TOTAL_TOKENS:
        raise LoadError(
            f"--lengths and --documents make {tokens:,} tokens, and the limit is {_MAX_TOTAL_TOKENS:,}: request fewer"
        )


def _make_documents(options: TaskOptions, files: list[Path], lengths: Sequence[int], trained: int) -> list[Document]:
    """The first documents of every length, then the second …, so that an interrupted run is balanced."""
    texts = {file.name: read_text(file) for file in files}
    if len(texts) < len(files):
        raise LoadError("--text: two files have the same name: rename one")
    tokenizer = options.load_tokenizer(options.model)
    makers = []
    kinds: tuple[tuple[DocumentKind, Collection[str]], ...] = (("prose", PROSE_TASKS), ("code", CODE_TASKS))
    for kind, about in kinds:
        of_kind = {name: text for name, text in texts.items() if name.endswith(".py") == (kind == "code")}
        # The loss of key tokens is measured on the prose of a sweep without questions.
        if any(task in about for task in options.tasks) or (kind == "prose" and options.tasks == (KEY_TOKENS,)):
            makers.append(
                DocumentMaker(tokenizer, options.tasks, of_kind, seed=options.seed, trained_len=trained, kind=kind)
            )
    return [maker.make(length, number) for number in range(options.documents) for length in lengths for maker in makers]


def _candidates(options: TaskOptions, group: RotaryGroup, trained: int, longest: int) -> list[TaskCandidate]:
    cut = options.cut or KEY_TOKENS in options.tasks  # it defines the key tokens
    if options.scalings:
        found = chosen_task_candidates(group, options.scalings, options.policies, trained, longest, cut=cut)
    else:
        found = [c for c in task_candidates(group, trained, longest) if cut or c.kind != "cut"]
    if options.window is not None:
        found.append(window_candidate(group, options.window))
    return found


def _known(
    runner: RetrievalRunner, documents: Sequence[Document], lengths: Sequence[int]
) -> tuple[list[Document], tuple[int, ...]]:
    """Documents of which the result log holds all readings, and their lengths. Raises LoadError if there are none."""
    found = [document for document in documents if runner.is_known(document)]
    if not found:
        raise LoadError("--report-only: --keep has no complete document of these options: run without it first")
    present = {document.length for document in found}
    return found, tuple(length for length in lengths if length in present)


def _check_cut(documents: Sequence[Document], trained: int) -> None:
    needed = max((d.head + d.segment + d.tail + 1 for d in documents if d.length > trained), default=0)
    if needed > trained:
        raise LoadError(
            f"a text cut to the trained length of {trained} tokens is too short for the questions, which need {needed}: exclude "
            "it with --no-cut, and key-tokens from --tasks"
        )


def _runnable(
    scorer: BatchScorer, candidates: list[TaskCandidate], longest: int
) -> tuple[list[TaskCandidate], list[tuple[str, str]]]:
    """Candidates that this model can run, and (name, reason) of the others. Raises RequestError for a requested one."""
    from windlass.lab.scoring import TextToScore

    found, refused = [], []
    for candidate in candidates:
        if candidate.plain_to >= longest:  # it equals the model without scaling
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
