"""Terminal output of a server: summary of the loaded model, and activity lines while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from windlass._version import __version__
from windlass.clients.terminal import print_status
from windlass.engine.client.replicated_client import sum_stats
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.outputs import EngineStats
from windlass.engine.rotary.rope_scaling import RotaryGroup
from windlass.server.config.option_names import with_option_names
from windlass.server.startup.model_catalog import KnownModel, decimal_size

if TYPE_CHECKING:
    from windlass.engine.model.loading.model_size import ModelSize
    from windlass.server.observability.metrics import ServerMetrics


def summary(
    info: ModelInfo,
    name: str,
    url: str,
    profiles: Sequence[str] = (),
    options: Sequence[str] = (),
    sampling: str = "",
    *,
    chats: bool = True,
) -> list[str]:
    """The lines that are printed when a server is ready.

    profiles: names of the declared rotary scalings. options: options in force that other lines do not show, as written.
    sampling: the defaults of requests and their origin; empty if they are neutral. chats: whether there is a chat template.
    """
    stored = info.quantization or info.weight_dtype
    weights = info.dtype if stored == info.dtype else f"{info.dtype}, weights {stored}"
    lines = [
        f"windlass {__version__} serves {name} at {url}",
        f"  model     {info.architecture}, {count(info.num_parameters)} parameters in {info.num_layers} layers, "
        f"{weights}",
        f"  device    {info.device}, loaded in {info.load_seconds:.1f} s",
        *memory_lines(info),
    ]
    if info.ranks > 1:
        lines.insert(2, f"  ranks     {info.ranks}, each with a part of every layer and of the cache")
    if info.replicas > 1:
        weights = "" if info.ranks > 1 else "; the weights are in memory once"
        lines.insert(2, f"  replicas  {info.replicas}, each with the cache and the sequences below{weights}")
    if info.draft_model is not None:
        draft = info.draft_model
        lines.insert(
            2,
            f"  draft     {draft.architecture}, {count(draft.num_parameters)} parameters, weights "
            f"{draft.quantization or draft.weight_dtype}, {size(draft.weight_bytes)}, up to {draft.num_tokens} tokens a step",
        )
    lines += [f"  rotary    {_rotation(group)}" for group in info.rotary_groups]
    if info.rotary_auto:
        lines.append("  scaling   auto: the smallest that the length of each request needs")
    if profiles:
        lines.append(f"  profiles  {', '.join(profiles)}")
    if info.generates and not chats:
        lines.append("  chats     none: the model has no chat template (--chat-template FILE sets one)")
    if sampling:
        lines.append(f"  sampling  {sampling}, unless a request sets its own")
    elif info.generates:
        neutral = "temperature 1, unless a request sets its own (--override-generation-config changes it)"
        lines.append(f"  sampling  {neutral}")
    if options:
        lines.append(f"  options   {', '.join(options)}")
    lines += [f"  note: {with_option_names(notice)}" for notice in info.notices]
    if _exceeds_trained_length(info):
        lines.append(
            f"  note: the model was trained for {info.trained_len:,} tokens; beyond them it needs a scaling: "
            "--rope-scaling auto, or rope_scaling in requests"
        )
    return lines


def _exceeds_trained_length(info: ModelInfo) -> bool:
    """Whether contexts may exceed the trained length without a scaling."""
    rotates = any(group.base.unrotated is None for group in info.rotary_groups)
    scaled = any(group.scaling.rope_type != "default" for group in info.rotary_groups)
    return info.max_model_len > info.trained_len and rotates and not scaled and not info.rotary_auto


def memory_lines(sized: ModelInfo | ModelSize) -> list[str]:
    """Memory of weights and cache, and the contexts that fit, of a loaded or an estimated model."""
    return [
        f"  memory    {size(sized.weight_bytes)} for the weights, at most {size(sized.kv_cache_bytes)} for the cache "
        f"({sized.kv_cache_dtype})",
        f"  cache     {_capacity(sized)}",
        f"  context   {sized.max_model_len:,} tokens (trained for {sized.trained_len:,}), "
        f"up to {sized.max_num_seqs} requests at once",
    ]


def _rotation(group: RotaryGroup) -> str:
    """Scaling, theta and dimensions of a group, or why it does not rotate."""
    if group.base.unrotated is not None:
        return f"none: {group.base.unrotated}"
    theta = group.parameters()["rope_theta"]
    dims = f"{group.base.rotary_dim} of {group.base.head_dim} dimensions"
    return f"{group.name}: {group.scaling.rope_type}, theta {theta:g}, {dims}"


def _capacity(info: ModelInfo | ModelSize) -> str:
    """Capacity of the cache in tokens, in requests of the longest context, and per request of the largest batch."""
    if info.is_bidirectional:
        return f"{info.num_kv_blocks[0] * info.block_size:,} tokens, for the texts of one step"
    if len(info.num_kv_blocks) > 1:  # windowed layers need fewer blocks the longer a request is
        tokens_by_group = " + ".join(f"{blocks * info.block_size:,}" for blocks in info.num_kv_blocks)
        return f"{tokens_by_group} tokens, one number for each kind of layer"
    tokens = info.num_kv_blocks[0] * info.block_size
    whole = tokens // info.max_model_len
    longest = f"{whole:,} {'request' if whole == 1 else 'requests'} of {info.max_model_len:,}"
    streams = min(info.max_num_seqs, info.num_states - 1) if info.num_states else info.max_num_seqs
    each = min(tokens // streams, info.max_model_len)
    shared = f", or {streams:,} of {each:,}" if whole < streams else ""
    states = f"; {info.num_states:,} recurrent states of {size(info.state_bytes)}" if info.num_states else ""
    return f"{tokens:,} tokens: enough for {longest}{shared}{states}"


def link_lines(base: str, *, page: bool, key: bool, chats: bool, generates: bool) -> list[str]:
    """Addresses of a server, and a command to try it. base: URL without a path. key: whether requests need an API key."""
    if chats and generates:
        command = f"windlass chat --url {base}"
    elif generates:
        command = f'windlass generate "Once upon a time" --url {base}'
    else:
        command = f"""curl {base}/v1/embeddings -H 'Content-Type: application/json' -d '{{"input": "hello"}}'"""
    if key:
        command += " --api-key KEY" if generates else " -H 'Authorization: Bearer KEY'"
    return [
        *([f"  page      {base}"] if page else []),
        f"  API       {base}/v1",
        f"  API docs  {base}/docs",
        f"  try       {command}",
    ]


def better_model_line(model: KnownModel) -> str:
    """The command for a model that answers better than a smaller default."""
    assert model.file is not None
    needs = f"{decimal_size(model.file.size)} on disk, {decimal_size(model.memory)} of memory"
    return f"  better    windlass serve {model.name} ({needs})"


def count(number: int) -> str:
    """5_400_000 -> "5.4M"."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


