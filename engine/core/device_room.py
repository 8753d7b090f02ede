"""How much of a GPU's memory is left for the pages of an engine: its share, less what is taken and what steps need."""

from __future__ import annotations

from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.memory import DEVICE_SHARE, device_kv_budget, gib
from windlass.engine.cache.persist.device_pages import staging_bytes
from windlass.engine.core.adapter_shelf import make_empty_adapters
from windlass.engine.core.description import cache_bytes_per_token, draft_bytes_per_token
from windlass.engine.errors import LoadError
from windlass.engine.execution.graph_room import profile_graph_memory
from windlass.engine.execution.largest_step import profile_largest_step
from windlass.engine.model.loading.chosen_device import is_out_of_memory
from windlass.engine.model.loading.loader import LoadedModel
from windlass.kernels import DeviceMemory

_MAX_PROPOSED_ROWS = 512  # what every row makes besides takes memory: its logits are half a megabyte


def largest_decode_step(config: EngineConfig, length: int) -> tuple[int, int]:
    """Its rows, those of proposed tokens among them, and the blocks of a sequence of that length: what captured steps have room
    for."""
    scheduling, rows = config.scheduling, config.scheduling.max_num_seqs
    rows = max(rows, min(rows * (1 + scheduling.speculation.max_proposed_tokens), _MAX_PROPOSED_ROWS))
    return min(rows, scheduling.max_num_batched_tokens), -(-length // config.cache.block_size)


def profile_kv_memory(config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, memory: DeviceMemory) -> int:
    """Bytes, found by running the largest step once, and capturing decode steps where that is done. Raises LoadError where
    there is no memory for that, or none is left."""
    decoder, scheduling = model.decoder, config.scheduling
    weights, tokens = gib(decoder.weight_bytes()), scheduling.max_num_batched_tokens
    whole, step = [model], 0
    if draft is not None and draft.spec.mtp_input is None:
        whole.append(draft)
    elif draft is not None:  # behind the model's step: one of its layers, and three rows of states for each token
        step = 3 * tokens * draft.spec.hidden_size * draft.decoder.dtype.itemsize
    lower = "`scheduling.max_num_batched_tokens` or `scheduling.max_num_seqs`"
    try:
        step += max(
            profile_largest_step(
                one.decoder,
                memory,
                cache_dtype=one.cache_dtype,
                block_size=config.cache.block_size,
                max_tokens=tokens,
                max_seqs=scheduling.max_num_seqs,
                length=config.max_model_len or model.spec.trained_len,
            )
            for one in whole  # which compute one after the other
        )
        if config.compute.cuda_graphs and model.whole is None:  # ranks capture nothing
            max_rows, max_blocks = largest_decode_step(config, config.max_model_len or model.spec.trained_len)
            adapters = make_empty_adapters(config.adapters, model) if config.adapters.sources else None
            for one in whole:
                step += profile_graph_memory(
                    one.decoder,
                    memory,
                    cache_dtype=one.cache_dtype,
                    block_size=config.cache.block_size,
                    max_rows=max_rows,
                    max_blocks=max_blocks,
                    adapters=adapters if one is model else None,  # a draft model knows no adapter
                )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"a step of {tokens} tokens needs more memory than {decoder.device} gives beside {weights} of weights, "
            f"{gib(memory.free())} of {gib(memory.total)} are free: lower {lower}"
        ) from None
    finally:
        memory.release_cached()
    step += decoder.backend.workspace_bytes
    if config.cache.persist is not None or config.cache.host_memory is not None:
        token_bytes = cache_bytes_per_token(model) + draft_bytes_per_token(draft)
        states = model.spec.state_bytes + (0 if draft is None else draft.spec.state_bytes)
        step += staging_bytes(
            max(config.cache.block_size * token_bytes, states), saves=config.cache.host_memory is not None
        )
    share = config.cache.device_share or DEVICE_SHARE
    available = device_kv_budget(memory.total, memory.used_by_process(), memory.free(), share, step)
    if available < 1:
        raise LoadError(
            f"no memory is left for the KV cache: {share:.0%} of the {gib(memory.total)} of {decoder.device} may be used, "
            f"{gib(memory.free())} are free, this engine has taken {gib(memory.used_by_process())} and a step needs {gib(step)}: raise "
            f"`cache.device_share`, lower {lower}, or free some of the device"
        )
    return available
