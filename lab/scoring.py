"""Scorers: log-probabilities of given texts under any rotary plan.

`Scorer` computes one text at a time outside the scheduler, so that the effect of a policy is measured in isolation. `BatchScorer`
sends many texts through the engine core with its batching and prefix cache. It uses `Scorer` for texts with an attention window,
because the engine shares no blocks behind the window and would compute their common prefix once per text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.execution.single_sequence import SequencePasses, SingleSequenceRunner, plan_stages
from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig, SchedulerConfig
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.outputs import TokenLogprobs
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.weights import Progress
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import RopeUpdate, RotaryPlan
from windlass.engine.sampling.sampler import token_logprobs


class Scorer(SingleSequenceRunner):
    """Log-probabilities of given tokens. At most `chunk` rows of logits exist at once.

    weights: identifies the weights and their dtype. identity: the same with the dtype of the cache.
    """

    def __init__(self, decoder: Decoder, cache_dtype: torch.dtype, *, chunk: int = 512, weights: str = "") -> None:
        super().__init__(decoder, cache_dtype, chunk=chunk)
        self.identity = f"{weights} {cache_dtype}"

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        progress: Progress | None = None,
    ) -> Scorer:
        """Load a Hugging Face directory as the server does. Raises LoadError."""
        compute, cache = ComputeConfig(device=device, dtype=dtype), CacheConfig(dtype=kv_cache_dtype)
        model = load_model(EngineConfig(model=str(directory), compute=compute, cache=cache), progress)
        if not model.decoder.spec.generates:
            raise LoadError(
                f"{directory} is a {model.decoder.spec.architecture}, which does not predict text: give a model that generates"
            )
        return cls(model.decoder, model.cache_dtype, weights=f"{model.digest.hex()} {model.decoder.dtype}")

    def logprobs(
        self,
        token_ids: Sequence[int],
        plan: RotaryPlan,
        *,
        rows: Sequence[int] | None = None,
        context: ContextRule | None = None,
        computed: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Log-probability (nats, float32 on the CPU) of token i + 1 at each row i; rows None: all but the last.

        context: attention window and sinks; None: every token sees all earlier ones. computed: called after each forward pass
        with its number of tokens, `work` in total. Raises RequestError for a token outside the vocabulary, a row without a next
        token, or an empty window.
        """
        rows = range(len(token_ids) - 1) if rows is None else sorted(set(rows))
        if rows and rows[-1] >= len(token_ids) - 1:
            raise RequestError(f"row {rows[-1]} has no next token among {len(token_ids)}", "rows")
        found: list[Tensor] = []
        with torch.inference_mode():
            for chosen, hidden in self.rows(token_ids, plan, rows, prompt=1, context=context, computed=computed):
                logits = self.decoder.logits(hidden)  # [R, V]
                target = torch.tensor([token_ids[i + 1] for i in chosen], device=logits.device)
                found.append((logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(dim=1)).cpu())
        return torch.cat(found) if found else torch.empty(0)

    def endings(
        self,
        token_ids: Sequence[int],
        endings: Sequence[Sequence[int]],
        plan: RotaryPlan,
        *,
        context: ContextRule | None = None,
        computed: Callable[[int], None] | None = None,
    ) -> list[tuple[TokenLogprobs, ...]]:
        """Log-probability and rank of every token of each ending after the same text. The text is computed once.

        Each ending is scored as if it alone followed the text, and both run under the frequencies of their total length. context,
        computed: as in `logprobs`. Raises RequestError for an empty text or ending, a token outside the vocabulary, or lengths
        whose frequencies differ; EngineError if logits are not finite.
        """
        self.check_tokens(token_ids, context)
        if not token_ids or not all(endings):
            raise RequestError("a text and its endings need at least one token each", "token_ids")
        stages = {plan.stage(len(token_ids) + len(ending)).specs for ending in endings}
        if len(stages) > 1:
            raise RequestError(
                "endings of one text must run under the same frequencies: give shorter ones", "token_ids"
            )
        for ending in endings:
            self.check_tokens(ending, context)
        longest = len(token_ids) + max(map(len, endings), default=0)
        specs = plan.stage(longest).specs
        second_keys = any(spec.distances.has_second_keys for spec in specs)
        found = []
        with torch.inference_mode():
            text = SequencePasses(self, tuple(token_ids), context, computed, second_keys=second_keys, capacity=longest)
            text.prefill(len(token_ids), specs)
            for ending in endings:
                entries: list[TokenLogprobs] = []
                for hidden in text.read_ending(tuple(ending), specs):
                    wanted = ending[len(entries) : len(entries) + hidden.shape[0]]
                    logits = self.decoder.logits(hidden)  # [R, V]
                    entries += token_logprobs(self.decoder.backend, logits, torch.tensor(wanted), 0)
                found.append(tuple(entries))
        return found

    @staticmethod
    def work(plan: RotaryPlan, rows: Sequence[int]) -> int:
        """Number of tokens that the model computes to score the ascending rows."""
        if not rows or plan.policy != "recompute":
            return rows[-1] + 1 if rows else 0
        total, place = 0, 0
        for _, end, _ in plan_stages(plan, rows[-1] + 1, prompt=1):
            after = bisect_left(rows, end, place)
            total += rows[after - 1] + 1 if after > place else 0
            place = after
        return total

    def logits(self, token_ids: Sequence[int], plan: RotaryPlan, *, prompt: int = 1) -> Tensor:
        """Logits of every row of a short text, float32 [T, V] on the CPU.

        prompt: number of leading tokens given at once; all of them run under the frequencies of that length.
        """
        with torch.inference_mode():
            rows = self.rows(token_ids, plan, range(len(token_ids)), prompt=prompt)
            return torch.cat([self.decoder.logits(hidden).cpu() for _, hidden in rows])


