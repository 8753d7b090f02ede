"""A model without tensors: each slot of the cache stores which token chain its key was computed from.

The key of token i depends on every token up to i, as a deep layer's does, and on the request's
specs and salt. A slot also stores the spec of the key and the one it is re-rotated to. Reading through the block
tables must give exactly the keys of the sequence's own tokens at the current frequencies: a leaked, shared,
overwritten, stale, wrongly re-rotated or too early dropped block gives a wrong key. The step order is a real layer's:
copies, copies of originals, re-rotations, then all writes, then all reads.

Its tokens and tables come from pickled plans, as those of a rank in another process, and every table must equal
the scheduler's. A second input batch may miss plans (`lose_plans`), and is restored from a snapshot.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.block_pool import BlockPool
from windlass.engine.cache.cache_operations import KeyRerotation
from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.cache.sequence_cache import SlotLayout
from windlass.engine.execution.input_batch import InputBatch, MissedPlanError
from windlass.engine.execution.model_runner import MultiStepState
from windlass.engine.interface.config import SchedulerConfig, SpeculationConfig
from windlass.engine.interface.context import ContextRule, ContextSize, ContextSizes, NonPrefixReuseParams
from windlass.engine.interface.outputs import TokenLogprobs
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.attention_distances import PLAIN_DISTANCES, Distances
from windlass.engine.rotary.rotary_policy import RopeUpdate, RotaryReport, RotaryStage
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.scheduling import sequence
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput, Snapshot, StepResult
from windlass.engine.scheduling.sequence import SequenceStatus

VOCAB = 6
EOS = 5


GRID = (6, 8, 11, 16, 23, 32)  # lengths after which the frequencies of `FakeRotation` change


@dataclass(frozen=True)
class FakeSpec:
    fingerprint: str = "plain"
    distances: Distances = field(default=PLAIN_DISTANCES, repr=False)

    @property
    def inv_freq(self) -> tuple[str]:
        return (self.fingerprint,)


@dataclass(frozen=True)
class FakeRotation:
    """A rotary plan with one group whose spec is a name, followed by the end of its stage if it depends on length."""

    name: str = "plain"
    policy: RopeUpdate = "frozen"
    exact: bool = False
    longest: int = 10**9
    near: int | None = None  # from this distance on, second key copies are used

    def stage(self, length: int) -> RotaryStage:
        length, rule = min(length, self.longest), Distances(near=self.near)
        if self.policy == "frozen":
            return RotaryStage((FakeSpec(self.name, rule),), None, (None,))  # type: ignore[arg-type]
        last = length if self.exact and length > GRID[0] else next((end for end in GRID if length <= end), None)
        last = None if last is None or last >= self.longest else last
        return RotaryStage((FakeSpec(f"{self.name} {last}", rule),), last, (None,))  # type: ignore[arg-type]

    def specs_of(self, index: int, num_prompt: int, num_tokens: int) -> tuple[FakeSpec, ...]:
        """Return the specs for token `index` of a context of `num_tokens` tokens."""
        length = max(index + 1, num_prompt) if self.policy == "rotate" else num_tokens
        return self.stage(length).specs  # type: ignore[return-value]

    def report(self, stage: RotaryStage, moves: int) -> RotaryReport:
        return RotaryReport(self.name, {}, self.policy, stage.last_length, stage.specs[0].fingerprint, moves)


class FakeRotary:
    """A fixed number of rows with reference counts."""

    def __init__(self, num_rows: int) -> None:
        self.free = list(range(num_rows))
        self.rows: dict[tuple[FakeSpec, ...], int] = {}
        self.counts: Counter[int] = Counter()

    def acquire(self, specs: tuple[FakeSpec, ...]) -> int:
        if specs not in self.rows:
            self.rows[specs] = self.free.pop()
        self.counts[self.rows[specs]] += 1
        return self.rows[specs]

    def release(self, row: int) -> None:
        assert self.counts[row] > 0
        self.counts[row] -= 1
        if self.counts[row] == 0:
            del self.counts[row]
            self.rows = {specs: r for specs, r in self.rows.items() if r != row}
            self.free.append(row)


def extend_key(key: int, token: int, specs: tuple[FakeSpec, ...]) -> int:
    # Not hash(), which differs between processes for strings.
    return zlib.crc32(repr((key, token, specs)).encode())


def keys_of(request: EngineRequest, rotation: FakeRotation, token_ids: Sequence[int]) -> list[int]:
    """Return the correct key of every token of a context, computed from the request only."""
    key, keys = zlib.crc32(repr(request.cache_salt).encode()), []
    for i, token in enumerate(token_ids):
        key = extend_key(key, token, rotation.specs_of(i, len(request.prompt_token_ids), len(token_ids)))
        keys.append(key)
    return keys


def draw(key: int, slot: SampleSlot, num_output: int) -> int:
    """Return the token after a row with `key`. Stop ids are masked until `min_tokens`, as in the sampler.

    With seed 2 the tokens are mostly periodic, so that proposals are accepted.
    """
    generator = random.Random(hash((key, slot.seed, slot.index, num_output)))
    token = generator.randrange(VOCAB)
    if slot.seed == 2 and generator.random() < 0.8:
        return num_output % 3
    while num_output < slot.sampling.min_tokens and token in slot.stop_ids:
        token = generator.randrange(VOCAB)
    return token


def slots_of(layout: SlotLayout, num_tokens: int, kept: int) -> dict[int, tuple[int, int]]:
    """Return slot and position by token. kept: slots of retained tokens."""
    end, found = num_tokens + layout.slot_offset, {}
    for run in layout.runs:
        for slot in range(run.first_slot, min(run.end_slot, end)):
            place = slot + run.offset
            found[place - (layout.num_gap_closed if slot < kept else 0)] = slot, place
    return found


def seen_by(held: ContextSize, rule: ContextRule, index: int, num_dropped: int | None = None) -> dict[int, int]:
    """Return the tokens that a token must see, by brute force, with their positions.

    num_dropped: tokens dropped so far, for blocks with passages, which hold fewer tokens than slots.
    """
    if rule.attention_window is not None:
        first = max(0, index - rule.attention_window + 1)
        return {j: j for j in (*range(min(first, rule.attention_sinks)), *range(first, index + 1))}
    dropped = num_dropped or 0
    if held.window is not None and num_dropped is None:
        while index - dropped >= held.window:
            dropped += held.block_size
    kept = held.retained_blocks * held.block_size if dropped else 0
    return {j: j + dropped for j in range(kept)} | {j: j for j in range(kept + dropped, index + 1)}


@dataclass
class FakeExecutor:
    """Execution of plans on the stored keys, with assertions for everything that a real cache relies on."""

    scheduler: Scheduler
    rotary: FakeRotary
    # per group: (block, offset) -> key, its specs when computed, its specs after re-rotation
    store: list[dict[tuple[int, int], tuple[int, object, object]]] = field(default_factory=list)
    rotations: dict[str, FakeRotation] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)  # per sequence: tokens that were ever in the cache for it
    num_computed: int = 0
    num_recomputed: int = 0
    num_rerotated: int = 0
    num_drafts: int = 0
    num_drafted: int = 0  # by a draft model
    num_bursts: int = 0
    num_accepted: int = 0
    lose_plans: int = 0  # number of further plans that do not reach `other`
    num_healed: int = 0
    num_swapped_in: int = 0
    swapped_out: dict[int, Any] = field(default_factory=dict)
    # per sequence: its frequencies, the key of each token, and the predecessor of the next one
    key_memo: dict[int, tuple[object, list[int], int]] = field(default_factory=dict)
    key_facts: dict[int, tuple[int, int, set[str]]] = field(default_factory=dict)  # its token, position, and scopes
    num_reused: int = 0
    reused: set[str] = field(default_factory=set)  # requests that reused passages

    def __post_init__(self) -> None:
        self.store = [{} for _ in self.scheduler.blocks.pools]
        self.sequences = InputBatch(len(self.store), num_rows=1)
        self.other = InputBatch(len(self.store))
        self.rows: dict[int, object] = {}  # of the rotary tables
        self.other_rows: dict[int, object] = {}

    def follow(self, output: SchedulerOutput) -> SchedulerOutput:
        """Apply a pickled plan, and compare the resulting state with the scheduler's."""
        plan: SchedulerOutput = pickle.loads(pickle.dumps(output))
        for seq_id in {*plan.removed} - {swapped_out.seq_id for swapped_out in plan.swapped_out}:
            self.key_memo.pop(seq_id, None)
        self.sequences.apply(plan)
        self.rows.update((row.row, row.specs) for row in plan.rotary_rows)
        if self.lose_plans:
            self.lose_plans -= 1
        else:
            try:
                self.other.apply(plan)
                self.other_rows.update((row.row, row.specs) for row in plan.rotary_rows)
            except MissedPlanError as error:
                assert "snapshot" in str(error)
                self.heal()
        running = self.running()
        for item in plan.sequences:
            seq = running[item.seq_id]
            self.compare(self.sequences, seq)
            assert len(seq.token_ids) == item.num_known_tokens and self.rows[seq.rotary_id] == seq.stage.specs
            if self.other.step == plan.step:
                self.compare(self.other, seq)
                assert self.other_rows[seq.rotary_id] == seq.stage.specs
        assert set(self.sequences) <= set(running), "an ended or preempted sequence remains"
        return plan

    def heal(self) -> None:
        """Restore `other` from a snapshot and compare every sequence."""
        snapshot: Snapshot = pickle.loads(pickle.dumps(self.scheduler.snapshot()))
        self.other.restore(snapshot)
        self.other_rows = {row.row: row.specs for row in snapshot.rotary_rows}
        assert self.other.step == self.sequences.step
        running = self.running()
        assert set(self.other) == set(self.sequences) & set(running)
        for seq_id in self.other:
            self.compare(self.other, running[seq_id])
        self.num_healed += 1

    def running(self) -> dict[int, sequence.Sequence]:
        """Return the sequences that run, or get their first token with their parent."""
        places = (SequenceStatus.RUNNING, SequenceStatus.FORKING)
        return {seq.seq_id: seq for seq in self.scheduler.live_sequences() if seq.status in places}

    def compare(self, sequences: InputBatch, seq: sequence.Sequence) -> None:
        """Assert that an input batch has the scheduler's state of a sequence."""
        live = sequences.by_id[seq.seq_id]
        assert live.token_ids == seq.token_ids and live.slot.token_ids is live.token_ids
        assert (live.rotary_id, live.layout) == (seq.rotary_id, seq.cache.layout)
        held = [(table.blocks, table.num_dropped) for table in seq.cache.all_tables]
        held += [([], 0)] * (2 * len(self.store) - len(held))
        tables = [sequences.table(seq.seq_id, group).tolist() for group in range(2 * len(self.store))]
        assert list(zip(tables, live.num_dropped, strict=True)) == held
        slot = live.slot
        assert (slot.seq_id, slot.index, slot.seed) == (seq.seq_id, seq.index, seq.seed)
        assert (slot.num_prompt_tokens, slot.sampling) == (seq.num_prompt_tokens, seq.request.sampling)
        assert slot.stop_ids == tuple(sorted(seq.stop_ids))

    def keys(self, request: EngineRequest, item: ScheduledSequence) -> tuple[list[int], int]:
        """Return the correct key of every token up to the end of a chunk, and the predecessor of the next one.

        Keys of a passage are those in its blocks, which must be of the same tokens, at the stored positions,
        and of the request's scope. Later keys depend on them.
        """
        live = self.sequences.by_id[item.seq_id]
        rotation, num_prompt, total = (
            self.rotations[request.request_id],
            len(request.prompt_token_ids),
            len(live.token_ids),
        )
        era = rotation.stage(total) if rotation.policy == "recompute" else None
        known, memo, key = self.key_memo.get(item.seq_id, (None, [], 0))
        if known != era or not memo:
            memo, key = [], zlib.crc32(repr(request.cache_salt).encode())
        places = self.places(item.seq_id, item.start + item.num_tokens) if len(memo) < item.start else {}
        scope = {request.reuse.scope} if request.reuse is not None else set()
        for i in range(len(memo), min(item.start + item.num_tokens, total)):
            slot = places.get(i, (i, i))[0]
            first, *_, last = (*live.layout.runs, live.layout.runs[-1])
            plain = slot == i < first.end_slot and first.position == first.shift == 0
            if i < item.start and slot < last.first_slot and not plain:
                stored = self.reused_key(item.seq_id, slot)
                token, position, scopes = self.key_facts[stored]
                assert token == live.token_ids[i] and position == live.layout.stored_position(slot), "another passage"
                assert scope & scopes, "a passage of another scope"
                memo.append(stored)
                key = zlib.crc32(repr((key, stored, i)).encode())
                self.num_reused += 1
                self.reused.add(request.request_id)
                continue
            key = extend_key(key, live.token_ids[i], rotation.specs_of(i, num_prompt, total))
            memo.append(key)
            self.key_facts.setdefault(key, (live.token_ids[i], i, set()))[2].update(scope)
        self.key_memo[item.seq_id] = era, memo, key
        return memo, key

    def places(self, seq_id: int, end: int) -> dict[int, tuple[int, int]]:
        """Return slot and position by token, for a sequence's tokens below `end`."""
        seq = next(seq for seq in self.scheduler.live_sequences() if seq.seq_id == seq_id)
        return slots_of(
            self.sequences.by_id[seq_id].layout,
            end,
            seq.context_limits.retained_blocks * self.scheduler.blocks.block_size,
        )

    def reused_key(self, seq_id: int, slot: int) -> int:
        """Return the key of this slot, which all KV groups must share."""
        size = self.scheduler.blocks.block_size
        found = {
            store[int(self.sequences.table(seq_id, group)[slot // size]), slot % size][0]
            for group, store in enumerate(self.store)
        }
        (key,) = found
        return key

    def keys_with_draft(self, request: EngineRequest, item: ScheduledSequence) -> list[int]:
        """Return the correct keys of a scheduled sequence and of its proposed tokens."""
        keys, key = self.keys(request, item)
        if not item.draft:
            return keys
        keys, rotation, num_prompt = list(keys), self.rotations[request.request_id], len(request.prompt_token_ids)
        for i, token in enumerate(item.draft, start=len(self.sequences.by_id[item.seq_id].token_ids)):
            key = extend_key(key, token, rotation.specs_of(i, num_prompt, i + 1))
            keys.append(key)
            scopes = set() if request.reuse is None else {request.reuse.scope}
            self.key_facts.setdefault(key, (token, i, set()))[2].update(scopes)
        return keys

    def drafted(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the plan with proposals of a draft model: the next tokens, with one in four replaced."""
        live = {seq.seq_id: seq for seq in self.scheduler.live_sequences()}
        filled = []
        for item in output.sequences:
            if item.num_drafted:
                assert not item.draft and item.num_tokens == 1 + item.num_drafted
                request = live[item.seq_id].request
                rotation, slot = self.rotations[request.request_id], self.sequences.by_id[item.seq_id].slot
                _, key = self.keys(request, item)
                draft: list[int] = []
                for i in range(len(slot.token_ids), len(slot.token_ids) + item.num_drafted):
                    token = draw(key, slot, i - slot.num_prompt_tokens)
                    draft.append((token + 1) % VOCAB if key % 4 == 0 else token)
                    key = extend_key(key, draft[-1], rotation.specs_of(i, slot.num_prompt_tokens, i + 1))
                item = item._replace(draft=tuple(draft), num_drafted=0)
                self.num_drafted += 1
            filled.append(item)
        return dataclasses.replace(output, sequences=tuple(filled))

    def verify(self, item: ScheduledSequence, keys: list[int]) -> StepResult:
        """Sample from the stored key of every row while samples equal proposals. keys: those of tokens and proposals."""
        (seq_id,) = item.samples
        slot, table = self.sequences.by_id[seq_id].slot, self.sequences.table(item.seq_id, 0).tolist()
        size, drawn = self.scheduler.blocks.block_size, []
        for count in range(len(item.draft) + 1):
            at = item.start + count + self.sequences.by_id[item.seq_id].layout.slot_offset
            row, _, _ = self.store[0][table[at // size], at % size]
            drawn.append(draw(row, slot, len(slot.token_ids) - slot.num_prompt_tokens + count))
            if count == len(item.draft) or drawn[-1] != item.draft[count]:
                break
        if accepted := len(drawn) - 1:
            known = keys[: item.start + 1 + accepted]
            self.key_memo[item.seq_id] = self.key_memo[item.seq_id][0], known, known[-1]
            self.num_accepted += accepted
        self.seen[item.seq_id] = item.start + len(drawn)
        return StepResult(item.seq_id, tuple(drawn))

    def rerotate(self, rerotations: Sequence[KeyRerotation], holders: list[Counter[int]], *, aside: bool) -> None:
        """Carry out re-rotations, or copy originals. Only originals are read; nothing shared or hashed is
        written to."""
        size, pools = self.scheduler.blocks.block_size, self.scheduler.blocks.pools
        written: set[tuple[int, int, int]] = set()
        read: set[tuple[int, int, int]] = set()
        for rerotation in rerotations:
            first = rerotation.start // size
            assert len(rerotation.sources) == len(rerotation.targets) == -(-rerotation.end // size) - first
            for i in range(rerotation.start, rerotation.end):
                source, target = rerotation.sources[i // size - first], rerotation.targets[i // size - first]
                assert (source < 0) == (target < 0)
                if source < 0:
                    continue
                assert source != target and holders[rerotation.group][target] == 1, "a re-rotation into a shared block"
                assert pools[rerotation.group].digests[target] is None and pools[rerotation.group].private[target]
                key, origin, now = self.store[rerotation.group][source, i % size]
                assert origin == now == rerotation.from_specs, (
                    "the re-rotated key is not an original, or has other specs"
                )
                assert (rerotation.from_specs == rerotation.to_specs) == aside
                slots = (rerotation.group, source, i % size), (rerotation.group, target, i % size)
                assert slots[1] not in written, "two re-rotations into one slot"
                if not rerotation.values:
                    previous = self.store[rerotation.group].get((target, i % size))
                    assert previous is not None and previous[0] == key, "values were not copied and are missing"
                read.add(slots[0])
                written.add(slots[1])
                self.store[rerotation.group][target, i % size] = key, origin, rerotation.to_specs
                if not aside and rerotation.group == 0:
                    self.num_rerotated += 1
        assert not read & written, "a source is the target of another re-rotation"

    def tables_under(self, specs: tuple[FakeSpec, ...]) -> list[tuple[int, BlockPool, bool]]:
        """Return every KV group, its pool, and False, and the same with True if there are tables of second key copies."""
        pools = list(enumerate(self.scheduler.blocks.pools))
        kept = (False, True) if specs[0].distances.has_second_keys else (False,)
        return [(group, pool, far) for far in kept for group, pool in pools]

    def execute(self, output: SchedulerOutput) -> list[StepResult]:
        output = self.drafted(self.follow(output))
        size = self.scheduler.blocks.block_size
        pools = self.scheduler.blocks.pools
        live = {seq.seq_id: seq for seq in self.scheduler.live_sequences()}
        holders = [Counter[int]() for _ in pools]
        for seq in live.values():
            if seq.cache.second_keys is not None:
                for held, table in zip(holders, seq.cache.second_keys.block_tables, strict=False):
                    held.update(table)
            for group, table in enumerate(seq.cache.block_tables):
                kept = seq.cache.originals[group].blocks if seq.cache.originals else []
                holders[group].update(block for block in (*table, *kept) if block >= 0)

        for swapped_out in output.swapped_out:
            assert swapped_out.seq_id not in self.swapped_out
            self.swapped_out[swapped_out.seq_id] = [
                [{o: v for (b, o), v in store.items() if b == block} for block in blocks]
                for store, blocks in zip(self.store, swapped_out.blocks, strict=True)
            ]
        for swapped_out in output.swapped_in:
            for store, blocks, kept in zip(
                self.store, swapped_out.blocks, self.swapped_out.pop(swapped_out.seq_id), strict=True
            ):
                for block, contents in zip(blocks, kept, strict=True):
                    store.update({(block, offset): value for offset, value in contents.items()})
            self.num_swapped_in += 1
        for seq_id in output.discarded:
            del self.swapped_out[seq_id]
        waiting = {seq.seq_id for seq in live.values() if seq.cache.is_swapped_out}
        assert waiting == set(self.swapped_out), "swapped-out blocks are unused or missing"

        targets: set[tuple[int, int]] = set()
        for copy in output.copies:
            assert (copy.group, copy.source) not in targets, "a source is the target of an earlier copy"
            assert (copy.group, copy.target) not in targets, "two copies into one block"
            targets.add((copy.group, copy.target))
            store = self.store[copy.group]
            for offset in range(size):
                store.pop((copy.target, offset), None)
                if (copy.source, offset) in store:
                    store[copy.target, offset] = store[copy.source, offset]

        self.rerotate(output.original_copies, holders, aside=True)
        self.rerotate(output.rerotations, holders, aside=False)

        burst = MultiStepState(output, self.sequences)
        if output.num_passes > 1:
            self.num_bursts += 1
            assert all(item.samples == (item.seq_id,) and item.num_tokens == 1 for item in output.sequences)
        while burst.has_next:
            results = self.compute(burst.next_pass, live, holders)
            if output.num_passes == 1:
                return results
            burst.add(results)
        return burst.results()

    def compute(
        self, output: SchedulerOutput, live: dict[int, sequence.Sequence], holders: list[Counter[int]]
    ) -> list[StepResult]:
        """Run one forward pass: write keys, and sample from the keys that are read."""
        size, pools = self.scheduler.blocks.block_size, self.scheduler.blocks.pools
        written: set[tuple[int, int, int]] = set()
        for item in output.sequences:
            seq = live[item.seq_id]
            rotation = self.rotations[seq.request.request_id]
            end = item.start + item.num_tokens
            mine = self.sequences.by_id[item.seq_id]
            known, num_prompt = len(mine.token_ids), mine.slot.num_prompt_tokens
            specs = rotation.specs_of(end - 1, num_prompt, known + len(item.draft))
            assert specs == rotation.specs_of(item.start, num_prompt, known), "mixed stages"
            assert mine.rotary_id == self.rotary.rows[specs], "wrong rotary row"
            assert self.rows[mine.rotary_id] == specs, "the row has other specs"
            assert 0 <= item.start < end <= known + len(item.draft)
            if item.draft:
                assert item.start == known - 1 and end == known + len(item.draft), "proposals need a single token"
                longest = num_prompt + seq.request.sampling.max_tokens
                assert end < min(longest, seq.context_limits.longest), "a row beyond the end"
                self.num_drafts += 1
            keys = self.keys_with_draft(seq.request, item)
            self.num_computed += item.num_tokens
            seen = self.seen.get(seq.seq_id, item.start)
            self.num_recomputed += max(0, min(seen, end) - item.start)
            self.seen[seq.seq_id] = max(seen, end - len(item.draft))  # accepted proposals are added below
            for group, pool, far in self.tables_under(specs):
                table = self.sequences.table(item.seq_id, group + far * len(pools)).tolist()
                place: object = ("far", specs) if far else specs
                for token in range(item.start, end):
                    i = token + mine.layout.slot_offset
                    block = table[i // size]
                    assert 0 <= block < pool.num_blocks, "no block to write into"
                    assert holders[group][block] == 1, "a write into a shared block"
                    assert pool.digests[block] is None, "a write into a block that may be matched"
                    assert (group, block, i % size) not in written, "two writes into one slot"
                    written.add((group, block, i % size))
                    self.store[group][block, i % size] = keys[token], place, place

        results = []
        for item in output.sequences:
            seq = live[item.seq_id]
            end = item.start + item.num_tokens
            right = self.keys_with_draft(seq.request, item)
            rotation = self.rotations[seq.request.request_id]
            mine = self.sequences.by_id[item.seq_id]
            token_ids, num_prompt = mine.token_ids, mine.slot.num_prompt_tokens
            specs = rotation.specs_of(end - 1, num_prompt, len(token_ids))
            places = self.places(item.seq_id, end)
            assert len(places) == len({slot for slot, _ in places.values()}), "two tokens in one slot"
            dropped = mine.layout.num_dropped if seq.request.request_id in self.reused else None
            for group, pool in enumerate(pools):
                table = self.sequences.table(item.seq_id, group).tolist()
                for i in range(item.start, end):
                    for j, position in seen_by(seq.context_limits, seq.request.context, i, dropped).items():
                        if pool.window is not None and i - position >= pool.window:
                            continue
                        assert j in places, f"token {i} cannot see token {j}: it was dropped"
                        slot, place = places[j]
                        assert place == position, f"token {j} is at {place} for token {i} instead of {position}"
                        assert table[slot // size] >= 0, f"token {i} cannot see token {j}: its block was dropped"
                        key, _, now = self.store[group][table[slot // size], slot % size]
                        assert key == right[j], f"wrong key at token {j}"
                        assert now == specs, f"the key of token {j} has other frequencies"
                        if rotation.near is None or i - j < rotation.near:
                            continue
                        far_table = self.sequences.table(item.seq_id, group + len(pools)).tolist()
                        key, _, now = self.store[group][far_table[j // size], j % size]
                        assert key == right[j] and now == ("far", specs), f"wrong second key copy of token {j}"
            table = self.sequences.table(item.seq_id, 0).tolist()
            last = end - 1 + mine.layout.slot_offset
            row, _, _ = self.store[0][table[last // size], last % size]
            all_known = end == len(token_ids) + len(item.draft)
            assert bool(item.samples) == (all_known and seq.request.sampling.max_tokens > 0)
            if item.draft:
                results.append(self.verify(item, right))
                continue
            prompt_logprobs = None
            if item.prompt_logprobs is not None:
                stop = min(end, num_prompt - 1)
                prompt_logprobs = tuple(
                    TokenLogprobs(token_ids[i], float(right[i - 1] % 1000), 1) for i in range(item.start + 1, stop + 1)
                )
                if not item.samples:
                    results.append(StepResult(item.seq_id, prompt_logprobs=prompt_logprobs))
            for slot in (self.sequences.by_id[seq_id].slot for seq_id in item.samples):
                if slot.seq_id != item.seq_id:
                    self.seen[slot.seq_id] = end
                if slot.seq_id != item.seq_id:
                    era, memo, key = self.key_memo[item.seq_id]
                    self.key_memo[slot.seq_id] = era, list(memo), key
                token = draw(row, slot, len(slot.token_ids) - slot.num_prompt_tokens)
                own = prompt_logprobs if slot.seq_id == item.seq_id else None
                results.append(StepResult(slot.seq_id, (token,), prompt_logprobs=own))
        return results


def oracle(
    request: EngineRequest, rotation: FakeRotation, index: int, longest: int
) -> tuple[list[int], str, int | None]:
    """Return the tokens of a sample, computed one at a time without cache, batch or scheduler."""
    sampling = request.sampling
    if sampling.max_tokens == 0:
        return [], "length", None
    tokens = list(request.prompt_token_ids)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    assert sampling.seed is not None
    slot = SampleSlot(0, index, sampling, sampling.seed, len(tokens), tokens, tuple(stops))
    output: list[int] = []
    while True:
        token = draw(keys_of(request, rotation, tokens + output)[-1], slot, len(output))
        output.append(token)
        if token in stops and len(output) > sampling.min_tokens:
            return output, "stop", token
        if len(output) == sampling.max_tokens or len(tokens) + len(output) == longest:
            return output, "length", None


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(
    *,
    groups: Sequence[tuple[int, int | None]] = ((64, None),),
    block_size: int = 4,
    budget: int = 64,
    max_num_seqs: int = 8,
    max_waiting: int = 100,
    max_waiting_tokens: int = 1_000_000,
    max_model_len: int = 200,
    prefix_caching: bool = True,
    target_step_seconds: float = 0.0,
    burst_seconds: float = 0.0,
    speculation: int = 0,
    drafted: int = 0,
    adaptive: bool = False,
    shift_context: int | None = None,
    max_total_tokens: int | None = None,
) -> tuple[Scheduler, FakeExecutor, FakeClock]:
    """Return a scheduler for pools of (blocks, window), an executor that checks it, and a settable clock."""
    blocks = BlockManager([KVGroupLayout(n, w) for n, w in groups], block_size, prefix_caching)
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        target_step_seconds=target_step_seconds,
        burst_seconds=burst_seconds,
        speculation=SpeculationConfig(
            num_tokens=speculation,
            min_match=1,
            max_match=3,
            model="a draft model" if drafted else None,
            draft_tokens=max(1, drafted),
            adaptive=adaptive,
        ),
    )
    rotary, clock = FakeRotary(max_num_seqs), FakeClock()
    scheduler = Scheduler(
        config=config,
        limits=ContextSizes(max_model_len, block_size, shift_context or max_model_len, max_total_tokens),
        blocks=blocks,
        rotary=rotary,  # type: ignore[arg-type]
        namespace=b"test",
        eos_token_ids=(EOS,),
        clock=clock,
        fresh_seed=lambda: 12345,
    )
    return scheduler, FakeExecutor(scheduler, rotary), clock


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: str | None = None,
    context: ContextRule | None = None,
    reuse: NonPrefixReuseParams | None = None,
    **sampling: object,
) -> EngineRequest:
    """Return a request with a seed and, by default, no end before max_tokens."""
    options: dict[str, object] = {"max_tokens": 4, "seed": 0, "ignore_eos": True, **sampling}
    return EngineRequest(
        request_id,
        list(prompt),
        SamplingParams(**options),  # type: ignore[arg-type]
        priority=priority,
        deadline=deadline,
        cache_salt=cache_salt,
        context=context or ContextRule(),
        reuse=reuse,
    )


def add(executor: FakeExecutor, request: EngineRequest, rotation: FakeRotation | None = None) -> None:
    """Queue a request and register its rotation."""
    rotation = rotation or FakeRotation()
    executor.scheduler.add(request, rotation)  # type: ignore[arg-type]
    executor.rotations[request.request_id] = rotation
