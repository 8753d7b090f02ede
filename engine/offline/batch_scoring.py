"""Log-probabilities of many texts at once, each under a scaling of its own, through the engine that serves.

Responsible for evidence from the serving path itself: the batch, the prefix cache and the rules of requests are those of a
server. Texts under a window are the exception: a server shares nothing of theirs behind the window, so what they begin with
alike would be computed for each of them; they go through the engine's runner by `Scorer` instead, and it once.
It knows no text, no task and no files other than through the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from windlass.engine.api.config import CacheConfig, ComputeConfig, EngineConfig, SchedulerConfig
from windlass.engine.api.context import ContextRule
from windlass.engine.api.request import EngineRequest, SamplingParams, TokenLogprobs
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import RequestError
from windlass.engine.evaluation.scoring import Scorer
from windlass.engine.model.loading.weights import Progress
from windlass.engine.rotary.policy import RopeUpdate, RotaryPlan
from windlass.engine.rotary.scaling import RopeScaling

_MAX_WAITING, _MAX_WAITING_TOKENS = 1 << 20, 1 << 40  # given at once; who gives them bounds them


@dataclass(frozen=True, slots=True)
class TextToScore:
    """One text. first: index of the first token that is scored, at least 1; what stands before may come from the cache.

    scaling: None for the model's own. update: see `EngineRequest.rope_update`. context: what a token sees.
    """

    token_ids: tuple[int, ...]
    first: int
    scaling: RopeScaling | None = None
    update: RopeUpdate | None = None
    context: ContextRule = field(default_factory=ContextRule)


class BatchScorer:
    """One loaded engine. identity: of the weights and of all that changes what is computed from them, the cache's dtype too."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scorer = Scorer(core.runner.decoder, getattr(torch, core.info.kv_cache_dtype))
        self.identity = f"{core.info.fingerprint} {core.info.kv_cache_dtype}"

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        max_model_len: int,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_cache_memory: int | None = None,
        progress: Progress | None = None,
    ) -> BatchScorer:
        """Load a Hugging Face directory as the server would; raises LoadError, one line, as where the cache is too small."""
        config = EngineConfig(
            model=str(directory),
            max_model_len=max_model_len,
            compute=ComputeConfig(device=device, dtype=dtype),
            cache=CacheConfig(dtype=kv_cache_dtype, memory=kv_cache_memory),
            # No stream waits for these steps, so they need not be short.
            scheduling=SchedulerConfig(
                max_waiting=_MAX_WAITING, max_waiting_tokens=_MAX_WAITING_TOKENS, target_step_seconds=0.0
            ),
        )
        return cls(EngineCore(config, progress))

    @property
    def trained_len(self) -> int:
        return self._core.info.trained_len

    def check(self, text: TextToScore) -> None:
        """Raise RequestError where the model cannot run this text under its scaling and rule."""
        self._core.add(_request("check", text))
        self._core.abort("check")

    def fingerprint(self, text: TextToScore) -> str:
        """What a text is rotated by: texts of equal tokens, rules and fingerprints get equal scores."""
        plan = self._core.plan_rotation(_request("plan", text))
        return " ".join(spec.fingerprint for spec in plan.stage(len(text.token_ids)).specs)

    def scores(
        self, texts: Sequence[TextToScore], computed: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        """(index of the text, the log-probability and rank of each token from `first` on), as texts are done.

        All texts are in the engine at once and run in the order given, as many as there is room for. computed: told after
        each step how many tokens it had. Raises RequestError for a text that cannot run, or whose numbers are not finite.
        """
        core = self._core
        windowed = [index for index, text in enumerate(texts) if text.context.attention_window is not None]
        try:
            for index, text in enumerate(texts):
                core.add(_request(str(index), text))
            for index in windowed:  # they were looked at as any request
                core.abort(str(index))
            while core.has_work():
                before = core.runner.positions_computed
                outputs = core.step()
                if computed is not None:
                    computed(core.runner.positions_computed - before)
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    index = int(output.request_id)
                    entries = (output.prompt_logprobs or ())[texts[index].first :]
                    yield index, tuple(entry for entry in entries if entry is not None)
        finally:
            for index in range(len(texts)):
                core.abort(str(index))
        for group in self._group_by_plan([(index, texts[index]) for index in windowed]):
            yield from self._windowed(group, computed)

    def _windowed(
        self, group: list[tuple[int, TextToScore]], computed: Callable[[int], None] | None
    ) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        """Of texts under one rule and scaling: what they begin with alike passes through the model once."""
        text = group[0][1]
        plan = self._core.plan_rotation(_request("plan", text))
        shared = _common_prefix_len([text.token_ids for _, text in group])
        endings_group = [(index, text) for index, text in group if shared <= text.first]
        for part in ([(index, text)] for index, text in group if shared > text.first):
            yield from self._score_after(part, part[0][1].first, plan, computed)
        yield from self._score_after(endings_group, shared, plan, computed)

    def _group_by_plan(self, texts: list[tuple[int, TextToScore]]) -> list[list[tuple[int, TextToScore]]]:
        """Those under one rule and the same frequencies that begin with the same token, together, in order."""
        groups: dict[tuple[ContextRule, str, int], list[tuple[int, TextToScore]]] = {}
        for index, text in texts:
            groups.setdefault((text.context, self.fingerprint(text), text.token_ids[0]), []).append((index, text))
        return list(groups.values())

    def _score_after(
        self,
        group: list[tuple[int, TextToScore]],
        start: int,
        plan: RotaryPlan,
        computed: Callable[[int], None] | None,
    ) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        if not group:
            return
        endings = [text.token_ids[start:] for _, text in group]
        first = group[0][1]
        found = self._scorer.endings(first.token_ids[:start], endings, plan, context=first.context, computed=computed)
        for (index, text), entries in zip(group, found, strict=True):
            yield index, entries[text.first - start :]


def _common_prefix_len(texts: Sequence[tuple[int, ...]]) -> int:
    """Leading tokens that all of them have."""
    low, high = min(texts), max(texts)  # in the order of tuples; what these two share, those between them share
    return next(
        (place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )


def _request(request_id: str, text: TextToScore) -> EngineRequest:
    if not 1 <= text.first < len(text.token_ids):
        raise RequestError(f"first must lie between 1 and {len(text.token_ids) - 1}, got {text.first}", "first")
    sampling = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, prompt_logprobs_from=text.first)
    return EngineRequest(
        request_id,
        list(text.token_ids),
        sampling,
        rope_scaling=text.scaling,
        rope_update=text.update,
        context=text.context,
    )
