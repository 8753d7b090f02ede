"""Generate docs/models.md from the registry of families, the tiny checkpoints that tests compare, and the GGUF architectures.

.venv/bin/python tools/docs/make_models_page.py [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from windlass.engine.model.families.family import Family, is_set
from windlass.engine.model.families.multimodal import MULTIMODAL
from windlass.engine.model.families.registry import FAMILIES
from windlass.engine.model.gguf.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HEAD = """# Models

A model is loaded if the first entry of `architectures` in its config.json is in a table below, of [multimodal
models](#text-parts-of-multimodal-models) their text part. Its weights are safetensors, plain or
[quantized](serving.md#quantized-checkpoints), or as [GGUF](serving.md#quantized-weights) where the last column names what the
file calls itself. A model of another architecture is refused with the reason.

Tests check every row. For each name in the fifth column there is a tiny random checkpoint, with random norms and biases. It
reads 40 tokens as one prompt, in chunks of 7, and token by token. Its logits are those of the reference to 1e-5 of the largest
logit (float32, eager attention, cosines from float64 angles). The reference is transformers. Where transformers has no class of
its own, it is a plain float32 model written from the published code. For most rows the tests also show that they would notice
another theta, other pairs of dimensions, and a norm or a bias that is left out.

*Pairs* says how the checkpoint numbers the two dimensions that turn together, (j, j + d/2) or (2j, 2j + 1). *Share* and *Theta*
are what holds where config.json does not say. Share is the part of a head that rotates. Nearly every checkpoint says both.

| Models | `architectures` | Pairs, share | Theta | Compared as | GGUF |
|---|---|---|---|---|---|
"""
ENCODERS = """
The same body may come with another ending in `architectures`:

* `…ForSequenceClassification` predicts [the classes of texts](embeddings.md#models-that-classify). With `classifier_from_token`
  in config.json it is a causal model [that ranks by its answer](embeddings.md#rerankers-that-answer).
* `…ForTokenClassification` predicts [those of each token](embeddings.md#classes-of-tokens).
* `…Model`, saved without a head that is not the embedding, makes vectors and generates nothing.

## Latent attention

DeepSeek V2 and V3, GLM 4.7 Flash, MiniCPM3 and Youtu-LLM (MLA) cache one row of each token. It holds a compressed vector, which
the keys and values of all heads are made of, and a rotated part, which all heads share. Attention over such rows has two forms,
which agree to 1e-5:

* *absorbed*: a query is multiplied by what would make the keys, and what it brings back by what would make the values.
  Nothing is made of the cache, but rows are wide: 576 numbers in DeepSeek, where a head has keys of 192 and values of 128;
* *expanded*: for a piece of a prompt, keys and values of a few heads at a time are made of the cached rows, and forgotten
  after it.

A piece of a prompt takes the form that is quicker. In DeepSeek's sizes the expanded one leads from 200 tokens in a piece on,
whatever the context, and from 64 on in the first piece of a prompt
([measured](benchmarks-history.md#prompts-through-latent-attention)). Where the processor has a matrix unit (AMX), it is used
over rows of 16 or 8 bits, with keys and values of 16. How many tokens a piece has, [the step
time](serving.md#tuning-the-step-time) says. The absorbed form is taken by single tokens, over more than 65,536 cached ones, on
a GPU, and under `--deterministic`, where bits must not depend on how a prompt was cut.

What makes keys and values of the cached rows is numbers, in whatever form a file has it. On a CPU, where rows are rounded to
8 bits for weights in blocks anyway, they are float16 if the file has them in blocks: a decode step reads half of what float32
takes. Under `--deterministic` and `WINDLASS_ACTIVATIONS=float32` they are float32.

`--kv-cache-dtype int8` keeps a row as codes of 8 bits with a float32 scale for every 32 of its numbers: in DeepSeek's size 648
bytes, where 16 bits take 1,152. The rotated part has scales of its own. Where it is turned, the compressed vector keeps its
bits. On a GPU it is refused.

## Gemma 4

* **Two kinds of layers.** Local ones have heads of 256 numbers, see a window and turn every pair. Global ones have heads of 512,
  of which [a quarter of the pairs turn](rotary.md#proportional). In 12B and larger the projection of keys is that of values too.
* **Layers that read the keys of earlier ones** (the last 20 of 35 in E2B). They have no place in the cache. As they leave nothing
  behind of a token, only the last one of a prompt goes through them, unless log-probabilities of the prompt, vectors, windows or
  shifted contexts are asked for. A prompt of 1,024 tokens of E2B's shape went at 352 and 373 tokens a second so, and at 119 and
  141 where all of them do (random weights in int8, two cores of an AMD EPYC with AVX-512, 2026-11-28, runs by turns).
* **An embedding of each token for every layer** (E2B, E4B) is projected and added. The table takes more memory than all other
  weights of E2B. `--quantization` makes 8 or 6 bits of its numbers.
* **Parallel experts** next to the feed-forward (26B A4B), which see the stream itself.

## Layers that carry a state

Three of four layers of Qwen 3.5, Qwen 3.6 and Qwen3-Next read no keys. Such a layer (Gated DeltaNet,
[2412.06464](https://arxiv.org/abs/2412.06464)) has a state of each sequence, of one size however long that is: the last inputs
of a short convolution, and a matrix for each head, which each token lets fade and corrects. It is float32, whatever weights and
pages are. Most layers of LFM2 are a short convolution between two gates ([2511.23404](https://arxiv.org/abs/2511.23404)), and the
state is the last inputs of that alone. Nine of ten layers of Granite 4 H have a memory that each token lets fade and adds to
(Mamba 2, [2405.21060](https://arxiv.org/abs/2405.21060)) behind a short convolution. So has about every second one of Nemotron H,
Nemotron Nano 2 and Nemotron 3 Nano, whose layers are one part each: such a memory, attention, or a feed-forward, which is of
experts in Nemotron 3 Nano 30B. (Its larger sisters, whose experts see less than the model's width, are refused.) In Falcon H1
every layer has one in parallel with its attention ([2507.22448](https://arxiv.org/abs/2507.22448)). The other layers attend
as everywhere:
their scaling is set per server and per request. Those of Granite 4 H do not rotate, as its config.json says
(`position_embedding_type`), nor do those of Nemotron H. There a `rope_scaling` is refused with the reason.

* **Memory.** In the shape of Qwen 3.5 0.8B a state takes 19 MiB, and a token 12 KiB of pages in bfloat16; in that of LFM2 1.2B
  they take 160 KiB and 12 KiB, in that of Granite 4 H Tiny 55 MiB and 8 KiB. There are states for twice as many sequences as run
  at once (`--max-num-seqs`; without a prefix cache for one more than those), in half of `--kv-cache-memory` at most. Where that
  is less, fewer run at once.
* **The prefix cache.** A prompt begins where a state was kept, which is a copy of it: where a piece of an earlier prompt ended
  (pieces end with blocks), at the last full block of an earlier prompt, and at that of its answer. So the next turn of a chat
  continues from the last one, even without its thoughts. When memory is short, of a prompt one state in 1,024 tokens and
  the last are kept longest, and those alone go to files (`--kv-persist`). A file of a state is as large as the state.
* **Contexts that drop tokens**, windows and distances of their own concern the layers that attend. A state keeps what dropped
  tokens have left in it.
* **Proposed tokens** (`--speculative-ngram`, `--speculative-model`) are checked as [elsewhere](serving.md#speculative-decoding).
  While they are, a stream has a state more for each of them, so that it can continue after the last one that is accepted. With
  these options that many states are reserved, within the half of the cache that states have at most. Where fewer are free, fewer
  tokens are proposed. A draft model may carry states too where the model does. Each state is then stored with the model's. A
  model's own [prediction layer](serving.md#the-models-own-prediction-layer) carries none.
* **Refused:** `cache_reuse`, as a state belongs to all that was read before, and `--tensor-parallel`.
* **A step that finds no memory** fails its newest request, as elsewhere. The others of that step begin again from what is cached.
* **On a GPU** their decode steps are captured as [those of other models](guides/gpu.md#cuda-graphs), but each draws one token.
  `--kv-host-memory` holds as many states as blocks of keys, which take most of it. Their programs were tested in
  Triton's interpreter and have run on no GPU.

## Encoders

Each token of an encoder sees those after it too. Such a model generates nothing. It makes
[vectors, scores, rankings and classes](embeddings.md#encoders), and a text is computed in one step. `…Model` and `…ForMaskedLM`
load as they are (the head for masked words is left out). `…ForSequenceClassification` and `…ForTokenClassification` load with
their heads.

They are compared with transformers as above: hidden states and the logits of every head to 1e-5. That is done alone, batched with
texts of other lengths, under a request's scaling, with compiled kernels and without. The tests also show that they would notice a
causal mask, another window, other pairs, another theta, and any vector left out.

| Models | `architectures` | Pairs | Theta | Norms | Compared as |
|---|---|---|---|---|---|
"""
UNROTATED = """
## Without rotation

These models are served to compare with. Nothing scales here: a `rope_scaling` is refused with the reason.

* **ALiBi** (BLOOM, Falcon-RW, and Baichuan's 13B models) depends only on distances. So its contexts shift, and its passages are
  [used anywhere](endless-context.md). Tests compare that with transformers on the text that is left, with one layer, whose keys
  do not depend on dropped tokens. Sinks in front of a window are refused: scores fall with distance, so nothing would be seen
  of them. Falcon-RW (`"alibi": true`) is compared with transformers' sdpa attention, since its eager one adds ALiBi twice, and
  without the bfloat16 that transformers rounds it to.
* **Learned positions** are part of every key and value. So there is no shift, passages are not reused, and no context is
  longer than the table.

| Models | `architectures` | Positions | Compared as |
|---|---|---|---|
"""
POSITIONS = {"learned": "learned, a table", "alibi": "ALiBi, slopes by head"}
MULTI = """
## Text parts of multimodal models

Of these models the part that reads and writes text is loaded. The parts for images and sound stay in the files and take no
memory, and requests have text alone. On text such a model computes what its text part does, so scalings, shifted contexts,
adapters and quantized checkpoints are those of that family. A line at the start says that it is so.

The text part may be of any family above that generates: of the one that `model_type` in `text_config` names. Every row is
compared as above with transformers' class of the whole model, given text (with transformers' own cosines), whichever names its
tensors have had. transformers leaves out what the text parts of Cohere's models multiply logits by; here they are multiplied.
config.json has two fields for whether the head is the embedding, which may be wrong: a head in the files is used.

| Models | `architectures` |
|---|---|
"""
FOOT = """
This page is made by `tools/docs/make_models_page.py`.
"""


def checkpoints() -> dict[str, list[str]]:
    """Names of the tiny checkpoints by architecture, from every table `FAMILIES` of tests/helpers/tiny_*.py."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    found: dict[str, list[str]] = {}
    for path in sorted((TESTS / "helpers").glob("tiny_*.py")):
        table: dict[str, tuple[str, Any]] = getattr(importlib.import_module(f"helpers.{path.stem}"), "FAMILIES", {})
        for name, (prefix, _) in table.items():
            whole = prefix.endswith(("Model", "ForCausalLM"))
            architecture = prefix if whole else f"{prefix}ForCausalLM"
            found.setdefault(architecture, []).append(name)
    return found


def rows() -> Iterator[str]:
    for family, names in _compared(lambda one: one.causal and one.positions not in POSITIONS):
        rotates = family.positions == "rotary"
        yield " | ".join(
            (
                f"| {family.models}",
                f"`{family.architecture}`",
                _pairs(family) if rotates else "none turn",
                f"{family.rules.rope_theta:,.0f}" if rotates else "–",
                names,
                ", ".join(f"`{name}`" for name, one in ARCHITECTURES.items() if family in one.families) + " |",
            )
        )


def encoder_rows() -> Iterator[str]:
    for family, names in _compared(lambda one: not one.causal):
        architectures = ", ".join(f"`{name}`" for name in (*family.names, family.classifier, family.token_classifier))
        local = family.rules.local_rope_theta
        theta = f"{family.rules.rope_theta:,.0f}" + ("" if local is None else f", local layers {local:,.0f}")
        norms = "before each part" if family.norms.output is None else "after each sum"
        yield f"| {family.models} | {architectures} | {_pairs(family)} | {theta} | {norms} | {names} |"


def unrotated_rows() -> Iterator[str]:
    for family, names in _compared(lambda one: one.positions in POSITIONS):
        architectures = ", ".join(f"`{name}`" for name in (*family.names, family.classifier, family.token_classifier))
        yield f"| {family.models} | {architectures} | {POSITIONS[family.positions]} | {names} |"


def multimodal_rows() -> Iterator[str]:
    for kind in sorted(MULTIMODAL, key=lambda one: one.title.lower()):
        yield f"| {kind.title} | `{kind.architecture}` |"


def _compared(chosen: Callable[[Family], bool]) -> Iterator[tuple[Family, str]]:
    """The chosen families by name, and the names of the checkpoints that they are compared as."""
    compared = checkpoints()
    for family in sorted(filter(chosen, FAMILIES), key=lambda one: one.models.lower()):
        names = compared.get(family.architecture)
        if not names:
            raise SystemExit(f"no tiny checkpoint of {family.architecture}: add one to tests/helpers/tiny_families.py")
        yield family, ", ".join(names)


def _pairs(family: Family) -> str:
    pairs = "2j, 2j + 1" if is_set({}, family.interleaved) else "j, j + d/2"
    share = family.rules.partial_rotary_factor
    return pairs if share == 1 else f"{pairs}; {share:g}"


def page() -> str:
    parts = (HEAD, rows()), (ENCODERS, encoder_rows()), (UNROTATED, unrotated_rows()), (MULTI, multimodal_rows())
    return "".join(head + "\n".join(lines) + "\n" for head, lines in parts) + FOOT


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "models.md")
    parser.parse_args().out.write_text(page(), encoding="utf-8")
