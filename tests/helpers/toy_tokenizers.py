"""Small tokenizers, trained in a few milliseconds: byte-level BPE, SentencePiece-style BPE, WordPiece."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs away, quickly!",
    "def main(argument):\n    return argument + 1\n\n\nfor index in range(10):\n\tprint(index)",
    "Größe, naïve café, straße — “quoted” … 東京は日本の首都です。 Привет, мир! 😀 🎉",
    "don't  stop   here. user assistant system <|im_start|> hello hello hello world world",
] * 8


@cache
def byte_level() -> tokenizers.Tokenizer:
    """GPT-2 style: covers every byte. Added tokens: two special ones, one ordinary."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|bos|>", "<|eos|>"])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    bos = backend.token_to_id("<|bos|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    return backend


def _byte_fallback_model() -> models.BPE:
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    ascii_only = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator(ascii_only, trainer)
    import json

    state = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = {name: index for index, name in enumerate(["<unk>", "<s>", "</s>"])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for token in state["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in state["merges"]]
    return models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


@cache
def llama_style() -> tokenizers.Tokenizer:
    """Llama 2 style: normalizer Prepend, Replace; decoder Replace, ByteFallback, Fuse, Strip."""
    backend = tokenizers.Tokenizer(_byte_fallback_model())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


@cache
def gemma_style() -> tokenizers.Tokenizer:
    """Gemma style: without a prefix space, so nothing is stripped."""
    backend = tokenizers.Tokenizer(_byte_fallback_model())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@cache
def metaspace() -> tokenizers.Tokenizer:
    """Metaspace as pre-tokenizer and decoder, which removes the first token's prefix space. No byte tokens in the decoder."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@cache
def word_piece() -> tokenizers.Tokenizer:
    """BERT style, with a decoder without a rule per token."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


ALL = {
    "byte_level": byte_level,
    "llama_style": llama_style,
    "gemma_style": gemma_style,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def copy_of(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return an independent copy."""
    return tokenizers.Tokenizer.from_str(backend.to_str())


def save(backend: tokenizers.Tokenizer, directory: Path) -> Path:
    """Write tokenizer.json to the directory; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return directory


def taught(names: tuple[str, ...], *, special: bool = True) -> tokenizers.Tokenizer:
    """Return the byte-level tokenizer with further tokens."""
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return backend
