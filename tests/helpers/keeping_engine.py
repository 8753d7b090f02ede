"""Engine in a separate process that answers prompts in sequence, for tests that kill it or limit its disk space.

    python keeping_engine.py FOLDER FIRST_PROMPT [LARGEST_FILE]

Writes one line of JSON per prompt: its number, the generated tokens, and the number of cached prompt tokens.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from pathlib import Path

PROMPTS, LENGTH = 40, 160


def prompt(number: int) -> list[int]:
    """Return a prompt. Odd ones share half with the previous prompt."""
    head = random.Random(number // 2).choices(range(3, 400), k=LENGTH // 2)
    return head + random.Random(1000 + number).choices(range(3, 400), k=LENGTH // 2)


def main(folder: str | None, first: int, largest_file: int | None = None) -> None:
    import windlass
    from windlass.engine.core.engine_core import EngineCore
    from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig
    from windlass.engine.interface.request import EngineRequest, SamplingParams

    demo = str(Path(windlass.__file__).parent / "models" / "demo")
    cache = CacheConfig(memory=16 << 20, persist=folder)
    core = EngineCore(EngineConfig(model=demo, compute=ComputeConfig(device="cpu", deterministic=True), cache=cache))
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    print("ready", flush=True)
    for number in range(first, first + PROMPTS):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)
        core.add(EngineRequest(str(number), prompt(number % PROMPTS), sampling))
        drawn, cached = [], 0
        while core.has_work():
            for output in core.step():
                drawn += output.token_ids
                cached = output.cached_tokens
        print(json.dumps([number % PROMPTS, drawn, cached]), flush=True)
    stats = core.stats().persist
    core.close()
    print(json.dumps({"failures": stats.failures, "damaged": stats.damaged_blocks, "foreign": stats.foreign_blocks}))


if __name__ == "__main__":
    main(sys.argv[1] or None, int(sys.argv[2]), *map(int, sys.argv[3:]))
