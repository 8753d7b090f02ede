"""Embeddings and rankings through third-party Python clients of a running server (`checks` has the arguments).

Imports nothing of Windlass. URL: http://127.0.0.1:8000, for example. Its environment:

    python3 -m venv work/outside/retrieval
    work/outside/retrieval/bin/pip install openai langchain-openai cohere llama-index-embeddings-openai-like \\
        llama-index-postprocessor-jinaai-rerank
"""

from __future__ import annotations

import base64
import struct
import sys
from collections.abc import Sequence
from typing import Any

from checks import check, main

ROOT, MODEL = sys.argv[1], sys.argv[2]
KEY = "none"
QUERY = "The king said that the sea is wide"
DOCUMENTS = ["Once upon a time there was a girl.", QUERY, "She went to the house."]


def close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) > 8 and all(abs(a - b) < 1e-4 for a, b in zip(one, other, strict=True))


def unit(vector: Sequence[float]) -> bool:
    return abs(sum(value * value for value in vector) - 1) < 1e-4


@check
def openai_float_and_base64() -> None:
    import openai

    with openai.OpenAI(base_url=f"{ROOT}/v1", api_key=KEY) as client:
        plain = client.embeddings.create(model=MODEL, input=DOCUMENTS, encoding_format="float")
        packed = client.embeddings.create(model=MODEL, input=DOCUMENTS)  # base64, which the client decodes
        raw = client.embeddings.create(model=MODEL, input=DOCUMENTS, encoding_format="base64")
    assert [item.index for item in plain.data] == [0, 1, 2] and plain.usage.prompt_tokens > 10
    for one, two, three in zip(plain.data, packed.data, raw.data, strict=True):
        assert unit(one.embedding) and close(one.embedding, two.embedding)
        data = base64.b64decode(three.embedding)  # type: ignore[arg-type]
        assert close(one.embedding, struct.unpack(f"<{len(data) // 4}f", data))


@check
def openai_dimensions_and_errors() -> None:
    import openai

    with openai.OpenAI(base_url=f"{ROOT}/v1", api_key=KEY) as client:
        short = client.embeddings.create(model=MODEL, input=QUERY, dimensions=16)
        assert len(short.data[0].embedding) == 16 and unit(short.data[0].embedding)
        mean = client.embeddings.create(model=MODEL, input=QUERY, extra_body={"pooling": "mean"})
        assert unit(mean.data[0].embedding)
        try:
            client.embeddings.create(model=MODEL, input=["a", ""])
        except openai.BadRequestError as error:
            assert error.param == "input[1]" and error.code == "empty_prompt"
        else:
            raise AssertionError("an empty text was accepted")


def _langchain() -> Any:
    from langchain_openai import OpenAIEmbeddings

    # With its check it would send token ids of OpenAI's models.
    return OpenAIEmbeddings(model=MODEL, base_url=f"{ROOT}/v1", api_key=KEY, check_embedding_ctx_length=False)


@check
def langchain_documents_and_query() -> None:
    embeddings = _langchain()
    vectors = embeddings.embed_documents(DOCUMENTS)
    assert len(vectors) == 3 and all(map(unit, vectors))
    assert close(embeddings.embed_query(QUERY), vectors[1])


@check
def langchain_store() -> None:
    from langchain_core.vectorstores import InMemoryVectorStore

    store = InMemoryVectorStore(_langchain())
    store.add_texts(DOCUMENTS)
    assert [found.page_content for found in store.similarity_search(QUERY, k=1)] == [QUERY]


@check
def llama_index_embeddings() -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embeddings = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{ROOT}/v1", api_key=KEY, embed_batch_size=2)
    vectors = embeddings.get_text_embedding_batch(DOCUMENTS)
    assert len(vectors) == 3 and close(embeddings.get_query_embedding(QUERY), vectors[1])


@check
def llama_index_reranker() -> None:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.jinaai_rerank import JinaRerank

    reranker = JinaRerank(api_key=KEY, model=MODEL, top_n=2, base_url=f"{ROOT}/v1")
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
    found = reranker.postprocess_nodes(nodes, query_str=QUERY)
    assert len(found) == 2 and found[0].node.get_content() == QUERY and found[0].score > found[1].score


@check
def cohere_rerank() -> None:
    import cohere

    for client in (cohere.Client(KEY, base_url=ROOT), cohere.ClientV2(KEY, base_url=ROOT)):
        answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2)
        assert answer.results[0].index == 1 and len(answer.results) == 2
        assert answer.results[0].relevance_score > answer.results[1].relevance_score


if __name__ == "__main__":
    sys.exit(main())
