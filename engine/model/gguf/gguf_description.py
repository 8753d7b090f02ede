"""Contents of config.json, generation_config.json and gguf.json, derived from GGUF files.

Reads the metadata keys that all architectures share, refuses those that would change the model, and combines all parts of a
split model. Writes nothing. Imports gguf and numpy, so import it only where a GGUF file must be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from windlass.engine.errors import LoadError, with_place
from windlass.engine.model.config_json.rotary_layout import rotary_share
from windlass.engine.model.families.family import ConfigFlag, Family
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.gguf.architecture import Architecture, ArchitectureKeys, Factors, decimal
from windlass.engine.model.gguf.architectures import find_architecture, mla_sizes
from windlass.engine.model.gguf.gguf_reader import read_header
from windlass.engine.model.gguf.gguf_rope import FACTOR_TENSORS, read_rope
from windlass.engine.model.gguf.tensor_mapping import (
    EMBEDDING,
    HEAD,
    first_layer_has_bias,
    has_mtp_block,
    map_mtp_block,
    map_tensors,
)
from windlass.engine.model.loading.gguf_index import VERSION, to_gguf_spec
from windlass.engine.model.loading.safetensors_header import FileHeader, TensorLocation
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION
from windlass.engine.rotary.scaling_fields import format_key, format_value

_MOST_LAYERS = 10_000
_BLOCK = re.compile(r"blk\.(\d{1,5})\.")
_NEXTN = "nextn_predict_layers"
_LOCAL_THETA = 10_000.0

# Read here or in `gguf_rope`, or without effect on the result.
_UNDERSTOOD = frozenset(
    "context_length embedding_length block_count feed_forward_length attention.head_count attention.head_count_kv "
    "attention.key_length attention.value_length attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base "
    "rope.scaling.type rope.scaling.factor rope.scale_linear rope.scaling.original_context_length rope.scaling.attn_factor "
    "rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow nextn_predict_layers "
    "vocab_size tensor_data_layout rope.scaling.finetuned attention.layer_norm_epsilon".split()
)

# Keys that would change the model, the values without effect (in addition to 0 and false), and the name of the changed model.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "expert_count": ((1,), "a mixture of experts"),
    "expert_used_count": ((1,), "a mixture of experts"),
    "pooling_type": ((1, 2, 3), "a reranker with its own head"),
    "attention.causal": ((True,), "an encoder, which writes no text"),
    "rope.dimension_sections": ((), "a multimodal model"),
    "rope.scaling.yarn_ext_factor": ((1.0, -1.0), "another model"),
    "logit_scale": ((1.0,), "another model"),
    "residual_scale": ((1.0,), "another model"),
    "embedding_scale": ((1.0,), "another model"),
    "attention.output_scale": ((1.0,), "another model"),
}

# Any other key with one of these prefixes is refused: it would probably change the result.
_MATHEMATICS = ("attention.", "rope.", "expert", "ssm.", "attn_", "final_", "router_", "swin_", "altup.", "activation")

# Texts of tokens that end an answer: many files name only the end of a document. The same list as llama.cpp's.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] "
    "<|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜>".split()
)

_SPECIAL = (3, 4)  # types of tokens: control, and defined by the user

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

_NULLS = ("sliding_window", "q_lora_rank")  # keys of config.json for which null differs from absence
_COMPARED_ROWS = 16
_SAME_MATRIX = 0.6  # relative difference: 0.07 for 4 against 6 bits, 0.5 for 1.5 bits, 1.4 for unrelated rows
_SENTENCE_PIECE_END = 2  # default end token of such a vocabulary


@dataclass(frozen=True, slots=True)
class GGUFModelConfig:
    """Configuration of a GGUF model. config: contents of config.json. generation: contents of generation_config.json."""

    architecture: Architecture
    family: Family
    config: dict[str, Any]
    generation: dict[str, Any]


def read_gguf_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorLocation], factors: Factors
) -> GGUFModelConfig:
    """The configuration of the model. tensors, factors: by GGUF name. Raises LoadError, one line."""
    name, architecture = find_architecture(metadata)
    keys = ArchitectureKeys(name, metadata)
    family = architecture.select_family(keys) or architecture.family
    if EMBEDDING not in tensors:
        what = "holds a vocabulary and no weights" if not tensors else f"has no tensor {EMBEDDING}"
        raise LoadError(f"{what}: give the GGUF file of a complete model")
    config = _shapes(keys, tensors[EMBEDDING], architecture, family)
    _check_layers(keys, tensors)
    config = {"architectures": [family.architecture], "model_type": family.model_type, **config}
    config["tie_word_embeddings"] = HEAD not in tensors
    if has_mtp_block(config["num_hidden_layers"], tensors):
        config["num_nextn_predict_layers"] = keys.count(_NEXTN)
    config |= _biases(family, tensors)
    config |= architecture.config_keys(keys, config) | architecture.from_tensors(tensors)
    config |= _rotation(keys, architecture, family, config, factors)
    ignored = _ignored_keys(keys, architecture, config)
    config |= _token_ids(metadata)
    config |= {keys.key(key): format_value(keys.raw(key)) for key in ignored}
    generation = {"eos_token_id": ends} if (ends := _ends(metadata)) else {}
    generation |= _sampling(metadata)
    config = {key: value for key, value in config.items() if value is not None or key in _NULLS}
    return GGUFModelConfig(architecture, family, config, generation)


def _shapes(
    keys: ArchitectureKeys, embedding: TensorLocation, architecture: Architecture, family: Family
) -> dict[str, Any]:
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    layers = keys.size("block_count") - keys.count(_NEXTN)
    if not 1 <= layers <= _MOST_LAYERS:
        raise LoadError(f"{keys.key('block_count')} must be between 1 and {_MOST_LAYERS}, got {layers}")
    keys = architecture.uniform_keys(keys, layers)
    latent = None if family.latent is None else mla_sizes(keys)
    head_dim = keys.size("attention.key_length", hidden // heads) if latent is None else latent["qk_rope_head_dim"]
    if latent is None and keys.size("attention.value_length", head_dim) != head_dim:
        raise LoadError("has keys and values of different widths, which is not supported: choose another model")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise LoadError(f"tensor {EMBEDDING} has the shape {list(embedding.shape)}, [tokens, {hidden}] is expected")
    name = "attention.layer_norm_epsilon" if family.norms.form.centered else "attention.layer_norm_rms_epsilon"
    epsilon = keys.required_number(name)
    kv_heads = heads if latent is not None else keys.size("attention.head_count_kv", heads)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **(latent or {}),
        "max_position_embeddings": keys.size("context_length"),
        family.norm_eps_key or "rms_norm_eps": epsilon,
    }


def _check_layers(keys: ArchitectureKeys, tensors: Mapping[str, TensorLocation]) -> None:
    """Raise LoadError for a file with more layers than it announces: without them it would be another model."""
    blocks, further = keys.size("block_count"), keys.count(_NEXTN)
    for name in tensors:
        block = int(found[1]) if (found := _BLOCK.match(name)) else -1
        if block >= blocks:
            raise LoadError(
                f"tensor {format_key(name)} is of a layer after the {blocks} of {keys.key('block_count')}: get another conversion"
            )
        if block >= blocks - further and not has_mtp_block(block, tensors):
            raise LoadError(
                f"tensor {format_key(name)} is of the last {further} layers, which predict further tokens "
                f"according to {keys.key(_NEXTN)}, but its layer has no nextn.eh_proj: get another conversion"
            )


def _biases(family: Family, tensors: Mapping[str, TensorLocation]) -> dict[str, bool]:
    """Bias flags of the family, by whether the file has the tensors. One flag may be for several tensors."""
    found: dict[str, bool] = {}
    for switch, names in (
        (family.biases.qkv, ("attn_q", "attn_qkv")),
        (family.biases.out, ("attn_output",)),
        (family.biases.feed_forward, ("ffn_down", "ffn_up", "ffn_gate")),
    ):
        if isinstance(switch, ConfigFlag):
            found[switch.key] = found.get(switch.key, False) or first_layer_has_bias(tensors, *names)
    return found


def _rotation(
    keys: ArchitectureKeys,
    architecture: Architecture,
    family: Family,
    config: Mapping[str, Any],
    factors: Factors,
) -> dict[str, Any]:
    if architecture.rope_parameters is not None:
        return architecture.rope_parameters(keys, config, factors)
    head_dim = config["head_dim"]
    rotary_dim = keys.size("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise LoadError(
            f"{keys.key('rope.dimension_count')} must be an even number up to {head_dim}, the width of a head, got {rotary_dim}"
        )
    scaling = architecture.rope(read_rope(keys, factors, rotary_dim, config["max_position_embeddings"]), keys)
    local_theta = None
    if family.rules.scales_full_attention_only:
        local_theta = scaling.get("rope_theta", family.rules.rope_theta)
    elif family.rules.local_rope_theta is not None:
        local_theta = keys.number("rope.freq_base_swa") or _LOCAL_THETA
    if local_theta is not None:
        local = {"rope_type": "default", "rope_theta": local_theta}
        scaling = {FULL_ATTENTION: scaling, SLIDING_ATTENTION: local}
    return {"rope_parameters": scaling, "partial_rotary_factor": rotary_share(rotary_dim, head_dim)}


def _ignored_keys(keys: ArchitectureKeys, architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Unknown keys without effect. Raises LoadError for one that would change the model."""
    ignored = []
    for key in sorted(keys.names()):
        value = keys.raw(key)
        if key in _UNDERSTOOD or key in architecture.understood_keys:
            continue
        if _is_default(value) or (key == "attention.scale" and _is_usual_scale(value, config["head_dim"])):
            continue
        neutral, meaning = _NEUTRAL.get(key, ((), "another model"))
        if not isinstance(value, list) and value in neutral and isinstance(value, bool) == isinstance(neutral[0], bool):
            continue
        if key in _NEUTRAL or key.startswith(_MATHEMATICS):
            raise LoadError(
                f"sets {keys.key(key)}={format_value(value)}, which makes it {meaning}: that is not supported"
            )
        ignored.append(key)
    return ignored


