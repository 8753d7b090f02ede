"""Executes one SchedulerOutput: builds the ForwardBatch, runs the decoder, draws tokens.

Of requests it keeps only copies of what plans said: rows of block tables, counts for penalties. It never decides what
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from windlass.engine.api.request import TokenLogprobs
from windlass.engine.cache.storage import KVStorage
from windlass.engine.errors import EngineError
from windlass.engine.execution.block_rows import BlockRows
from windlass.engine.execution.decode_batch import DecodeBatches
from windlass.engine.execution.mover import KeyMover
from windlass.engine.execution.replay import DecodeReplay
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.accept import Extended, draw_tokens
from windlass.engine.sampling.sampler import Sampler, token_logprobs
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput, StepResult

# Rows of logits formed at once for prompt log-probabilities: bounds memory at vocabulary * rows * 4 bytes.
_PROMPT_LOGPROB_ROWS = 256
# Longest context over which proposed tokens are attended row by row.
_ROW_BY_ROW_LENGTH = 1024


class Runner:
    """One model on one device. `positions_computed` counts the tokens that passed through it, for tests and metrics."""

    def __init__(
        self, decoder: Decoder, cache: KVStorage, tables: RotaryTables, sampler: Sampler, block_size: int
    ) -> None:
        self.decoder, self.cache, self.tables, self.sampler = decoder, cache, tables, sampler
        self._mover = KeyMover(decoder.spec, cache, block_size, decoder.backend)
        self._block_size = block_size
        self.replay = DecodeReplay(decoder, cache)
        groups = len(decoder.spec.kv_groups)
        self._rows = BlockRows(groups, block_size)
        self._decoding = None
        if decoder.backend.reads_host_memory:
            self._decoding = DecodeBatches(groups, block_size, self._rows, tables)
        self.positions_computed = 0

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> list[StepResult]:
        """Copies and re-rotations first, then one forward pass over every scheduled token, then sampling."""
        self.cache.copy_blocks(output.copies)
        for rerotation in (*output.set_aside, *output.rerotations):
            self._mover.apply(rerotation)
        if not output.sequences:
            return []
        batch = self.build_batch(output.sequences)
        hidden, logits = self.replay.run(batch) or (self.decoder.forward(batch, self.cache), None)  # [T, hidden]
        self.positions_computed += hidden.shape[0]
        results = {result.seq_id: result for result in self._sample(output.sequences, hidden, logits)}
        for seq_id, logprobs in self._prompt_logprobs(output.sequences, hidden):
            result = results.get(seq_id, StepResult(seq_id))
            if isinstance(logprobs, EngineError):
                results[seq_id] = replace(result, error=logprobs)
            else:
                results[seq_id] = replace(result, prompt_logprobs=logprobs)
        return list(results.values())

    def build_batch(self, sequences: list[ScheduledSequence]) -> ForwardBatch:
        """The flat batch of the scheduled chunks, in order. One of single tokens may be overwritten by the next."""
        if _decodes_row_by_row(sequences):
            sequences = [row for s in sequences for row in _rows_of(s)]
        if self._decoding is not None and all(s.num_tokens == 1 for s in sequences):
            return self._decoding.build(sequences)
        device, size = self.decoder.device, self._block_size
        num_sequences = len(sequences)
        counts, starts, first, rotary = np.array(
            [(s.num_tokens, s.start, s.first_position, s.rotary_id) for s in sequences], dtype=np.int64
        ).T.copy()
        lengths = starts + counts
        query_start = np.zeros(num_sequences + 1, dtype=np.int64)
        counts.cumsum(out=query_start[1:])
        num_tokens = int(query_start[-1])
        tables = self._rows.tables(sequences, -(-int(lengths.max()) // size))  # [K, B, max_blocks]
        row = np.arange(num_sequences)
        if num_tokens == num_sequences:  # decoding
            ids = np.array([s.token_ids[s.start] for s in sequences], dtype=np.int64)
            index, positions = starts, starts + first  # index: of each token in its sequence's cache
        else:
            ids = np.concatenate([np.array(_chunk(s)) for s in sequences])
            row, rotary = row.repeat(counts), rotary.repeat(counts)
            index = np.arange(num_tokens) - (query_start[:-1] - starts).repeat(counts)
            positions = index + first.repeat(counts)
        block, offset = np.divmod(index, size)
        slots = np.ascontiguousarray(tables[:, row, block] * np.int64(size) + offset)  # [K, T]
        if slots.min() < 0:
            raise AssertionError("a scheduled token has no block to go to")

        def tensor(array: np.ndarray) -> torch.Tensor:
            found = torch.from_numpy(array)
            return found if device.type == "cpu" else found.to(device)

        position_tensor, rotary_ids = tensor(positions), tensor(rotary)
        cos, sin, q_scale = self.tables.cos_sin(rotary_ids, position_tensor)
        return ForwardBatch(
            input_ids=tensor(ids),
            positions=position_tensor,
            rotary_ids=rotary_ids,
            slots=tensor(slots),
            block_tables=tensor(tables),
            query_start=tensor(query_start),
            seq_lens=tensor(lengths),
            first_position=tensor(first),
            cos=cos,
            sin=sin,
            q_scale=q_scale,
            score_scale=torch.ones(num_tokens, dtype=torch.float32, device=device),
        )

    def _sample(
        self, sequences: list[ScheduledSequence], hidden: torch.Tensor, logits: torch.Tensor | None
    ) -> list[StepResult]:
        """logits: of every row, where they are known already."""
        rows: list[int] = []
        wanted: list[tuple[int, ScheduledSequence]] = []
        end = 0
        for sequence in sequences:
            end += sequence.num_tokens
            if sequence.samples:
                wanted.append((len(rows), sequence))
                rows += range(end - 1 - len(sequence.draft), end)
        if not wanted:
            return []
        chosen = hidden if logits is None else logits
        if len(rows) < chosen.shape[0]:
            chosen = chosen[torch.tensor(rows, device=chosen.device)]
        logits = self.decoder.logits(chosen) if logits is None else chosen  # [R, V]
        return draw_tokens(self.sampler, logits, wanted)

    def _prompt_logprobs(
        self, sequences: list[ScheduledSequence], hidden: torch.Tensor
    ) -> list[tuple[int, tuple[TokenLogprobs, ...] | EngineError]]:
        """By sequence id; the error, which is that request's alone, where its logits are not finite."""
        results: list[tuple[int, tuple[TokenLogprobs, ...] | EngineError]] = []
        first_row = 0
        for s in sequences:
            if s.prompt_logprobs is not None:
                try:
                    found = self._chunk_logprobs(s, hidden[first_row : first_row + s.num_tokens], s.prompt_logprobs)
                    results.append((s.seq_id, found))
                except EngineError as error:
                    results.append((s.seq_id, error))
            first_row += s.num_tokens
        return results

    def _chunk_logprobs(self, s: ScheduledSequence, hidden: torch.Tensor, k: int) -> tuple[TokenLogprobs, ...]:
        # Row i of the chunk predicts the token at index start + i + 1, if that is still the prompt's.
        targets = s.token_ids[s.start + 1 : min(s.start + s.num_tokens + 1, s.num_prompt_tokens)]
        found: list[TokenLogprobs] = []
        for begin in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            part = targets[begin : begin + _PROMPT_LOGPROB_ROWS]
            logits = self.decoder.logits(hidden[begin : begin + len(part)])
            found += token_logprobs(self.decoder.backend, logits, torch.tensor(part), k)
        return tuple(found)


def _chunk(s: ScheduledSequence) -> Sequence[int]:
    """The tokens of a chunk, proposed ones included."""
    known = s.token_ids[s.start : s.start + s.num_tokens - len(s.draft)]
    return [*known, *s.draft] if s.draft else known


def _decodes_row_by_row(sequences: list[ScheduledSequence]) -> bool:
    """Whether a step of streams with proposed tokens is run as if every row were a sequence of its own.

    Then it is an ordinary decode step, which can be repeated, and each row reads all keys before it. Over a long context
    that reading is the dearer part: there the rows of one sequence go as a chunk and share it.
    """
    if not any(s.draft for s in sequences) or any(s.num_tokens > 1 + len(s.draft) for s in sequences):
        return False
    return max(s.start + s.num_tokens for s in sequences) <= _ROW_BY_ROW_LENGTH


def _rows_of(s: ScheduledSequence) -> list[ScheduledSequence]:
    """A chunk of one known and some proposed tokens, cut into chunks of one token."""
    if not s.draft:
        return [s]
    token_ids = Extended(s.token_ids, s.draft)
    return [replace(s, start=s.start + i, num_tokens=1, token_ids=token_ids, draft=()) for i in range(s.num_tokens)]