def size(number: int) -> str:
    """Bytes in binary units: 67108864 -> "64.0 MiB"."""
    value = float(number)
    for name in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {name}" if name == "B" else f"{value:.1f} {name}"
        value /= 1024
    return f"{value:.1f} GiB"


async def report_activity(metrics: ServerMetrics, seconds: float) -> None:
    """Print an activity line at this interval while requests run; 0: never."""
    before, since = EngineStats(), time.monotonic()
    while seconds > 0:
        await asyncio.sleep(seconds)
        after, now = await metrics.refresh(), time.monotonic()
        if after is None:
            continue
        line = activity_line(_baseline(before, after), after, now - since)
        if line is not None:
            print_status(f"{time.strftime('%H:%M:%S')} {line}")
        before, since = after, now


def activity_line(before: EngineStats, after: EngineStats, seconds: float) -> str | None:
    """Activity between two snapshots taken `seconds` apart; None if there was none.

    Prompt tokens are those that were computed or found in the cache.
    """
    read = after.prompt_tokens - before.prompt_tokens
    generated = after.generation_tokens - before.generation_tokens
    if not (read or generated or after.num_running or after.num_waiting):
        return None
    parts = [f"running {after.num_running:,}, waiting {after.num_waiting:,}"]
    parts.append(f"prompts {read / seconds:,.0f} tokens/s, answers {generated / seconds:,.1f} tokens/s")
    cache = f"cache {after.kv_cache_usage:.0%} in use"
    if queries := after.prefix_cache_queries - before.prefix_cache_queries:
        cache += f", {(after.prefix_cache_hits - before.prefix_cache_hits) / queries:.0%} of prompts found in it"
    parts.append(cache)
    if proposed := after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens:
        accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        parts.append(f"{accepted / proposed:.0%} of draft tokens accepted")
    if preempted := after.num_preemptions - before.num_preemptions:
        parts.append(f"{preempted:,} preempted")
    return "; ".join(parts)


def _baseline(before: EngineStats, after: EngineStats) -> EngineStats:
    """The earlier counts of the engines of `after`; zero for an engine that was started since."""
    pairs = zip(before.engines or (before,), after.engines or (after,), strict=False)
    known = [one if one and two and two.num_steps >= one.num_steps else None for one, two in pairs]
    return sum_stats(known)
