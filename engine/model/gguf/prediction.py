"""The block behind a model's layers in a GGUF file that predicts a token further: its tensors under the names of a checkpoint.

It is a layer under the names that layers have, and what stands around it is called "nextn" (llama.cpp's `NEXTN_*`). Of Nemotron 3
it is two layers in one: the first attends, the second has experts behind a norm called "post_attention_norm".

It reads no weights. Whether all of it is there is looked at when it is loaded: the model can do without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from windlass.engine.errors import LoadError
from windlass.engine.model.families.family import Family
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation, layer_tensor_names, of_layer
from windlass.engine.model.spec import ModelSpec

# Copies of the model's embedding and head, which some files have.
_COPIES = ("embed_tokens.weight", "shared_head_head.weight")


def has_mtp_block(block: int, tensors: Collection[str]) -> bool:
    """Whether the block with this index predicts a token further. tensors: names of all that the files hold."""
    return f"blk.{block}.nextn.eh_proj.weight" in tensors


def map_mtp_block(
    tensors: Mapping[str, GGUFTensorLocation], family: Family, spec: ModelSpec, block: int, aliases: Mapping[str, str]
) -> dict[str, GGUFTensorLocation]:
    """The tensors of this block by the names of the spec. What the spec does not know keeps its name, behind the layer's prefix.

    tensors: of all files, under their GGUF names. spec: of the prediction layer, with the tensors that GGUF files have.
    aliases: as in `tensor_names.rename`.
    """
    assert spec.mtp_input is not None and spec.names.final_norm is not None
    begin, prefix = f"blk.{block}.", spec.names.layer(0)
    around = {
        "eh_proj.weight": spec.mtp_input.matrix,
        "enorm.weight": spec.mtp_input.embedding_norm,
        "hnorm.weight": spec.mtp_input.state_norm,
        "shared_head_norm.weight": spec.names.final_norm,
    }
    names = layer_tensor_names(tensors, family, spec, aliases)
    last = len(spec.layers) - 1
    if last and (norm := spec.layers[last].norms.mixer) is not None:
        names["post_attention_norm"] = norm

    def renamed(name: str, tensor: GGUFTensorLocation) -> Iterator[tuple[str, GGUFTensorLocation]]:
        what = name.removeprefix(begin)
        own = what.removeprefix("nextn.")
        if what == own:
            index = 0 if what.startswith("attn_") else last
            yield from of_layer(name, tensor, spec.names.layer(index), spec.layers[index], names, family)
        elif own in around:
            yield f"{around[own]}.weight", tensor
        elif own not in _COPIES:
            yield f"{prefix}{what}", tensor

    found: dict[str, GGUFTensorLocation] = {}
    for name, tensor in tensors.items():
        if not name.startswith(begin):
            continue
        try:
            found |= renamed(name, tensor)
        except LoadError:
            found[prefix + name.removeprefix(begin)] = tensor
    return found
