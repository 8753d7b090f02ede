"""A GGUF file as the server starts from it, and the logits of a model behind one prompt, by which it is compared."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers.engines import greedy, make_core, run

from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.gguf.gguf_description import describe_gguf

PROMPT = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(0)).tolist()


def derived(file: Path, directory: Path) -> Path:
    """The directory that the server derives from the file."""
    directory.mkdir(exist_ok=True)
    described = describe_gguf([file])
    assert not read_spec(described.config, described.generation).notices
    (directory / "config.json").write_text(json.dumps(described.config))
    (directory / "gguf.json").write_text(json.dumps(described.index))
    return directory


def logits(directory: Path) -> torch.Tensor:
    return torch.stack(run(make_core(directory), [greedy("a", PROMPT, 3)])["a", 0].logits)
