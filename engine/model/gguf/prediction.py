"""The block behind a model's layers in a GGUF file that predicts a token further: its tensors under the names of a checkpoint.

It is a layer under the names that layers have, and what stands around it is called "nextn" (llama.cpp's `NEXTN_*`). Of Nemotron 3
it is two layers in one: the first attends, the second has experts behind a norm called "post_attention_norm".

It reads no weights. Whether all of it is there is looked at when it is loaded: the model can do without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from windlass.engine.errors import LoadError
from windlass.engine.model.families.family import Family
from windlass.engine.model.gguf.tensor_names import PlacedTensor, names_in_layers, of_layer
from windlass.engine.model.spec import ModelSpec

# Copies of the model's embedding and head, which some files have.
_COPIES = ("embed_tokens.weight", "shared_head_head.weight")


def predicts_further(block: int, tensors: Collection[str]) -> bool:
    """Whether the block with this index predicts a token further. tensors: names of all that the files hold."""
    return f"blk.{block}.nextn.eh_proj.weight" in tensors


def rename_block(
    tensors: Mapping[str, PlacedTensor], family: Family, spec: ModelSpec, block: int, aliases: Mapping[str, str]
) -> dict[str, PlacedTensor]:
    """The tensors of this block by the names of the spec. What the spec does not know keeps its name, behind the layer's prefix.

    tensors: of all files, under their GGUF names. spec: of the prediction layer, with the tensors that GGUF files have.
    aliases: as in `tensor_names.rename`.
    """
    assert spec.joined is not None and spec.names.final_norm is not None
    begin, prefix = f"blk.{block}.", spec.names.layer(0)
    around = {
        "eh_proj.weight": spec.joined.matrix,
        "enorm.weight": spec.joined.embedding_norm,
        "hnorm.weight": spec.joined.state_norm,
        "shared_head_norm.weight": spec.names.final_norm,
    }
    names = names_in_layers(tensors, family, spec, aliases)
    last = len(spec.layers) - 1
    if last and (norm := spec.layers[last].norms.mixer) is not None:
        names["post_attention_norm"] = norm

    def renamed(name: str, tensor: PlacedTensor) -> Iterator[tuple[str, PlacedTensor]]:
        what = name.removeprefix(begin)
        own = what.removeprefix("nextn.")
        if what == own:
            index = 0 if what.startswith("attn_") else last
            yield from of_layer(name, tensor, spec.names.layer(index), spec.layers[index], names, family)
        elif own in around:
            yield f"{around[own]}.weight", tensor
        elif own not in _COPIES:
            yield f"{prefix}{what}", tensor

    found: dict[str, PlacedTensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(begin):
            continue
        try:
            found |= renamed(name, tensor)
        except LoadError:
            found[prefix + name.removeprefix(begin)] = tensor
    return found
