"""EXAONE 4: norms after every part; global layers do not rotate and local ones have a window."""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, ConfigRules, LayerFacts, read_size
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.olmo import NORMS_BEHIND
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION


def _local_layers_rotate(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
    """`sliding_window_pattern` is a number n, where every n-th layer is global, or letters L and G that repeat."""
    full = [FULL_ATTENTION] * facts.count
    kinds = facts.given or _pattern(config, facts)
    if not facts.windowed:
        return full, list(full)
    return kinds, [FULL_ATTENTION if kind == SLIDING_ATTENTION else None for kind in kinds]


def _pattern(config: Config, facts: LayerFacts) -> list[str]:
    given = config.get("sliding_window_pattern", 4)
    if isinstance(given, str):
        if not given or set(given) - set("LG"):
            raise LoadError("config.json: sliding_window_pattern must be a number or letters L and G")
        letters = (given * facts.count)[: facts.count]
        return [SLIDING_ATTENTION if letter == "L" else FULL_ATTENTION for letter in letters]
    interval = read_size(config, "sliding_window_pattern", 4) if facts.windowed else 1
    return [SLIDING_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(facts.count)]


EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    title="EXAONE 4",
    model_type="exaone4",
    rules=ConfigRules(
        layer_pattern=_local_layers_rotate,
        max_position_embeddings=2048,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        sliding_window=4096,
    ),
    qk_norm="before",
    norms=NORMS_BEHIND,
)
