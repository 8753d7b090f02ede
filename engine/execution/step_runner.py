"""Step runner: forward passes of one model by captured, recorded or plain calls. Base of the model runner and the proposers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.execution.batch_builder import ForwardBatchBuilder
from windlass.engine.execution.cuda_graphs import DecodeGraphs
from windlass.engine.execution.input_batch import InputBatch
from windlass.engine.execution.key_rotator import KeyRotator
from windlass.engine.execution.recorded_steps import DecodeReplay, StepOutputs
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.scheduling.chunked_prefill import NO_BOUNDARIES, ChunkBoundaries
from windlass.engine.scheduling.scheduler_output import ScheduledSequence
from windlass.kernels import to_device


class StepRunner:
    """One model with its KV cache and rotary tables. For the other parameters see `ForwardBatchBuilder`.

    graphs: captured decode steps, None without. positions_computed: number of tokens computed.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        tables: RotaryTables,
        input_batch: InputBatch,
        block_size: int,
        chunk_boundaries: ChunkBoundaries = NO_BOUNDARIES,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self.decoder, self.cache, self.tables = decoder, cache, tables
        self.input_batch, self.block_size = input_batch, block_size
        self.batches = ForwardBatchBuilder(input_batch, tables, decoder, block_size, chunk_boundaries, adapters)
        self.replay = DecodeReplay(decoder, cache)
        self.graphs: DecodeGraphs | None = None
        self.positions_computed = 0
        self._has_states = decoder.spec.state_group is not None
        self._vocab_size = decoder.spec.vocab_size
        self._rotator = KeyRotator(decoder.spec, cache, block_size, decoder.backend)

    def prepare_graphs(self, max_rows: int, max_blocks: int) -> None:
        """Prepare the capture of decode steps if the device has graphs: see `DecodeGraphs.capture`."""
        spec = self.decoder.spec
        # A rank has only a part of the logits, and an MTP layer gets hidden states from the host.
        if not spec.generates or spec.vocabulary is not None or spec.mtp_input is not None:
            return
        graphs = self.decoder.backend.make_graph_runner()
        if graphs is not None:
            self.graphs = DecodeGraphs(
                self.decoder, self.cache, self.batches, graphs, max_rows, max_blocks, self._vocab_size
            )

    def _run_captured(self, items: Sequence[ScheduledSequence]) -> StepOutputs | None:
        """The outputs of a step, which the next step overwrites; None if no captured step can run it."""
        outputs = None if self.graphs is None else self.graphs.run(items)
        if outputs is not None:
            self.positions_computed += len(outputs.hidden)
        return outputs

    def _run_batch(self, batch: ForwardBatch, *, maxima: bool = False) -> tuple[Tensor, StepOutputs | None]:
        """Hidden states [T, hidden] of every row, and the step's outputs if a recorded step computed them.

        maxima: whether `row_maxima` are needed.
        """
        outputs = self.replay.run(batch, maxima=maxima) if self.decoder.spec.generates else None
        hidden = self.decoder.forward(batch, self.cache) if outputs is None else outputs.hidden
        self.positions_computed += len(hidden)
        return hidden, outputs

    def _row_logits(self, rows: Sequence[int], hidden: Tensor, outputs: StepOutputs | None) -> Tensor:
        """The logits [R, V] of these ascending rows of a step."""
        if outputs is not None and len(rows) == len(outputs.logits):
            return outputs.logits
        chosen = hidden if outputs is None else outputs.logits
        if len(rows) < chosen.shape[0]:
            chosen = chosen[to_device(torch.tensor(rows), chosen.device)]
        return self.decoder.logits(chosen) if outputs is None else chosen
