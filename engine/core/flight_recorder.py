"""Flight recorder: the last scheduler outputs and thread stacks of an engine process, in memory shared with its parent.

A plan is written before it is computed, in a few microseconds, as numbers only; a sequence's description is written once, when
it starts. Nothing here contains text or tokens.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import struct
import time
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from windlass.engine.process_setup import create_memory_file

if TYPE_CHECKING:
    from windlass.engine.scheduling.scheduler_output import SchedulerOutput

NUM_PLANS, PLAN_BYTES = 32, 4096
NUM_NAMES, NAME_BYTES = 512, 256
STACK_BYTES = 64 * 1024
_HEAD = struct.Struct("<QdII")  # number (0: being written), Unix time, sequences, tokens
_ROW = 3  # numbers of a sequence: its id, its first position, its tokens
MAX_RECORDED_SEQUENCES = (PLAN_BYTES - _HEAD.size) // (8 * _ROW)
_NAME_HEAD = struct.Struct("<Q")
_ID_CHARS = 96

LiveSequences = Callable[[], Iterable[Any]]
PlanWatcher = Callable[[Any, LiveSequences], None]


def recorded_request_id(request_id: str) -> str:
    """A request's id as the recorder stores it."""
    return request_id.encode("ascii", "replace").decode()[:_ID_CHARS]


class _SharedMemory:
    """One side of a shared memory. number: a descriptor made by `make`, which may be closed afterwards."""

    size: ClassVar[int]

    def __init__(self, number: int) -> None:
        self._memory = mmap.mmap(number, self.size)

    @classmethod
    def make(cls) -> int:
        """The descriptor of an empty memory file."""
        return create_memory_file(cls.size)

    def close(self) -> None:
        """Unmap this side's memory."""
        self._memory.close()


class FlightRecorder(_SharedMemory):
    """Plans, and descriptions of their sequences."""

    size = NUM_PLANS * PLAN_BYTES + NUM_NAMES * NAME_BYTES

    def write(self, plan: SchedulerOutput, live: LiveSequences) -> None:
        """Record a plan. live: returns the live sequences; called only if the plan starts some."""
        memory, sequences = self._memory, plan.sequences
        if plan.new or plan.forks:
            started = {item.seq_id for item in plan.new} | {item.seq_id for item in plan.forks}
            self._write_names(started, live())
        start = plan.step % NUM_PLANS * PLAN_BYTES
        _HEAD.pack_into(memory, start, 0, 0.0, 0, 0)
        rows = array("q")
        for item in sequences[:MAX_RECORDED_SEQUENCES]:
            rows.extend((item.seq_id, item.start, item.num_tokens))
        body = start + _HEAD.size
        memory[body : body + 8 * len(rows)] = rows.tobytes()
        _HEAD.pack_into(memory, start, plan.step + 1, time.time(), len(sequences), plan.num_tokens)

    def _write_names(self, wanted: set[int], live: Iterable[Any]) -> None:
        for seq in live:
            if seq.seq_id not in wanted:
                continue
            request = seq.request
            scaling = "default" if request.rope_scaling is None else str(request.rope_scaling.rope_type)
            entry = {
                "request_id": recorded_request_id(request.request_id),
                "sample": seq.index,
                "prompt_tokens": seq.num_prompt_tokens,
                "scaling": scaling[:16],
            }
            data = json.dumps(entry).encode()[: NAME_BYTES - _NAME_HEAD.size - 1] + b"\0"
            start = NUM_PLANS * PLAN_BYTES + seq.seq_id % NUM_NAMES * NAME_BYTES
            _NAME_HEAD.pack_into(self._memory, start, seq.seq_id + 1)
            self._memory[start + _NAME_HEAD.size : start + _NAME_HEAD.size + len(data)] = data

    def read(self) -> list[dict[str, Any]]:
        """The completely written plans, oldest first: step, time, tokens, and the description of each sequence."""
        plans = []
        for slot in range(NUM_PLANS):
            start = slot * PLAN_BYTES
            number, at, count, tokens = _HEAD.unpack_from(self._memory, start)
            if not number:
                continue
            rows = array("q")
            shown = min(count, MAX_RECORDED_SEQUENCES)
            body = start + _HEAD.size
            rows.frombytes(self._memory[body : body + 8 * _ROW * shown])
            sequences = [
                {**self._name(rows[i]), "start": rows[i + 1], "tokens": rows[i + 2]} for i in range(0, len(rows), _ROW)
            ]
            plan = {"step": number - 1, "at": round(at, 6), "num_sequences": count, "num_tokens": tokens}
            plans.append({**plan, "sequences": sequences})
        return sorted(plans, key=lambda plan: plan["step"])

    def _name(self, seq_id: int) -> dict[str, Any]:
        start = NUM_PLANS * PLAN_BYTES + seq_id % NUM_NAMES * NAME_BYTES
        if _NAME_HEAD.unpack_from(self._memory, start)[0] == seq_id + 1:
            data = self._memory[start + _NAME_HEAD.size : start + NAME_BYTES].partition(b"\0")[0]
            with contextlib.suppress(ValueError):
                return {**json.loads(data)}
        return {"sequence": seq_id}


class StackMemory(_SharedMemory):
    """Memory into which an engine process writes the stacks of its threads."""

    size = STACK_BYTES

    def read(self) -> str:
        """The text written so far."""
        return self._memory[:].partition(b"\0")[0].decode("utf-8", "replace")
