"""`windlass size`: memory needs of a model before it is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.host_resources import available_memory
from windlass.engine.model.loading.model_size import Alternative, ModelSize, size_model
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option_names import with_option_names
from windlass.server.startup.display import count, memory_lines, size
from windlass.server.startup.model_files import choose_model, described_model, with_draft_model


def print_size(model: str | None, engine: EngineOptions, replicas: int, free: int | None, as_json: bool) -> None:
    """Print the memory needs. free: available bytes, None for the memory that is free now.

    Raises LoadError after printing if the model does not fit.
    """
    engine.to_config(Path())  # report bad options before anything is downloaded
    described = described_model(model)
    name, path = (model or "", described) if described is not None else choose_model(model)
    config = replace(with_draft_model(engine).to_config(path), replicas=replicas)
    sized = size_model(config, available_memory() if free is None else free)
    if as_json:
        print(json.dumps({"model": name, **asdict(sized)}))
    else:
        print("\n".join(_lines(name, sized, config.cache.block_size, replicas)))
    if sized.refusal is not None:
        raise LoadError(f"the model does not fit: {sized.refusal}")


def _lines(name: str, sized: ModelSize, block_size: int, replicas: int) -> list[str]:
    free = "unknown" if sized.free is None else size(sized.free)
    origin = " (from config.json: the weights are not on this machine)" if sized.from_config else ""
    lines = [
        f"{name}: {sized.architecture}, {count(sized.num_parameters)} parameters in {sized.num_layers} layers, "
        f"{sized.dtype}, weights {sized.stored}{origin}",
        f"  free      {free}",
    ]
    if sized.draft_bytes:
        lines.append(f"  draft     {size(sized.draft_bytes)} for its weights; its cache is part of the cache below")
    if replicas > 1:
        lines.append(f"  replicas  {replicas}, each with the cache below; the weights are in memory once")
    if sized.refusal is None:
        lines += memory_lines(sized)
    lines.append(
        f"  per token {size(sized.kv_bytes_per_token)} of cache; a block of {block_size} tokens: "
        f"{size(sized.kv_bytes_per_token * block_size)}"
    )
    lines += [f"  note: {with_option_names(notice)}" for notice in sized.notices]
    length = sized.max_model_len or sized.trained_len
    lines += ["", *_table("--quantization", "weights", sized.weights, length)]
    lines += ["", *_table("--kv-cache-dtype", "per token", sized.caches, length)]
    return lines


def _table(option: str, takes: str, choices: tuple[Alternative, ...], length: int) -> list[str]:
    """A row for each choice; the selected one has a star. length: tokens of a request."""
    rows = [(option, "stored as", takes, "tokens that fit", f"requests of {length:,}")]
    for choice in choices:
        star = " *" if choice.chosen else ""
        fit = f"{choice.tokens:,}" if choice.tokens else "none"
        rows.append(
            (f"{choice.name}{star}", choice.stored, size(choice.num_bytes), fit, f"{choice.tokens // length:,}")
        )
    if all(choice.name == choice.stored for choice in choices):
        rows = [(name, "", taken, tokens, streams) for name, _, taken, tokens, streams in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        f"  {name:{widths[0]}}  {stored:{widths[1]}}  {taken:>{widths[2]}}  {tokens:>{widths[3]}}  {streams:>{widths[4]}}"
        for name, stored, taken, tokens, streams in rows
    ]
