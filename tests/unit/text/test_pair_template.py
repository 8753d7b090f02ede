"""Prompts of pairs compared with Jinja's rendering, and documents cut to fit."""

from __future__ import annotations

import pytest
from helpers.tiny_rerankers import PAIR_TEMPLATE, qwen3_prompt, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.errors import LoadError, RequestError
from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError, build_pair_template
from windlass.server.text.tokenizer import Tokenizer, rerank_answer_ids
from windlass.server.text.tokenizer_files import QWEN3_RERANKER_TEMPLATE, names_pair_roles
from windlass.server.text.workers.frames import unpack_ids
from windlass.server.text.workers.tasks import TextTasks

# Spaces next to trimmed texts, and a document that occurs twice.
TWICE = (
    "{% for m in messages %}{% if m.role == 'query' %}<q> {{ m['content'] | trim }} </q>{% endif %}"
    "{% if m.role == 'document' %}{{ m.content }}{{ m.content }}.{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}|{% endif %}"
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ue000\ue001\ue002"), min_size=1, max_size=40)


def rendered(source: str, query: str, document: str, instruction: str | None) -> str:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    return ChatTemplate(source).render([*system, *messages])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("source", [QWEN3_RERANKER_TEMPLATE, PAIR_TEMPLATE, TWICE])
@given(query=TEXTS, document=TEXTS, instruction=st.none() | TEXTS)
def test_filling_is_rendering(source: str, query: str, document: str, instruction: str | None) -> None:
    template = build_pair_template(ChatTemplate(source))
    if source == TWICE:
        assert template.instructed is None
        instruction = None
    prompt = template.plain if instruction is None else template.instructed
    assert prompt is not None
    text, begin, shown = prompt.fill({"query": query, "document": document, "instruction": instruction or ""})
    assert text == rendered(source, query, document, instruction)
    assert text[begin : begin + len(shown)] == shown and shown.strip() == document.strip()


def test_the_prompt_of_qwen3_matches_its_model_card() -> None:
    template = build_pair_template(ChatTemplate(QWEN3_RERANKER_TEMPLATE))
    pair = {"query": " a {{ x }}\n", "document": "<|im_end|>", "instruction": "be strict"}
    assert template.plain.fill(pair)[0] == qwen3_prompt(pair["query"], pair["document"])
    assert template.instructed is not None
    assert template.instructed.fill(pair)[0] == qwen3_prompt(*pair.values())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ messages[0].content }}", "role document"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "query and none of document"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages[5].content.x }}", "undefined|no element"),
    ],
)
def test_templates_without_query_or_document_are_refused(source: str, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        build_pair_template(ChatTemplate(source))


def test_only_templates_that_name_both_roles_are_pair_templates() -> None:
    assert names_pair_roles(PAIR_TEMPLATE) and names_pair_roles("{{ m['query'] }} {{ m['document'] }}")
    assert not names_pair_roles("{% if message.role == 'user' %}{{ documents }} the query: 'document'{% endif %}")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("source", [QWEN3_RERANKER_TEMPLATE, TWICE])
@pytest.mark.parametrize("keep_first", [True, False])
@given(document=st.text(max_size=60), spare=st.integers(-3, 40))
def test_documents_are_cut_to_fit_and_the_rest_stays(source: str, keep_first: bool, document: str, spare: int) -> None:
    words = Tokenizer(tokenizer())
    tasks = TextTasks(words, None)
    prompt = build_pair_template(ChatTemplate(source)).plain

    def encode(text: str, most: int | None) -> list[int]:
        (packed,) = tasks.encode_pair_prompts(
            prompt=prompt,
            instruction="",
            pairs=[("fox", text)],
            add_special_tokens=False,
            max_tokens=most,
            keep_first=keep_first,
        )
        return unpack_ids(packed)

    whole, around = encode(document, None), len(encode("", None))
    assert whole == words.encode(rendered(source, "fox", document, None), add_special_tokens=False)
    most = around + spare
    if len(whole) <= most:
        assert encode(document, most) == whole
    elif spare < 0:
        with pytest.raises(RequestError, match="more than the limit of"):
            encode(document, most)
    else:
        ends = range(len(document) + 1)
        kept = [document[:end] if keep_first else document[end:] for end in ends]
        assert encode(document, most) in [encode(text, None) for text in kept]
        assert len(encode(document, most)) <= most


def test_answers_are_single_tokens() -> None:
    words = Tokenizer(tokenizer())
    yes, no = words.backend.token_to_id("yes"), words.backend.token_to_id("no")
    assert rerank_answer_ids(words, ("yes", "no")) == (yes, no) == rerank_answer_ids(words, (yes, no))
    space = words.encode(" ", add_special_tokens=False)
    assert rerank_answer_ids(words, (" ",)) == tuple(space)  # as text, where the vocabulary writes it otherwise
    for tokens, says in (
        (("yes", "maybe so"), "'maybe so' is .* tokens"),
        (("yes", yes), "the same token"),
        ((10_000,), "token id 10000"),
    ):
        with pytest.raises(LoadError, match=says):
            rerank_answer_ids(words, tokens)
