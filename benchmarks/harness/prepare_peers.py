"""Create the benchmark model and convert it for every installed peer.

    python benchmarks/peers.py prepare [--work work] [--shape 1b]
    python benchmarks/peers.py prepare --shape 135m --model DIRECTORY --metadata ORIGINAL.gguf

The work folder receives `bench-1b/model` (safetensors), `bench-1b/gguf` (F16, Q8_0, Q4_0, Q4_K_M), `bench-1b/openvino-int8`
and `-int4`. A real model is read from a directory and reordered (see reordered_model.py), so that no format is exact on it by
construction; 16 bits are then float16. --metadata is a GGUF file of it, for the vocabulary. Existing files are reused, and
missing programs are reported. benchmarks/README.md describes how to install the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness import llama_cpp
from harness.places import Places
from harness.shape import REAL, SHAPES


def prepare_real(places: Places, model: Path | None, metadata: Path | None) -> None:
    """The checkpoint in another order, in float16, and its GGUF file."""
    if (places.model / "config.json").exists() and places.gguf("f16").exists():
        print(f"have {places.model}")
        return
    if model is None or metadata is None:
        sys.exit("error: a real model's shape needs --model DIRECTORY and --metadata FILE.gguf, once")
    import torch
    from harness.gguf_file import fields_of, write_gguf
    from reordered_model import reordered
    from safetensors.torch import load_file, save_file

    print(f"making {places.model} and {places.gguf('f16')}")
    config = json.loads((model / "config.json").read_text("utf-8"))
    weights = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    made = reordered(weights, config)
    places.gguf("f16").parent.mkdir(parents=True, exist_ok=True)
    write_gguf(made, config, fields_of(metadata), places.gguf("f16"), wide=False)
    places.model.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in made.items()}
    save_file(halves, places.model / "model.safetensors", metadata={"format": "pt"})
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, places.model)
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    config["torch_dtype"] = str(torch.float16).removeprefix("torch.")
    (places.model / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def prepare_windlass(places: Places, shape: str) -> None:
    if (places.model / "config.json").exists():
        print(f"have {places.model}")
        return
    from harness.checkpoint import make_checkpoint

    print(f"making {places.model}")
    make_checkpoint(places.model, SHAPES[shape])


def prepare_llama_cpp(places: Places) -> None:
    """GGUF files: F16, then the others from it. `--pure` gives every matrix of a random model the same type."""
    tools = (places.llama_tool("llama-quantize", program) for program in reversed(llama_cpp.DIALECTS))
    quantize = next((tool for tool in tools if tool is not None), None)
    if quantize is None:
        print("llama.cpp and ik_llama.cpp: left out: neither's llama-quantize is built")
        return
    if not places.gguf("f16").exists():
        from harness.gguf_file import fields_of_checkpoint, write_gguf
        from safetensors.torch import load_file

        print(f"making {places.gguf('f16')}")
        places.gguf("f16").parent.mkdir(parents=True, exist_ok=True)
        unfinished = places.gguf("f16").with_name("unfinished.gguf")
        config = json.loads((places.model / "config.json").read_text("utf-8"))
        weights = load_file(places.model / "model.safetensors")
        write_gguf(weights, config, fields_of_checkpoint(places.model), unfinished, wide=False)
        unfinished.rename(places.gguf("f16"))
    for kind in ("q8_0", "q4_0", "q4_k_m"):
        if not places.gguf(kind).exists():
            # Where quality counts, the recipe that llama.cpp's users get.
            pure = [] if places.shape in REAL or kind == "q4_k_m" else ["--pure"]
            _make([str(quantize), *pure, str(places.gguf("f16"))], places.gguf(kind), last=[kind.upper()])


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
    """Run a converter with a temporary output name and rename it, so that an incomplete file is never used."""
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
    parser.add_argument("--model", type=Path, help="of a real model's shape: a directory with float weights")
    parser.add_argument("--metadata", type=Path, help="of a real model's shape: a GGUF file of it")
    options = parser.parse_args()
    places = Places(options.work.resolve(), options.shape)
    if options.shape in REAL:
        prepare_real(places, options.model, options.metadata)
    else:
        prepare_windlass(places, options.shape)
    prepare_llama_cpp(places)
    prepare_openvino(places)


if __name__ == "__main__":
    main()
