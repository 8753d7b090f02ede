"""Teacher-forced scores of one text under a rotary plan: what a model thinks of every token, by any policy.

Responsible for evidence, not for serving: it runs one text at a time, by plans it writes itself, through the runner that
serves, without scheduler, prefix cache or draws, so that what a policy does can be seen alone. It never reads files other
than through `loader`.

Row i stands for position i: it has read i + 1 tokens and predicts token i + 1. Under every policy row i runs under the
frequencies the plan gives to a context of i + 1 tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from windlass.engine.api.config import CacheConfig, ComputeConfig, EngineConfig
from windlass.engine.api.context import ContextRule
from windlass.engine.api.request import SamplingParams, TokenLogprobs
from windlass.engine.cache.changes import BlockCopy, KeyRerotation, TableChange, TableChanges
from windlass.engine.cache.storage import KVCache
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.execution.runner import ModelRunner
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.weights import Progress
from windlass.engine.rotary.policy import RopeUpdate, RotaryPlan, RotaryPlanner
from windlass.engine.rotary.scaling import RopeScaling, RotarySpec
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler, token_logprobs
from windlass.engine.scheduling.plan import NewSequence, RotaryRow, ScheduledSequence, SchedulerOutput

_BLOCK = 16

Specs = tuple[RotarySpec, ...]
Stage = tuple[int, int, Specs]  # first row, end row, what they run under


class SingleSequenceRunner:
    """Forward passes of one text at a time by a loaded model, under a rotary plan.

    chunk: maximum number of tokens in one forward pass, and of rows returned at once, so that memory does not grow with the text
    beyond its keys and values.
    """

    def __init__(self, decoder: Decoder, cache_dtype: torch.dtype, *, chunk: int = 512) -> None:
        self.decoder, self.cache_dtype, self.chunk = decoder, cache_dtype, chunk

    @property
    def trained_len(self) -> int:
        return self.decoder.spec.trained_len

    def plan(
        self,
        longest: int,
        scaling: RopeScaling | None = None,
        rope_update: RopeUpdate | None = None,
        *,
        exact: bool = False,
    ) -> RotaryPlan:
        """The plan of a text of at most `longest` tokens; scaling None is the model's own. Raises RequestError."""
        return RotaryPlanner(self.decoder.spec.rotary_groups).plan(longest, scaling, rope_update, exact=exact)

    def hidden(self, token_ids: Sequence[int], plan: RotaryPlan) -> Tensor:
        """Final hidden states of every row, [T, hidden] on the CPU, from which `decoder.logits` makes logits."""
        with torch.inference_mode():
            rows = self.rows(token_ids, plan, range(len(token_ids)), prompt=1)
            return torch.cat([hidden.cpu() for _, hidden in rows])

    def rows(
        self,
        token_ids: Sequence[int],
        plan: RotaryPlan,
        rows: Sequence[int],
        *,
        prompt: int,
        context: ContextRule | None = None,
        computed: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(rows, their hidden states) for ascending rows, in pieces of at most `chunk`."""
        self.check_tokens(token_ids, context)
        if rows:
            rotates = plan.policy == "rotate"
            read = tuple(token_ids[: rows[-1] + 1])
            stages = list(plan_stages(plan, len(read), prompt))
            far = any(spec.distances.has_second_keys for _, _, specs in stages for spec in specs)
            copies = 2 if rotates or far else 1
            text = SequencePasses(self, read, copies, context, computed, far=far)
            walk = text.rotate(iter(stages)) if rotates else text.recompute(iter(stages), rows)
            wanted = set(rows)
            for first, hidden in walk:
                chosen = [i for i in range(first, first + hidden.shape[0]) if i in wanted]
                if chosen:
                    yield chosen, hidden[[i - first for i in chosen]]

    def check_tokens(self, token_ids: Sequence[int], context: ContextRule | None) -> None:
        """Raise RequestError for a token id outside the vocabulary, or a window of no tokens."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.decoder.spec.vocab_size:
            raise RequestError(f"token ids must lie between 0 and {self.decoder.spec.vocab_size - 1}", "token_ids")
        window = None if context is None else context.attention_window
        if context is not None and window is not None and (window < 1 or context.attention_sinks < 0):
            raise RequestError("attention_window must be at least 1, attention_sinks at least 0", "attention_window")


class Scorer(SingleSequenceRunner):
    """Log-probabilities of given tokens. At most `chunk` rows of logits exist at once.

    weights: identifies the weights and their dtype. `identity` adds the dtype of the cache.
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
        """Load a Hugging Face directory as the server would; raises LoadError with one line."""
        compute, cache = ComputeConfig(device=device, dtype=dtype), CacheConfig(dtype=kv_cache_dtype)
        model = load_model(EngineConfig(model=str(directory), compute=compute, cache=cache), progress)
        if not model.decoder.spec.generates:
            raise LoadError(
                f"{directory} is a {model.decoder.spec.architecture}, which predicts no next token: give a model that generates"
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

        context: what each token sees of those before it, by its window and sinks; None: all. computed: told after each forward
        pass how many tokens it had; together they come to `work`. Raises RequestError for a token the model does not have, a
        row without a next token, or a window of no tokens.
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
        """Of each ending, read behind the same text as if it alone stood there: every token's log-probability and rank. The text
        passes through the model once.

        All of a text and its ending runs under the frequencies of their length. context, computed: as `logprobs` has them. Raises
        RequestError for a text or an ending of no tokens, a token that the model does not have, or lengths whose frequencies
        differ; EngineError where logits are not finite.
        """
        self.check_tokens(token_ids, context)
        if not token_ids or not all(endings):
            raise RequestError("a text and its endings have at least one token each", "token_ids")
        stages = {plan.stage(len(token_ids) + len(ending)).specs for ending in endings}
        if len(stages) > 1:
            raise RequestError(
                "endings that share a text run under the same frequencies: give shorter ones", "token_ids"
            )
        for ending in endings:
            self.check_tokens(ending, context)
        longest = len(token_ids) + max(map(len, endings), default=0)
        specs = plan.stage(longest).specs
        copies = 2 if any(spec.distances.has_second_keys for spec in specs) else 1
        found = []
        with torch.inference_mode():
            text = SequencePasses(self, tuple(token_ids), copies, context, computed, far=copies == 2, capacity=longest)
            text.prefill(len(token_ids), specs)
            for ending in endings:
                entries: list[TokenLogprobs] = []
                for hidden in text.read_ending(tuple(ending), specs):
                    wanted = ending[len(entries) : len(entries) + hidden.shape[0]]
                    logits = self.decoder.logits(hidden)  # [R, V]
                    entries += token_logprobs(self.decoder.backend, logits, torch.tensor(wanted), 0)
                found.append(tuple(entries))
        return found

    def most_likely(self, token_ids: Sequence[int], plan: RotaryPlan, *, rows: Sequence[int]) -> list[int]:
        """The most likely next token at each of these ascending rows."""
        found: list[int] = []
        with torch.inference_mode():
            for _, hidden in self.rows(token_ids, plan, rows, prompt=1):
                found += self.decoder.logits(hidden).argmax(dim=1).tolist()
        return found

    @staticmethod
    def work(plan: RotaryPlan, rows: Sequence[int]) -> int:
        """Tokens that pass through the model until these ascending rows are scored."""
        if not rows or plan.policy != "recompute":
            return rows[-1] + 1 if rows else 0
        total, place = 0, 0
        for _, end, _ in plan_stages(plan, rows[-1] + 1, prompt=1):
            after = bisect_left(rows, end, place)
            total += rows[after - 1] + 1 if after > place else 0
            place = after
        return total

    def logits(self, token_ids: Sequence[int], plan: RotaryPlan, *, prompt: int = 1) -> Tensor:
        """Logits of every row, float32 [T, V] on the CPU: for short texts.

        prompt: tokens that are given at once, so that all of them run under the frequencies of that many.
        """
        with torch.inference_mode():
            rows = self.rows(token_ids, plan, range(len(token_ids)), prompt=prompt)
            return torch.cat([self.decoder.logits(hidden).cpu() for _, hidden in rows])


def plan_stages(plan: RotaryPlan, length: int, prompt: int) -> Iterator[Stage]:
    """Those from row 0 to `length`, in order and without gaps."""
    first, context = 0, prompt
    while first < length:
        stage = plan.stage(context)
        end = length if stage.last_length is None else min(stage.last_length, length)
        yield first, end, stage.specs
        first, context = end, end + 1


class SequencePasses:
    """One text as the only sequence of a runner of its own, and its passes: each yields (first row, hidden states [R, hidden]).

    num_copies: how often each key is to be held. far: whether one of them is as keys seem from far away. room: tokens that pages
    are made for, None for those of the text. context: what each token sees, None for all. computed: called
    after each forward pass with its number of tokens.
    """

    def __init__(
        self,
        runner: SingleSequenceRunner,
        token_ids: tuple[int, ...],
        num_copies: int,
        context: ContextRule | None,
        computed: Callable[[int], None] | None = None,
        *,
        far: bool = False,
        capacity: int | None = None,
    ) -> None:
        decoder, self._chunk, self._computed = runner.decoder, runner.chunk, computed
        spec, self._token_ids, self._num_tokens = decoder.spec, token_ids, len(token_ids)
        self._context, self._far = context or ContextRule(), far
        self._groups = range(len(spec.kv_groups))
        self._num_blocks = -(-(capacity or len(token_ids)) // _BLOCK)
        self._has_states = spec.state_group is not None
        pools = [num_copies * self._num_blocks] * len(self._groups)
        dtype, states = runner.cache_dtype, spec.state_group
        cache = KVCache(spec.kv_groups, pools, _BLOCK, dtype, decoder.backend, states, num_states=2)
        tables = RotaryTables(1, [group.base for group in spec.rotary_groups], decoder.backend)
        self._runner = ModelRunner(decoder, cache, tables, Sampler(spec.vocab_size, decoder.backend), _BLOCK)
        self._runner.apply(SchedulerOutput(self._next_step, new=(self._sequence(token_ids),)))

    def _sequence(self, token_ids: tuple[int, ...], state: int = 0) -> NewSequence:
        """The only one, on all pages there are. state: the block of states that it changes, if there are any."""
        groups, states = len(self._groups), (TableChange(appended=(state,)),) * self._has_states
        table = TableChange(appended=tuple(range(self._num_blocks)))
        far_table = TableChange(appended=tuple(range(self._num_blocks, 2 * self._num_blocks)))
        return NewSequence(
            seq_id=0,
            index=0,
            sampling=SamplingParams(),
            seed=0,
            num_prompt_tokens=len(token_ids),
            stop_ids=(),
            token_ids=token_ids,
            tables=TableChanges(
                True, (table,) * groups + states + ((far_table,) * groups + states if self._far else ())
            ),
            rotary_id=0,
            window=self._context.attention_window,
            sinks=self._context.attention_sinks,
        )

    def prefill(self, num_tokens: int, specs: Specs) -> None:
        """Let the pages hold a text that endings are read behind. They begin with its last token, which states have not seen."""
        last = num_tokens - 1 - self._has_states
        for _ in self.recompute(iter([(0, num_tokens, specs)]), [last] if last >= 0 else []):
            pass

    def read_ending(self, ending: tuple[int, ...], specs: Specs) -> Iterator[Tensor]:
        """Hidden states [R, hidden] of the rows that predict an ending behind the text, whose keys lie in the pages. What an
        ending before it left there is written over."""
        whole = self._token_ids + ending
        self._num_tokens = len(whole)
        copies = (BlockCopy(len(self._groups), 0, 1),) * self._has_states
        new = self._sequence(whole, state=int(self._has_states))
        self._runner.apply(SchedulerOutput(self._next_step, removed=(0,), new=(new,), copies=copies))
        for _, hidden in self._forward(len(self._token_ids) - 1, len(whole) - 1, specs):
            yield hidden

    @property
    def _next_step(self) -> int:
        return self._runner.sequences.step + 1

    def recompute(self, stages: Iterator[Stage], rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """One pass over everything up to the last wanted row of each stage, of which that stage's rows count.

        A plan that never changes has one stage, so this is also `frozen`.
        """
        remaining = list(reversed(rows))
        for first, end, specs in stages:
            last = -1
            while remaining and remaining[-1] < end:
                last = remaining.pop()
            if last < first:
                continue
            for start, hidden in self._forward(0, last + 1, specs):
                if start + hidden.shape[0] > first:
                    skipped = max(0, first - start)
                    yield start + skipped, hidden[skipped:]

    def rotate(self, stages: Iterator[Stage]) -> Iterator[tuple[int, Tensor]]:
        """One pass; at each change of frequencies every cached key is re-rotated to the new ones.

        The keys as computed are kept in a second half of the cache, and every re-rotation starts from those.
        """
        passed: list[Stage] = []
        for first, end, specs in stages:
            last = passed[-1:]
            change = SchedulerOutput(
                self._next_step,
                original_copies=tuple(
                    self._rerotation(group, stage, stage[2], aside=True) for group in self._groups for stage in last
                ),
                rerotations=tuple(self._rerotation(group, stage, specs) for group in self._groups for stage in passed),
            )
            self._runner.apply(change)
            yield from self._forward(first, end, specs)
            passed.append((first, end, specs))

    def _rerotation(self, group: int, stage: Stage, specs: Specs, *, aside: bool = False) -> KeyRerotation:
        """Of the keys of a stage, from the second half of the cache to the first; aside: the other way round."""
        first, end, origin = stage
        live = range(first // _BLOCK, -(-end // _BLOCK))
        originals = range(live.start + self._num_blocks, live.stop + self._num_blocks)
        sources, targets = (live, originals) if aside else (originals, live)
        return KeyRerotation(
            group=group,
            start=first,
            end=end,
            sources=tuple(sources),
            targets=tuple(targets),
            first_position=first,
            from_specs=origin,
            to_specs=specs,
        )

    def _forward(self, first: int, end: int, specs: Specs) -> Iterator[tuple[int, Tensor]]:
        """Run rows first .. end - 1 under `specs`, the rows before them being cached."""
        for start, stop in pairwise([*range(first, end, self._chunk), end]):
            plan = SchedulerOutput(
                self._next_step,
                rotary_rows=(RotaryRow(0, specs),),
                sequences=(ScheduledSequence(0, start, stop - start, self._num_tokens),),
            )
            hidden = self._runner.hidden_states(plan)
            if self._computed is not None:
                self._computed(stop - start)
            yield start, hidden