_MAX_WAITING, _MAX_WAITING_TOKENS = 1 << 20, 1 << 40  # practically unlimited; callers bound their texts


@dataclass(frozen=True, slots=True)
class TextToScore:
    """One text. first: index of the first scored token, at least 1; tokens before it may come from the cache.

    scaling: None is the model's own. update: see `EngineRequest.rope_update`. context: attention window and sinks.
    """

    token_ids: tuple[int, ...]
    first: int
    scaling: RopeScaling | None = None
    update: RopeUpdate | None = None
    context: ContextRule = field(default_factory=ContextRule)


class BatchScorer:
    """Scores many texts with one loaded engine.

    identity: identifies the weights and everything else that changes results, including the dtype of the cache.
    """

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
        """Load a Hugging Face directory as the server does. Raises LoadError, also if the cache is too small."""
        config = EngineConfig(
            model=str(directory),
            max_model_len=max_model_len,
            compute=ComputeConfig(device=device, dtype=dtype),
            cache=CacheConfig(dtype=kv_cache_dtype, memory=kv_cache_memory),
            # No stream waits for these steps, so their duration is not limited.
            scheduling=SchedulerConfig(
                max_waiting=_MAX_WAITING, max_waiting_tokens=_MAX_WAITING_TOKENS, target_step_seconds=0.0
            ),
        )
        return cls(EngineCore(config, progress))

    @property
    def trained_len(self) -> int:
        return self._core.info.trained_len

    def check(self, text: TextToScore) -> None:
        """Raise RequestError if the model cannot run the text under its scaling and context rule."""
        self._core.add(_request("check", text))
        self._core.abort("check")

    def fingerprint(self, text: TextToScore) -> str:
        """Fingerprint of a text's rotation. Texts with equal tokens, rules and fingerprints have equal scores."""
        plan = self._core.plan_rotation(_request("plan", text))
        return " ".join(spec.fingerprint for spec in plan.stage(len(text.token_ids)).specs)

    def scores(
        self, texts: Sequence[TextToScore], computed: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        """(index of the text, log-probability and rank of each token from `first` on), as texts finish.

        All texts are queued at once and start in the given order, as many as fit the cache. computed: called after each step with
        its number of tokens. Raises RequestError for a text that cannot run, or whose log-probabilities are not finite.
        """
        core = self._core
        windowed = [index for index, text in enumerate(texts) if text.context.attention_window is not None]
        try:
            for index, text in enumerate(texts):
                core.add(_request(str(index), text))
            for index in windowed:  # `add` has checked them; `Scorer` computes them
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
        """Score texts of one rule and scaling; their common prefix is computed once."""
        text = group[0][1]
        plan = self._core.plan_rotation(_request("plan", text))
        shared = _common_prefix_len([text.token_ids for _, text in group])
        for index, text in group:
            if shared > text.first:
                yield from self._score_after([(index, text)], text.first, plan, computed)
        endings = [(index, text) for index, text in group if shared <= text.first]
        yield from self._score_after(endings, shared, plan, computed)

    def _group_by_plan(self, texts: list[tuple[int, TextToScore]]) -> list[list[tuple[int, TextToScore]]]:
        """Group texts with equal rules, frequencies and first tokens, in order."""
        groups: dict[tuple[ContextRule, str, int], list[tuple[int, TextToScore]]] = {}
        for index, text in texts:
            groups.setdefault((text.context, self.fingerprint(text), text.token_ids[0]), []).append((index, text))
        return list(groups.values())

    def _score_after(
        self, group: list[tuple[int, TextToScore]], start: int, plan: RotaryPlan, computed: Callable[[int], None] | None
    ) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        if not group:
            return
        endings = [text.token_ids[start:] for _, text in group]
        first = group[0][1]
        found = self._scorer.endings(first.token_ids[:start], endings, plan, context=first.context, computed=computed)
        for (index, text), entries in zip(group, found, strict=True):
            yield index, entries[text.first - start :]


def _common_prefix_len(texts: Sequence[tuple[int, ...]]) -> int:
    """Number of leading tokens that all texts share."""
    low, high = min(texts), max(texts)  # in lexicographic order: what these two share, all texts between them share
    return next(
        (place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )


def _request(request_id: str, text: TextToScore) -> EngineRequest:
    if not 1 <= text.first < len(text.token_ids):
        raise RequestError(f"first must be between 1 and {len(text.token_ids) - 1}, got {text.first}", "first")
    sampling = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, prompt_logprobs_from=text.first)
    return EngineRequest(
        request_id,
        list(text.token_ids),
        sampling,
        rope_scaling=text.scaling,
        rope_update=text.update,
        context=text.context,
    )
