"""Makes the benchmark model and converts it for every peer that is installed.

    python benchmarks/prepare_peers.py [--work work] [--shape 1b]

Everything lands in the work folder, which git ignores: `bench-1b/model` (safetensors), `bench-1b/gguf` (F16, Q8_0, Q4_0),
`bench-1b/openvino-int8` and `-int4`. What is there already is kept; what is not installed is named and left out.
docs/benchmarks.md says how to install the peers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness.places import Places
from harness.shape import SHAPES


def prepare_windlass(places: Places, shape: str) -> None:
    if (places.model / "config.json").exists():
        print(f"have {places.model}")
        return
    from harness.checkpoint import make_checkpoint

    print(f"making {places.model}")
    make_checkpoint(places.model, SHAPES[shape])


def prepare_llama_cpp(places: Places) -> None:
    """GGUF files: F16 by the converter, the others from it. `--pure` gives every matrix the same type."""
    quantize, converter = places.llama_tool("llama-quantize"), places.llama_converter
    if quantize is None or converter is None or places.export_python is None:
        print(
            "llama.cpp: left out: needs its tools built, its source for the converter, and the openvino-export environment"
        )
        return
    places.gguf("f16").parent.mkdir(parents=True, exist_ok=True)
    if not places.gguf("f16").exists():
        script = [str(places.export_python), str(converter), str(places.model)]
        paths = f"{converter.parent / 'gguf-py'}:{converter.parent}"
        _make([*script, "--outtype", "f16", "--outfile"], places.gguf("f16"), {"PYTHONPATH": paths})
    for kind in ("q8_0", "q4_0"):
        if not places.gguf(kind).exists():
            _make([str(quantize), "--pure", str(places.gguf("f16"))], places.gguf(kind), last=[kind.upper()])


def prepare_openvino(places: Places) -> None:
    """int8 per channel, and int4 symmetric in groups of 32; as the exporter's defaults have it, int4 keeps the embedding int8."""
    if places.export_python is None:
        print("OpenVINO: left out: no openvino-export environment")
        return
    tool = places.export_python.parent / "optimum-cli"
    export = [str(tool), "export", "openvino", "--model", str(places.model), "--task", "text-generation-with-past"]
    for kind, options in {"int8": [], "int4": ["--sym", "--group-size", "32", "--ratio", "1.0"]}.items():
        if not places.openvino_model(kind).exists():
            _make([*export, "--weight-format", kind, *options], places.openvino_model(kind))


def _make(
    command: list[str], target: Path, environment: dict[str, str] | None = None, last: list[str] | None = None
) -> None:
    """Run a converter into a temporary name beside `target` and rename it, so that a broken one is never taken for done."""
    unfinished = target.with_name("unfinished-" + target.name)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.unlink(missing_ok=True)
    line = [*command, str(unfinished), *(last or [])]
    print("$", " ".join(line), flush=True)
    done = subprocess.run(line, env={**os.environ, **(environment or {})})
    if done.returncode:
        sys.exit(f"error: {line[0]} exited with {done.returncode}")
    unfinished.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for models and peers (default: work)")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    options = parser.parse_args()
    places = Places(options.work.resolve(), options.shape)
    prepare_windlass(places, options.shape)
    prepare_llama_cpp(places)
    prepare_openvino(places)


if __name__ == "__main__":
    main()
