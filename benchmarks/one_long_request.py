"""One request of very many tokens against a server of its own: time to the first token, decode, and the memory of it all.

    python benchmarks/one_long_request.py [--model DIR | --shape llama2] [--tokens 100000] [--output-tokens 32]
        [--scaling '{"rope_type": "yarn", "factor": 24.41}'] [--quantization int8] [--kv-cache-dtype int8] [--out FILE.json]

`--shape llama2` makes a random model of Llama 2 7B's widths with two of its 32 layers: what it says means nothing, what its
layers cost is a sixteenth of what all of them would. A real model is given a text with --text, whose first tokens are the prompt.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness.checkpoint import make_checkpoint
from harness.machine import descendants, describe, peak_memory
from harness.serving import serving
from harness.shape import LLAMA2_TWO_LAYERS, SMALL, ModelShape

from windlass.clients import Client

SHAPES: dict[str, ModelShape] = {"llama2": LLAMA2_TWO_LAYERS, "small": SMALL}


def prompt_of(client: Client, options: argparse.Namespace) -> list[int]:
    if options.text is None:
        draw = random.Random(3)
        return [draw.randrange(300, 1000) for _ in range(options.tokens)]
    tokens = client.tokenize(options.text.read_text(encoding="utf-8")[: 8 * options.tokens]).tokens
    if len(tokens) < options.tokens:
        raise SystemExit(f"{options.text} has {len(tokens)} tokens: give a text of at least {options.tokens}")
    return list(tokens[: options.tokens])


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    with Client(url, timeout=options.limit) as client:
        prompt = prompt_of(client, options)
        times, start = list[float](), time.perf_counter()
        fields = {"temperature": 0, "ignore_eos": True, "rope_scaling": options.scaling}
        with client.completions(prompt, max_tokens=options.output_tokens, stream=True, **fields) as stream:
            text = ""
            for piece in stream:
                if piece.choices:
                    times.append(time.perf_counter() - start)
                    text += piece.choices[0].text
    return {
        "prompt_tokens": len(prompt),
        "output_tokens": options.output_tokens,
        "time_to_first_token": round(times[0], 2),
        "seconds_per_token": round((times[-1] - times[0]) / max(options.output_tokens - 1, 1), 4),
        "peak_bytes": peak_memory(descendants(os.getpid())),
        "rotary": None if stream.rotary is None else stream.rotary.rope_type,
        "text": text,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory or GGUF file")
    parser.add_argument(
        "--shape", choices=SHAPES, default="llama2", help="of the random model, where no --model is given"
    )
    parser.add_argument("--work", type=Path, default=Path("work"), help="where the random model is made")
    parser.add_argument("--text", type=Path, help="its first tokens are the prompt; else random ones")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--scaling", type=json.loads, default={"rope_type": "yarn", "factor": 100_000 / 4096})
    parser.add_argument("--quantization", default="int8", choices=("none", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="int8", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds that the request may take")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    model = options.model or options.work / f"random-{options.shape}"
    if options.model is None and not (model / "config.json").exists():
        make_checkpoint(model, SHAPES[options.shape])
    room = -(-(options.tokens + options.output_tokens) // 16) * 16
    given = ["--max-model-len", str(room), "--quantization", options.quantization, "--max-num-seqs", "1"]
    given += ["--kv-cache-dtype", options.kv_cache_dtype, "--no-prefix-caching"]
    options.work.mkdir(parents=True, exist_ok=True)
    with serving(model, given, options.work / "one_long_request.log", {}) as url:
        found = measure(url, options)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": describe(),
        "model": model.name,
        "weights": options.quantization,
        "kv_cache": options.kv_cache_dtype,
        "scaling": options.scaling,
        **found,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
