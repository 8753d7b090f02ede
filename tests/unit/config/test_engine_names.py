"""Names of engine fields in messages, and their translation to options."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from windlass.engine.interface.config import EngineConfig
from windlass.server.config.engine_options import field_values
from windlass.server.config.option_names import flat_names, from_flat, to_flat, with_keyword_names, with_option_names
from windlass.server.config.server_options import OPTIONS

ENGINE = Path(__file__).parents[3] / "engine"
FIXED = {  # fields that no option sets
    "adapters.dtype",
    "scheduling.max_waiting_tokens",
    "scheduling.speculation.max_match",
    "scheduling.speculation.min_match",
}
PRIVATE = {  # arguments of child processes of the engine
    "client/child_process.py": {"--ahead", "--box", "--core", "--cores", "--fd", "--log-level", "--stacks"},
    "core/engine_process.py": {"--ahead", "--box", "--core", "--cores", "--fd", "--log-level", "--stacks"},
    "core/ranks.py": {"--fd", "--memory", "--parent", "--store"},
    "core/rank_process.py": {"--fd", "--memory", "--parent", "--store"},
}


def test_engine_texts_contain_no_options() -> None:
    found = {
        str(path.relative_to(ENGINE)): set(re.findall(r"--[a-z][a-z-]*", path.read_text(encoding="utf-8")))
        for path in ENGINE.rglob("*.py")
    }
    assert len(found) > 50
    assert {name: options for name, options in found.items() if options} == PRIVATE


def messages(tree: ast.AST) -> list[str]:
    """All texts except docstrings and errors of internal defects."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    defects = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and "RuntimeError(" in ast.unparse(node)]
    others = docstrings | {id(part) for defect in defects for part in ast.walk(defect)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in others)
    return [node.value for node in constants if isinstance(node.value, str)]


@pytest.mark.slow
def test_names_in_engine_messages_are_options() -> None:
    texts = [text for path in ENGINE.rglob("*.py") for text in messages(ast.parse(path.read_text(encoding="utf-8")))]
    named = {name for text in texts for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)[=`]", text)}
    assert len(named) > 10
    for name in named - FIXED:
        assert with_option_names(f"`{name}`").startswith(("--", "WINDLASS_", "configuration key ")), name


def test_engine_fields_have_one_option_or_are_fixed() -> None:
    paths = set(field_values(EngineConfig(model="")))
    set_by = [option.sets for option in OPTIONS.values() if option.sets]
    assert len(set(set_by)) == len(set_by) and set(set_by) <= paths
    arguments = {"model", "replicas", "adapters.sources", "rotary.ladder"}
    internal = {"loading.seed", "loading.shared_memory"}
    assert paths - set(set_by) == arguments | internal | FIXED


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("raise `cache.memory` or lower `max_model_len`", "raise --kv-cache-memory or lower --max-model-len"),
        ("use `compute.device=cpu`, not `compute.device=cuda:1`", "use --device cpu, not --device cuda:1"),
        ("leave `loading.format=dummy` out", "leave WINDLASS_LOAD_FORMAT=dummy out"),
        (
            "`cache.block_size` is 0, `block_size` is",
            "configuration key block-size is 0, configuration key block-size is",
        ),
        ("`rotary.ladder` and `adapters.sources`", "--rope-scaling and --lora"),
        ("`rotary.scaling`.factor must be more", "--rope-scaling.factor must be more"),
        ("`batch_size=9` is too much", "--batch-size 9 is too much"),
        ("the file `what.ever` and `rm -r` stay, as cache.memory does", None),
    ],
)
def test_fields_in_messages_become_options(message: str, shown: str | None) -> None:
    assert with_option_names(message) == (message if shown is None else shown)


def test_fields_in_messages_become_keywords() -> None:
    message = "raise `cache.memory`, `compute.device=cpu`, `cache.block_size`, `loading.format=dummy`"
    shown = "raise kv_cache_memory, device cpu, block_size, WINDLASS_LOAD_FORMAT=dummy"
    assert with_keyword_names(message) == shown


def test_flat_names_round_trip() -> None:
    config = from_flat("here", {"kv_cache_memory": 5, "speculative_ngram": 3, "cores": (1,), "max_model_len": 7})
    assert (config.cache.memory, config.scheduling.speculation.num_tokens) == (5, 3)
    assert (config.compute.cores, config.max_model_len, config.model) == ((1,), 7, "here")
    flat = to_flat(config)
    assert len(set(flat_names().values())) == len(flat_names()) == len(flat)
    assert from_flat(flat.pop("model"), flat) == config
    with pytest.raises(ValueError, match="no kv_memory"):
        from_flat("here", {"kv_memory": 5})
    assert from_flat("here", {}) == EngineConfig(model="here")
