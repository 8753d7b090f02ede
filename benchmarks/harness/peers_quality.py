"""Quality of each contestant's quantization: perplexity and KL divergence on one text, computed by its own program.

    python benchmarks/peers.py quality TEXT [--shape 135m] [--window 768]

The second half of each window counts, as in `llama-perplexity -c 768`. Windlass is measured by quantization_quality.py, GGUF
files by llama-perplexity against float16, OpenVINO by its exported graph. `peers.py run` adds the results to its report.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import quantization_quality
from harness import llama_cpp
from harness.places import Places
from harness.shape import REAL, SHAPES

from windlass.server.text.tokenizer import Tokenizer

_OURS = {"none": "f16", "int8": "int8", "int4": "int4"}


def ours(places: Places, ids: list[int], window: int) -> dict[str, dict[str, float]]:
    """By contestant. change: of perplexity against the weights as stored; divergence in nats; same_first a share."""
    label = _OURS if places.shape in REAL else {**_OURS, "none": "bf16"}
    scorers = {
        label[width]: quantization_quality.scorer_of(places.model, width) for width in quantization_quality.WIDTHS
    }
    scorers[f"{label['none']}, computed in bfloat16"] = quantization_quality.scorer_of(places.model, dtype="bfloat16")
    found = quantization_quality.measure(scorers, ids, window, window // 2)
    return {
        f"Windlass {result.name}": {
            "perplexity": result.perplexity,
            "change": result.perplexity / found[0].perplexity - 1,
            "divergence": result.divergence / result.tokens,
            "same_first": result.agreeing / result.tokens,
        }
        for result in found
    }


def llama_files(places: Places, program: str, text: Path, window: int) -> dict[str, dict[str, float]]:
    """The files of llama.cpp or of its fork that are there, by contestant; nothing where the program is not."""
    tool = places.llama_tool("llama-perplexity", program)
    if tool is None or not places.gguf("f16").exists():
        return {}
    found: dict[str, dict[str, float]] = {}
    always = llama_cpp.DIALECTS[program].always
    with tempfile.TemporaryDirectory(dir=places.work) as folder:
        base = Path(folder) / "logits"
        for kind in ("f16", "q8_0", "q4_0", "q4_k_m"):
            if not places.gguf(kind).exists():
                continue
            command = llama_cpp.perplexity_command(tool, places.gguf(kind), text, window, base, compare=kind != "f16")
            command += [word for word in always if word != "1"]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=7200)
            if done.returncode:
                raise SystemExit(f"error: {' '.join(command)} exited with {done.returncode}: {done.stdout[-500:]}")
            found[f"{program} {kind.upper()}"] = one = llama_cpp.parse_perplexity(done.stdout)
            plain = found[f"{program} F16"]["perplexity"]
            one["change"] = one["perplexity"] / plain - 1
    return found


def openvino_models(places: Places, ids: list[int], window: int, plain: float) -> dict[str, dict[str, float]]:
    """The exported graphs, by contestant. plain: the perplexity without rounding."""
    python = places.openvino_python
    found = {}
    for kind in ("int8", "int4"):
        model = places.openvino_model(kind)
        if python is None or not model.exists():
            continue
        script = Path(__file__).resolve().parent / "openvino_quality.py"
        asked = json.dumps({"ids": ids, "window": window, "skip": window // 2})
        done = subprocess.run([str(python), str(script), str(model)], input=asked, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"error: {script} exited with {done.returncode}")
        perplexity = math.exp(json.loads(done.stdout.splitlines()[-1])["loss"])
        found[f"OpenVINO {kind}"] = {"perplexity": perplexity, "change": perplexity / plain - 1}
    return found


def table(contestants: dict[str, dict[str, float]]) -> str:
    """Markdown, a row each."""
    lines = ["| contestant | perplexity | change | KL divergence, nats | same first token |", "|---|--:|--:|--:|--:|"]
    for name, one in contestants.items():
        divergence = f"{one['divergence']:.4f}" if one.get("divergence") else "–"
        same = f"{one['same_first']:.1%}" if one.get("divergence") else "–"
        lines.append(f"| {name} | {one['perplexity']:.3f} | {100 * one['change']:+.2f} % | {divergence} | {same} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8 text the model has not been trained on")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder of models and peers (default: work)")
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--window", type=int, default=768, help="tokens of a window (768)")
    options = parser.parse_args()
    places = Places(options.work.resolve(), options.shape)
    text = options.text.read_text(encoding="utf-8")
    ids = Tokenizer.from_directory(places.model).encode(text)
    contestants = ours(places, ids, options.window)
    for program in llama_cpp.DIALECTS:
        contestants |= llama_files(places, program, options.text, options.window)
    plain = next(iter(contestants.values()))["perplexity"]
    contestants |= openvino_models(places, ids, options.window, plain)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "text": options.text.name,
        "tokens": len(ids) // options.window * (options.window // 2),
        "window": options.window,
        "contestants": contestants,
    }
    places.quality.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{report['tokens']:,} tokens\n\n{table(contestants)}\n\nwrote {places.quality}")


if __name__ == "__main__":
    main()
