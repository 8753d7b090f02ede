"""Export a training checkpoint as a Hugging Face directory: config, generation config and bf16 weights.

    python tools/demo_model/export.py --work work/demo

`prepare.py` writes the tokenizer files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from network import CONFIG
from safetensors.torch import save_file
from tokenizers import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def export(checkpoint: Path, out: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state["model"].items()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})  # lm_head is the embedding: tied
    (out / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = {f"{name}_token_id": tokenizer.token_to_id(f"<|{text}|>") for name, text in
           (("bos", "bos"), ("eos", "end"), ("pad", "pad"))}  # fmt: skip
    (out / "config.json").write_text(json.dumps({**CONFIG, **ids}, indent=2) + "\n")
    generation = {**ids, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_length": 512}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    print(f"step {state['step']}, {state['elapsed']:.0f} s of training -> {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/demo"))
    parser.add_argument("--out", type=Path, default=DEMO)
    args = parser.parse_args()
    export(args.work / "checkpoint.pt", args.out)


if __name__ == "__main__":
    main()