def _is_default(value: Any) -> bool:
    """Whether a key has the same meaning as its absence. A false flag has not: it may switch off a default."""
    if isinstance(value, list):
        return all(map(_is_default, value))
    return not isinstance(value, bool) and value in (0, "")


def _is_usual_scale(value: Any, head_dim: int) -> bool:
    return isinstance(value, float) and math.isclose(value, head_dim**-0.5, rel_tol=1e-6)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: _token_id(metadata, name) for key, name in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def _token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise LoadError(f"{key} must be a token id, got {format_value(value)}")
    return None if value == 2**32 - 1 else value  # -1, written by some converters: there is none


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that the file recommends. Values are checked where they are used."""
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {
        name: decimal(value) if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: the ends of a text, a turn or a message that the file names, and tokens with known texts."""
    named = [_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    if named[0] is None and metadata.get("tokenizer.ggml.model") == "llama":
        named[0] = _SENTENCE_PIECE_END
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        named += [i for i, (text, kind) in pairs if kind in _SPECIAL and text in _ENDS]
    return list(dict.fromkeys(one for one in named if one is not None))


_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}  # llama.cpp's numbers; names of sentence-transformers


@dataclass(frozen=True, slots=True)
class GGUFDescription:
    """metadata: of the first file. config, generation, index: contents of the three files; generation may be empty.

    pooling: of embeddings, in the words of sentence-transformers; None if the file does not name one.
    """

    metadata: Mapping[str, Any] = field(repr=False)
    config: dict[str, Any]
    generation: dict[str, Any]
    index: dict[str, Any] = field(repr=False)
    pooling: str | None = None


