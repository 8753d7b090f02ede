"""Finds the tensors of a checkpoint whose names stand behind another prefix than the family's, or that lie the other way round.

A model that was saved without its language-model head has none ("embed_tokens.weight" for "model.embed_tokens.weight"), one
that was saved from inside another has a longer one. Responsible for names and shapes only: it opens no file and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TypeVar, cast

from windlass.engine.errors import LoadError
from windlass.engine.model.feed_forward.experts_spec import MoESpec
from windlass.engine.model.joined_input_spec import MTPInputSpec
from windlass.engine.model.loading.safetensors_header import TensorHeader
from windlass.engine.model.spec import FeedForwardSpec, LayerSpec, ModelSpec, OuterNames

AnyFeedForward = TypeVar("AnyFeedForward", bound=FeedForwardSpec)


def with_stored_names(spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
    """The spec under the names that the files have; itself where they have the family's, or nothing that is like them.

    tensors: names of all that the files hold, none where no file is read. Raises LoadError where the head is neither among
    them nor the embedding.
    """
    if not tensors:
        return spec
    names = _stored(spec.names, tensors)

    def moved(name: str) -> str:
        """What lies among the model's layers moves along with them."""
        return names.layers + name.removeprefix(spec.names.layers) if name.startswith(spec.names.layers) else name

    unused = tuple(dict.fromkeys((*spec.unused, *map(moved, spec.unused))))
    mtp = None if spec.mtp is None else _with_names(spec.mtp, moved)
    found = replace(spec, names=names, unused=unused, mtp=mtp)
    embedding, head = f"{found.names.embedding}.weight", f"{found.names.head}.weight"
    needs_head = not spec.tied_embeddings and spec.generates
    if needs_head and embedding in tensors and not any(name.startswith(f"{found.names.head}.") for name in tensors):
        raise LoadError(
            f"the files hold no {head}: these are the weights of a model without its language-model head (an embedding model, "
            "for example), which writes no text: give the model for text generation that it was made from, name its "
            'class without a head (it ends in "Model") under "architectures" in config.json to make vectors with it, or set '
            '"tie_word_embeddings": true in config.json if its head is the embedding'
        )
    return found


def _with_names(layer: ModelSpec, moved: Callable[[str], str]) -> ModelSpec:
    """A prediction layer with the names that these become."""
    names, mtp_input = layer.names, layer.mtp_input
    assert mtp_input is not None and names.final_norm is not None
    return replace(
        layer,
        names=replace(names, layers=moved(names.layers), final_norm=moved(names.final_norm)),
        mtp_input=MTPInputSpec(moved(mtp_input.embedding_norm), moved(mtp_input.state_norm), moved(mtp_input.matrix)),
        own=tuple(map(moved, layer.own)),
        unused=tuple(map(moved, layer.unused)),
    )


def _stored(names: OuterNames, tensors: Collection[str]) -> OuterNames:
    if f"{names.embedding}.weight" in tensors:
        return names
    prefix = names.embedding[: names.embedding.index(".") + 1]
    end, layers = f"{names.embedding.removeprefix(prefix)}.weight", f".{names.layers.removeprefix(prefix)}."
    # A layer that predicts further tokens may have an embedding of its own.
    found = [name for name in tensors if name == end or (name.endswith(f".{end}") and layers not in f".{name}")]
    if len(found) != 1:
        return names
    other = found[0].removesuffix(end)

    def moved(name: str) -> str:
        return other + name.removeprefix(prefix)

    heads = (names.head, moved(names.head), other.removesuffix(prefix) + names.head)
    head = next((name for name in heads if f"{name}.weight" in tensors), names.head)
    return OuterNames(
        moved(names.embedding),
        moved(names.layers),
        None if names.final_norm is None else moved(names.final_norm),
        head,
        moved(names.embedding_norm),
        moved(names.token_types),
        moved(names.positions),
    )


def with_expert_layout(spec: ModelSpec, headers: Mapping[str, TensorHeader]) -> ModelSpec:
    """The spec with the experts that lie in one tensor as the files have them, [E, rows, columns] or [E, columns, rows], or with
    each in tensors of its own.

    Writers of the same class have differed in that. spec: under the names that the files have.
    """

    each_own = {name.rpartition(".")[0].rpartition(".")[0] for name in headers}

    def turned(index: int, part: AnyFeedForward) -> AnyFeedForward:
        stacks = part.names.stacks if isinstance(part, MoESpec) else None
        if not isinstance(part, MoESpec) or stacks is None:
            return part
        if f"{spec.names.layer(index)}{part.names.experts}.0" in each_own:
            return cast(AnyFeedForward, replace(part, names=replace(part.names, stacks=None)))
        wide, hidden = part.intermediate_size, spec.hidden_size
        found = {
            tuple(header.shape[1:]) == shape[::-1]
            for name, shape in ((stacks.gate_up, (2 * wide, hidden)), (stacks.down, (hidden, wide)))
            if (header := headers.get(f"{spec.names.layer(index)}{name}")) is not None and shape[0] != shape[1]
        }
        if len(found) != 1 or found == {stacks.transposed}:
            return part
        names = replace(part.names, stacks=replace(stacks, transposed=found.pop()))
        return cast(AnyFeedForward, replace(part, names=names))

    def layer(index: int, one: LayerSpec) -> LayerSpec:
        if one.parallel_experts is not None:
            one = replace(
                one, parallel_experts=replace(one.parallel_experts, experts=turned(index, one.parallel_experts.experts))
            )
        return one if one.feed_forward is None else replace(one, feed_forward=turned(index, one.feed_forward))

    return replace(spec, layers=tuple(layer(index, one) for index, one in enumerate(spec.layers)))
