"""Finds the tensors of a checkpoint whose names stand behind another prefix than the family's.

A model that was saved without its language-model head has none ("embed_tokens.weight" for "model.embed_tokens.weight"), one
that was saved from inside another has a longer one. Responsible for names only: it opens no file and imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from windlass.engine.errors import LoadError
from windlass.engine.model.spec import ModelSpec, OuterNames


def with_stored_names(spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
    """The spec under the names that the files have; itself where they have the family's, or nothing that is like them.

    tensors: names of all that the files hold, none where no file is read. Raises LoadError where the head is neither among
    them nor the embedding.
    """
    if not tensors:
        return spec
    found = replace(spec, names=_stored(spec.names, tensors))
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


def _stored(names: OuterNames, tensors: Collection[str]) -> OuterNames:
    if f"{names.embedding}.weight" in tensors:
        return names
    prefix = names.embedding[: names.embedding.index(".") + 1]
    end = f"{names.embedding.removeprefix(prefix)}.weight"
    found = [name for name in tensors if name == end or name.endswith(f".{end}")]
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