def describe_gguf(paths: Sequence[Path]) -> GGUFDescription:
    """Read the files of one model, all its parts in order. Raises LoadError, one line that names the file and the fault."""
    stats = [path.stat() for path in paths]
    headers = [read_header(path) for path in paths]
    _check_split(headers)
    found: dict[str, TensorLocation] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in found:
                raise LoadError(f"{header.path}: tensor {name} is in an earlier part too: download the files again")
            found[name] = tensor
    copied = HEAD in found and EMBEDDING in found and _is_copy(found[HEAD], found[EMBEDDING])
    factors = {name: found[name].read_floats() for name in FACTOR_TENSORS if name in found}
    metadata = headers[0].metadata
    try:
        model = read_gguf_config(metadata, found, factors)
        if copied:
            model.config["head_copies_embedding"] = True
        spec = read_spec(model.config, model.generation)
        layout = replace(model.architecture.layout, latent_in_parts=_has_latent_parts(found))
        aliases = model.architecture.aliases
        tensors = map_tensors(found, model.family, to_gguf_spec(spec, layout), aliases)
    except LoadError as error:
        message = str(error).removeprefix("config.json: ")  # made from the metadata: there is no such file
        raise LoadError(with_place(paths[0], message)) from None
    if spec.mtp is not None:
        tensors |= map_mtp_block(found, model.family, to_gguf_spec(spec.mtp, layout), len(spec.layers), aliases)
    index = {
        "version": VERSION,
        "files": [
            {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            for path, stat in zip(paths, stats, strict=True)
        ],
        "tensors": {
            name: {
                "file": paths.index(tensor.file),
                "type": tensor.dtype,
                "shape": list(tensor.shape),
                "begin": tensor.begin,
                "end": tensor.end,
            }
            for name, tensor in tensors.items()
        },
        **asdict(layout),
    }
    kind = metadata.get(f"{metadata['general.architecture']}.pooling_type", 0)
    pooling = _POOLING.get(kind) if isinstance(kind, int) else None
    return GGUFDescription(metadata, model.config, model.generation, index, pooling)


def _is_copy(head: TensorLocation, embedding: TensorLocation) -> bool:
    """Whether two matrices are one, quantized twice, by a few of their rows. Other matrices differ by their norms or more."""
    if head.shape != embedding.shape:
        return False
    tokens = head.shape[0]
    rows = range(0, tokens, max(1, tokens // _COMPARED_ROWS))
    try:
        first, second = (np.stack([_row(tensor, row) for row in rows]) for tensor in (head, embedding))
    except (NotImplementedError, ValueError, KeyError):  # a type that gguf cannot dequantize
        return False
    return bool(np.linalg.norm(first - second) < _SAME_MATRIX * np.linalg.norm(second))


def _row(tensor: TensorLocation, row: int) -> NDArray[np.float32]:
    data = np.frombuffer(tensor.narrow(row, 1).read(), np.uint8)
    return dequantize(data, GGMLQuantizationType[tensor.dtype])


def _has_latent_parts(tensors: Collection[str]) -> bool:
    """Whether latent attention has one tensor for keys and one for values, and none for both."""
    return "blk.0.attn_k_b.weight" in tensors and "blk.0.attn_kv_b.weight" not in tensors


def _check_split(headers: Sequence[FileHeader]) -> None:
    """Raise LoadError if the files are not the parts that their names announce."""
    for number, header in enumerate(headers):
        count = header.metadata.get("split.count", 0) or 1
        if count != len(headers) or (len(headers) > 1 and header.metadata.get("split.no") != number):
            raise LoadError(
                f"{header.path} declares part {header.metadata.get('split.no')} (from 0) of {count}, but its name is that of "
                f"part {number} of {len(headers)}: keep the names under which the files were published"
            )
    total, found = headers[0].metadata.get("split.tensors.count"), sum(len(header.tensors) for header in headers)
    if len(headers) > 1 and total is not None and total != found:
        raise LoadError(
            f"{headers[0].path} declares {total} tensors, but its parts contain {found}: download the files again"
        )
