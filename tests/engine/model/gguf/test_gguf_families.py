"""GGUF files of converted checkpoints: logits, metadata that must be used, other layouts, quantized blocks, refused files.

`test_gguf_descriptions` compares the specs and tensors of the Llama-like families.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_helpers.gguf_checkpoints import PROMPT, YARN, convert, converted, derived, logits, tensors_of
from engine_helpers.rewritten_weights import difference
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from helpers import tiny_unrotated
from helpers.adapters import merged, save_adapter
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file

from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.gguf.gguf_description import describe_gguf, read_gguf_config
from windlass.engine.model.gguf.tensor_mapping import map_tensors
from windlass.engine.model.loading.gguf_index import GGUFLayout, to_gguf_spec
from windlass.engine.model.loading.safetensors_header import TensorLocation
from windlass.kernels import FORMS, BlockWeight

_DELTA = {
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "attention_bias": False,
}
_NEXT = {**_DELTA, "norm_topk_prob": True, "mlp_only_layers": []}
# Families with the settings that GGUF cannot store, so that a conversion loses them. A variant follows a comma.
CASES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {"attention_bias": False},
    "cohere2": {},
    "cohere_normed": {},
    "deepseek_v2": {"attention_bias": False},
    "deepseek_v2_lite": {"n_group": 1, "topk_group": 1, **YARN},
    "deepseek_v3": {"attention_bias": False, **YARN},
    "exaone4": {},
    "exaone4_full": {},
    "falcon": {"bias": False, "tie_word_embeddings": True},
    "falcon_h1": {},
    "falcon_h1_normed": {},
    "falcon_multi_query": {"bias": False},
    "falcon_one_norm": {"tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma4_26b": {},
    "gemma4_31b": {},
    "gemma4_e2b": {"attention_bias": False},
    "glm4_moe": {"use_qk_norm": False, "attention_bias": False},
    "gpt_neox": {},
    "gpt_neox_in_turn": {},
    "gpt_oss": {"swiglu_limit": 7.0},
    "granite": {},
    "granite4": {},
    "granite4_h": {},
    "granite4_h_experts": {},
    "granite4_h_nope": {},
    "granite4_h_nope_experts": {},
    "granitemoe": {"attention_bias": False},
    "granitemoeshared": {"attention_bias": False},
    "internlm2": {},
    "lfm2": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "lfm2_moe_unbiased": {"norm_topk_prob": True},
    "lfm2_plain": {},
    "mixtral": {"sliding_window": None},
    "nemotron": {"attention_bias": False, "mlp_bias": False},
    "nemotron_h": {},
    "nemotron_h_experts": {"n_group": 1, "topk_group": 1},
    "nemotron_h_plain": {},
    "olmo": {"attention_bias": False},
    "olmo2": {"attention_bias": False},
    "olmo3": {},
    "olmoe": {},
    "phi": {},
    "qwen2_moe": {"use_sliding_window": False, "mlp_only_layers": []},
    "qwen3_5": _DELTA,
    "qwen3_5, six value heads": {**_DELTA, "linear_num_value_heads": 6},
    "qwen3_5_moe": _DELTA,
    "qwen3_5_moe, six value heads": {**_DELTA, "linear_num_value_heads": 6},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "qwen3_next": _NEXT,
    "qwen3_next, six value heads": {**_NEXT, "linear_num_value_heads": 6},
    "seed_oss": {"mlp_bias": False, "attention_out_bias": False},
    "stablelm": {},
    "stablelm_parallel": {},
    "starcoder2": {"sliding_window": None},
    "youtu": {},
}
GEMMA4 = ("gemma4_31b", "gemma4_e2b", "gemma4_26b")
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "youtu")


def checkpoint(case: str, directory: Path, **changes: Any) -> Path:
    family = case.partition(",")[0]
    make = tiny_unrotated.make_unrotated if family in tiny_unrotated.FAMILIES else make_model
    return make(family, directory, **{**CASES[case], **changes})


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by case, each made once."""
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            made[case] = checkpoint(case, tmp_path_factory.mktemp("hf"))
        return made[case]

    return get


SourceOf = Callable[[str], Path]


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert difference(found, wanted) < 1e-5


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("case", CASES)
def test_file_gives_the_logits_of_transformers(case: str, source_of: SourceOf, tmp_path: Path) -> None:
    source, request = source_of(case), greedy("a", PROMPT, 3)
    original = make_core(source)
    result = run(make_core(converted(source, tmp_path / "gguf")), [request])["a", 0]
    text = PROMPT + result.token_ids
    if case in tiny_unrotated.FAMILIES:
        reference = tiny_unrotated.logits_of(source, text)
    else:
        names = [group.name for group in original.runner.decoder.spec.rotary_groups]
        reference = Reference(source, specs_of(original, request), names).logits(text)
    assert_near(torch.stack(result.logits), reference[len(PROMPT) - 1 : -1])


@pytest.mark.parametrize("family", GEMMA4)
def test_spec_of_gemma4_is_that_of_the_checkpoint(family: str, source_of: SourceOf, tmp_path: Path) -> None:
    wanted = read_spec(json.loads((source_of(family) / "config.json").read_text()))
    described = describe_gguf([convert(source_of(family), tmp_path / "model.gguf")])
    assert read_spec(described.config, described.generation) == wanted


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("granite4_h")])
def test_granite_hybrid_rotates_where_the_file_says_so(case: str, source_of: SourceOf, tmp_path: Path) -> None:
    described = describe_gguf([convert(source_of(case), tmp_path / "model.gguf")])
    rotates = read_spec(described.config, described.generation).rotary_groups[0].base.unrotated is None
    assert rotates == ("nope" not in case)


# -- metadata and layout flags change logits ---------------------------------------------------------------------------


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deepseek_v3", "expert_weights_scale", 1.0),
        ("deepseek_v3", "expert_weights_norm", False),
        ("deepseek_v3", "expert_group_count", 2),
        ("deepseek_v3", "rope.scaling.yarn_log_multiplier", 0.03),
        ("deepseek_v2_lite", "rope.scaling.yarn_log_multiplier", 0.03),
        ("gpt_oss", "attention.sliding_window", 5),
        ("gpt_oss", "expert_used_count", 3),
        ("granitemoe", "residual_scale", 0.5),
        ("gemma4_31b", "attention.sliding_window", 5),
        ("gemma4_31b", "final_logit_softcapping", 3.0),
        ("gemma4_31b", "rope.freq_base", 100.0),
        ("gemma4_31b", "rope.freq_base_swa", 100.0),
        ("gemma4_26b", "expert_used_count", 2),
    ],
)
def test_metadata_changes_logits(family: str, key: str, value: Any, source_of: SourceOf, tmp_path: Path) -> None:
    found = logits(converted(source_of(family), tmp_path / "gguf", **{key: value}))
    assert difference(found, logits(source_of(family))) > 1e-4


@pytest.mark.parametrize(
    ("case", "switch"),
    [
        ("falcon", "fused_in_parts"),
        ("gemma2", "norms_with_offset"),
        ("olmo", "interleaved"),
        ("internlm2", "interleaved"),
        *[(case, "values_in_turns") for case in CASES if case.startswith("qwen3_5")],
    ],
)
def test_layout_flag_changes_logits(case: str, switch: str, source_of: SourceOf, tmp_path: Path) -> None:
    found = converted(source_of(case), tmp_path / "gguf")
    wanted = logits(found)
    index = json.loads((found / "gguf.json").read_text())
    assert index[switch] is True
    (found / "gguf.json").write_text(json.dumps({**index, switch: False}))
    assert difference(logits(found), wanted) > 1e-3


def test_latent_parts_change_logits(source_of: SourceOf, tmp_path: Path) -> None:
    """Keys or values of another head give other logits."""
    found = converted(source_of("deepseek_v3"), tmp_path / "gguf")
    index, wanted = json.loads((found / "gguf.json").read_text()), logits(found)
    assert index["latent_in_parts"] is True
    for part in ("k_b_proj", "v_b_proj"):
        names = [f"model.layers.2.self_attn.{part}[{head}].weight" for head in (0, 3)]
        swapped = {**index["tensors"], names[0]: index["tensors"][names[1]], names[1]: index["tensors"][names[0]]}
        (found / "gguf.json").write_text(json.dumps({**index, "tensors": swapped}))
        assert difference(logits(found), wanted) > 1e-3


# -- other layouts of the same model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options"),
    [("mixtral", {"stacked": False}), *[(family, {"latent_in_parts": False}) for family in LATENT]],
)
def test_older_layout_gives_the_same_logits(
    family: str, options: dict[str, bool], source_of: SourceOf, tmp_path: Path
) -> None:
    """One tensor per expert; keys and values of latent attention in one tensor."""
    assert_near(logits(converted(source_of(family), tmp_path / "gguf", **options)), logits(source_of(family)))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_joined_gate_and_up_of_experts_give_the_same_bits(kind: str, tmp_path: Path) -> None:
    source = checkpoint("qwen3_moe", tmp_path / "hf", moe_intermediate_size=64)
    found, wanted = (
        logits(converted(source, tmp_path / str(joined), kind=kind, joined=joined)) for joined in (True, False)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("family", "options"), [("gemma4_26b", {"joined": False}), ("gemma4_e2b", {"unused": True})])
def test_other_layout_of_gemma4_gives_the_same_bits(
    family: str, options: dict[str, bool], source_of: SourceOf, tmp_path: Path
) -> None:
    """Separate gate and up of experts; keys and values of layers that read those of others."""
    found = converted(source_of(family), tmp_path / "gguf", **options)
    names = json.loads((found / "gguf.json").read_text())["tensors"]
    assert "model.layers.5.self_attn.k_proj.weight" not in names
    assert torch.equal(logits(found), logits(converted(source_of(family), tmp_path / "plain")))


def test_lfm2_whose_layers_all_attend(tmp_path: Path) -> None:
    source = checkpoint("lfm2_plain", tmp_path / "hf", layer_types=["full_attention"] * 5)
    assert_near(logits(converted(source, tmp_path / "gguf", **{"attention.head_count_kv": 2})), logits(source))


def test_step_bias_without_a_suffix(source_of: SourceOf, tmp_path: Path) -> None:
    """Some files name it `ssm_dt`."""
    source = source_of("qwen3_next")
    biases = {name: one for name, one in tensors_of(source).items() if name.endswith("ssm_dt.bias")}
    more = {**dict.fromkeys(biases), **{name.removesuffix(".bias"): one for name, one in biases.items()}}
    assert_near(logits(converted(source, tmp_path / "gguf", more=more)), logits(source))


def test_mtp_layers_are_omitted(source_of: SourceOf, tmp_path: Path) -> None:
    source = source_of("qwen3_5")
    own = {name: one for name, one in tensors_of(source).items() if name.startswith("blk.5.")}
    further: dict[str, Any] = {name.replace("blk.5.", "blk.6."): one for name, one in own.items()}
    further["blk.6.nextn.eh_proj.weight"] = torch.zeros(64, 128)
    changes = {"block_count": 7, "nextn_predict_layers": 1, "attention.recurrent_layers": None}
    assert_near(logits(converted(source, tmp_path / "gguf", more=further, **changes)), logits(source))


def test_metadata_of_mtp_layers_is_omitted(source_of: SourceOf, tmp_path: Path) -> None:
    longer = {"block_count": 6, "nextn_predict_layers": 1}
    longer |= {"attention.head_count_kv": [0, 0, 2, 0, 0, 2], "feed_forward_length": [0, 40, 0, 0, 40, 40]}
    source = source_of("nemotron_h_experts")
    shorter, found = (
        describe_gguf([convert(source, tmp_path / f"{len(changes)}.gguf", **changes)]) for changes in ({}, longer)
    )
    assert found.config == shorter.config and found.index["tensors"].keys() == shorter.index["tensors"].keys()


def test_granite_hybrid_rotates_by_default(source_of: SourceOf, tmp_path: Path) -> None:
    file = convert(source_of("granite4_h_nope"), tmp_path / "model.gguf", **{"rope.scaling.finetuned": None})
    assert describe_gguf([file]).config["position_embedding_type"] == "rope"


def test_granite_with_a_rotation_flag_is_accepted(source_of: SourceOf, tmp_path: Path) -> None:
    describe_gguf([convert(source_of("granite"), tmp_path / "model.gguf", **{"rope.scaling.finetuned": True})])


def test_norms_of_falcon_are_distinguished_by_name(source_of: SourceOf, tmp_path: Path) -> None:
    described = describe_gguf([convert(source_of("falcon"), tmp_path / "model.gguf")])
    assert described.config["num_ln_in_parallel_attn"] == 2
    tensors, data = described.index["tensors"], (tmp_path / "model.gguf").read_bytes()
    original = load_file(source_of("falcon") / "model.safetensors")
    for norm in ("ln_attn", "ln_mlp"):
        name = f"transformer.h.1.{norm}.weight"
        entry = tensors[name]
        assert data[entry["begin"] : entry["end"]] == original[name].numpy().tobytes()


def test_head_with_an_unnamed_factor_gives_a_notice(tmp_path: Path) -> None:
    """As in llama.cpp: a tied embedding includes its own factor and lacks the head's."""
    source = checkpoint("falcon_h1", tmp_path / "hf", tie_word_embeddings=True)
    core = make_core(derived(convert(source, tmp_path / "model.gguf"), tmp_path / "derived"))
    (notice,) = core.runner.decoder.spec.notices
    assert "a factor that the file does not name" in notice and not make_core(source).runner.decoder.spec.notices
    config = json.loads((source / "config.json").read_text())
    found = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0]
    assert_near(found, logits(source)[0] * config["embedding_multiplier"] / config["lm_head_multiplier"])


@pytest.mark.parametrize("share", [1 / 16, 0.3125, 1.0])
def test_rope_factors_give_the_rotated_pairs_of_gemma4(share: float, source_of: SourceOf, tmp_path: Path) -> None:
    rotated = int(16 * share)
    factors = np.array([1.0] * rotated + [1e30] * (16 - rotated), dtype=np.float32)
    file = convert(source_of("gemma4_31b"), tmp_path / "model.gguf", more={"rope_freqs.weight": factors})
    described = describe_gguf([file])
    assert described.config["rope_parameters"]["full_attention"] == {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": share,
    }
    group = next(one for one in read_spec(described.config).rotary_groups if one.name == "full_attention")
    assert group.base.rotating_pairs == (rotated if rotated < 16 else None)


def test_end_of_turn_and_tool_call_end_an_answer(source_of: SourceOf, tmp_path: Path) -> None:
    tokens = {
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<|tool_call>", "<turn|>", "<|tool_response>", "a"],
        "tokenizer.ggml.token_type": [3, 3, 4, 3, 4, 1],
        "tokenizer.ggml.eos_token_id": 1,
    }
    described = describe_gguf([convert(source_of("gemma4_31b"), tmp_path / "model.gguf", **tokens)])
    assert described.generation == {"eos_token_id": [1, 3, 4]}


def test_published_shape_of_nemotron_nano() -> None:
    """Shape of nvidia/NVIDIA-Nemotron-3-Nano-4B-GGUF: layers with key heads attend, and no width is a multiple of 256."""
    attending, dense = (12, 17, 24, 32), (1, 3, 5, 8, 10, 13, 15, 18, 20, 22, 25, 27, 29, 33, 37, 39, 41)
    sizes = {
        **{"block_count": 42, "context_length": 2**20, "embedding_length": 3136, "vocab_size": 131_072},
        **{"attention.head_count": 40, "attention.key_length": 128, "attention.value_length": 128},
        "attention.head_count_kv": [8 if i in attending else 0 for i in range(42)],
        "feed_forward_length": [12_544 if i in dense else 0 for i in range(42)],
        **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 78, "rope.scaling.finetuned": False},
        **{"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 8},
        **{"ssm.inner_size": 7680, "ssm.time_step_rank": 96},
    }
    shapes = {"token_embd.weight": (131_072, 3136), "output.weight": (131_072, 3136), "output_norm.weight": (3136,)}
    for i in range(42):
        own: dict[str, tuple[int, ...]] = {"attn_norm.weight": (3136,)}
        if i in attending:
            own |= {"attn_q.weight": (5120, 3136), "attn_k.weight": (1024, 3136), "attn_v.weight": (1024, 3136)}
            own |= {"attn_output.weight": (3136, 5120)}
        elif i in dense:
            own |= {"ffn_up.weight": (12_544, 3136), "ffn_down.weight": (3136, 12_544)}
        else:
            own |= {"ssm_in.weight": (17_504, 3136), "ssm_conv1d.weight": (9728, 4), "ssm_conv1d.bias": (9728,)}
            own |= {"ssm_a": (96, 1), "ssm_d": (96, 1), "ssm_dt.bias": (96,), "ssm_norm.weight": (8, 960)}
            own |= {"ssm_out.weight": (3136, 7680)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    tensors = {name: TensorLocation(name, Path(), "F32", shape, 0, 0) for name, shape in shapes.items()}
    metadata = {f"nemotron_h.{key}": value for key, value in sizes.items()} | {"general.architecture": "nemotron_h"}
    facts = read_gguf_config(metadata, tensors, {})
    assert not any("rope" in key or "rotary" in key for key in facts.config)
    spec = read_spec(facts.config)
    assert not spec.notices and spec.kv_groups == (KVGroupSpec(attending, 8, 128, None),)
    states = tuple(i for i in range(42) if i not in attending + dense)
    assert spec.state_group == StateGroupSpec(states, 9728, 4, 96, 128, 80)
    held = to_gguf_spec(spec, GGUFLayout())
    assert len(map_tensors(tensors, facts.family, held, {})) == len(tensors) == 263


# -- quantized blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "name"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 64}, "layers.1.experts.4.gate_up"),
        ("qwen3_5", {"linear_value_head_dim": 16}, "layers.0.projections"),
    ],
)
def test_blocks_are_stored_unchanged(family: str, settings: dict[str, int], name: str, tmp_path: Path) -> None:
    source = checkpoint(family, tmp_path / "hf", **settings)
    core = make_core(converted(source, tmp_path / "gguf", kind="Q8_0"), dtype="auto")
    weight = core.runner.decoder.weights()[name]
    assert isinstance(weight, BlockWeight) and weight.form == FORMS["q8_0"]
    found, wanted = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0], logits(source)[0]
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.99


@pytest.mark.parametrize("family", ["granite4_h_nope", "lfm2"])
def test_blocks_are_loaded(family: str, source_of: SourceOf, tmp_path: Path) -> None:
    found = logits(converted(source_of(family), tmp_path / "gguf", kind="Q8_0"))
    assert torch.nn.functional.cosine_similarity(found, logits(source_of(family)), dim=1).min() > 0.99


def test_mxfp4_is_stored_as_five_bit_codes(source_of: SourceOf, tmp_path: Path) -> None:
    source = source_of("gpt_oss")
    directory = converted(source, tmp_path / "gguf", kind="MXFP4")
    core = make_core(directory, dtype="auto")
    assert core.info.quantization == "GGUF MXFP4"
    reader = gguf.GGUFReader(directory / "model.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = core.runner.decoder.weights()
    for name, rows in (("gate", slice(0, 96)), ("up", slice(96, None))):
        tensor = stored[f"blk.2.ffn_{name}_exps.weight"]
        assert tensor.tensor_type == GGMLQuantizationType.MXFP4
        want = torch.from_numpy(np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type)))
        for expert in range(6):
            mine = weights[f"layers.2.experts.{expert}.gate_up"]
            assert isinstance(mine, BlockWeight) and mine.form == FORMS["q5_0"]
            assert torch.equal(mine.dequantize()[rows].cpu(), want[expert])
    found, wanted = run(core, [greedy("a", PROMPT, 1)])["a", 0].logits[0], logits(source)[0]
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.9


def dequantized(source: Path, directory: Path, kind: str) -> Path:
    """Write the model with the numbers that a file of this type holds."""
    directory.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            rows = quantize(tensor.float().numpy(), GGMLQuantizationType[kind])
            tensors[name] = torch.from_numpy(np.ascontiguousarray(dequantize(rows, GGMLQuantizationType[kind])))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    return directory


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", GEMMA4)
def test_blocks_of_gemma4_are_stored_unchanged(family: str, kind: str, tmp_path: Path) -> None:
    # Every width is a multiple of 32, the block size of both types.
    sizes = {"hidden_size_per_layer_input": 32} if family == "gemma4_e2b" else {}
    source = checkpoint(family, tmp_path / "hf", **sizes)
    found = converted(source, tmp_path / "gguf", kind=kind)
    wanted = logits(dequantized(source, tmp_path / "plain", kind))
    core = make_core(found, dtype="float32", activations="float32")
    result = run(core, [greedy("a", PROMPT, 3)])["a", 0]
    assert_near(torch.stack(result.logits), wanted)
    weights = core.runner.decoder.weights()
    names = {
        "gemma4_31b": ["embedding", "layers.1.gate_up"],
        "gemma4_e2b": ["layer_inputs_table", "layer_inputs", "layers.5.input_gate"],
        "gemma4_26b": ["layers.1.beside.experts.4.gate_up", "layers.1.beside.experts.7.down"],
    }
    for name in names[family]:
        weight = weights[name]
        assert isinstance(weight, BlockWeight) and weight.form == FORMS[kind.lower()], name
    assert core.info.quantization == f"GGUF {kind}"


@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h", "nemotron_h_experts"])
def test_blocks_count_as_the_numbers_they_hold(family: str, source_of: SourceOf, tmp_path: Path) -> None:
    """A file of the dequantized numbers differs only by rounded activations."""
    source = source_of(family)
    blocks = convert(source, tmp_path / "blocks.gguf", kind="Q4_0")
    tensors = gguf.GGUFReader(blocks).tensors
    assert {"F32", "Q4_0"} == {tensor.tensor_type.name for tensor in tensors}
    held = {one.name: dequantize(one.data, one.tensor_type).reshape(one.shape[::-1]) for one in tensors}
    numbers = convert(source, tmp_path / "numbers.gguf", tensors=held)
    found, wanted, unrounded = (
        logits(directory)[0]
        for directory in (derived(blocks, tmp_path / "blocks"), derived(numbers, tmp_path / "numbers"), source)
    )
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.9995 > torch.cosine_similarity(wanted, unrounded, dim=0)


@ON_A_CPU
def test_latent_heads_in_blocks_use_float16(tmp_path: Path) -> None:
    """They are the nearest float16 to the numbers of the file. Deterministic steps use float32."""
    wide = {
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "moe_intermediate_size": 32,
    }
    source = checkpoint("deepseek_v3", tmp_path / "hf", **wide)
    directory = converted(source, tmp_path / "gguf", kind="Q8_0")
    cores = [make_core(directory, dtype="auto", deterministic=option) for option in (False, True)]
    narrow, exact = (core.runner.decoder.layers[1].mixer.weights.kv_up for core in cores)
    assert narrow.dtype == torch.float16 and exact.dtype == torch.float32
    assert torch.equal(narrow, exact.half())
    found, wanted = (core.runner.decoder for core in cores)
    assert found.weight_dtype == wanted.weight_dtype == torch.float32


def test_adapters_change_tensors_in_the_original_order(source_of: SourceOf, tmp_path: Path) -> None:
    source = source_of("qwen3_5")
    found = converted(source, tmp_path / "gguf")

    def changed(directory: Path, adapter: Path) -> torch.Tensor:
        core = make_core(directory, lora=(AdapterSource(1, "tuned", str(adapter)),))
        return torch.stack(run(core, [greedy("a", PROMPT, 3, adapter=1)])["a", 0].logits)

    plain = save_adapter(tmp_path / "plain", source, ["q_proj", "k_proj", "o_proj", "up_proj"])
    assert_near(changed(found, plain), logits(merged(source, plain, tmp_path / "merged")))
    of_states = save_adapter(tmp_path / "states", source, ["in_proj_qkv", "up_proj"])
    with pytest.raises((LoadError, RequestError), match="no linear layer"):
        changed(found, of_states)
    # Qwen3-Next has the same order of heads in both.
    source = source_of("qwen3_next")
    joined = save_adapter(tmp_path / "joined", source, ["in_proj_qkvz", "in_proj_ba", "out_proj"])
    found = converted(source, tmp_path / "gguf next")
    assert_near(changed(found, joined), logits(merged(source, joined, tmp_path / "merged next")))


# -- refused files -----------------------------------------------------------------------------------------------------

FACTORS = np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)
# By family: options of `convert`, and a fragment of the message.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "falcon_h1": [
        ({"ssm.inner_size": 100}, "ssm.inner_size 100 is not a multiple of falcon-h1.ssm.time_step_rank 6"),
        ({"ssm.inner_size": 192}, "has the shape"),
        ({"ssm.time_step_rank": 12}, "has the shape"),
        ({"ssm.group_count": 4}, "mamba_n_heads 6 is not a multiple of mamba_n_groups 4"),
        ({"ssm.group_count": 2}, "has the shape"),
        ({"ssm.state_size": None}, "ssm.state_size is missing"),
        ({"ssm.conv_kernel": 9}, "mamba_d_conv 9 is not supported: it may be 2 to 8"),
        ({"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms=true, which makes it another model"),
        ({"attention.head_count_kv": [2, 2, 0, 2]}, "head_count_kv differs from layer to layer"),
        ({"expert_count": 4}, "which makes it a mixture of experts"),
        ({"mlp_gate_multiplier": 0.75}, "has falcon-h1.mlp_gate_multiplier, which does not show whether its weights"),
        ({"block_count": 3}, r"tensor blk\.3\.\S+ is of a layer after the 3 of falcon-h1.block_count"),
    ],
    "nemotron_h": [
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv has 2 entries for 6 layers"),
        ({"feed_forward_length": [0, 96]}, "feed_forward_length has 2 entries for 6 layers"),
        ({"feed_forward_length": [0, 96, 0, 0, 0, 48]}, "feed_forward_length differs from layer to layer"),
        ({"feed_forward_length": [0] * 6}, "feed_forward_length is missing"),
        (
            {"feed_forward_length": 96},
            "layer 2 has nemotron_h.attention.head_count_kv and nemotron_h.feed_forward_length",
        ),
        ({"attention.head_count_kv": [0] * 6}, "no layer is full_attention"),
        ({"attention.head_count_kv": [0, 0, 0, 2, 0, 0]}, "does not belong to the model|is missing"),
        ({"ssm.time_step_rank": 5}, "ssm.inner_size 96 is not a multiple of nemotron_h.ssm.time_step_rank 5"),
        ({"ssm.group_count": 4}, "mamba_num_heads 6 is not a multiple of n_groups 4"),
        ({"expert_count": 8}, "which makes it a mixture of experts"),
    ],
    "nemotron_h_experts": [
        ({"expert_count": 6}, "for 6 experts"),
        ({"expert_used_count": 9}, "do not go together"),
        ({"expert_shared_feed_forward_length": 40}, "has the shape"),
        ({"expert_gating_func": 1}, "experts of this architecture are chosen by sigmoids"),
        ({"expert_weights_norm": 1}, "norm_topk_prob must be true or false"),
        ({"expert_group_count": 4}, "expert_group_used_count is missing"),
        ({"moe_latent_size": 32}, "moe_latent_size is 32: experts whose input is narrower"),
        ({"feed_forward_length": [0, 40, 0, 0, 0]}, "does not belong to the model|is missing"),
    ],
    "granite4_h": [
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv has 2 entries for 5 layers"),
        ({"attention.head_count_kv": [0] * 5}, "no layer is full_attention"),
        ({"attention.head_count_kv": [0, 0, 2, 0, 1]}, "head_count_kv differs from layer to layer"),
        ({"attention.head_count_kv": [0, 2, 2, 0, 2]}, "does not belong to this model|is missing"),
        ({"ssm.inner_size": 100}, "ssm.inner_size 100 is not a multiple of granitehybrid.ssm.time_step_rank 8"),
        ({"ssm.inner_size": 96}, "recurrent layers have 96 values, which is not a multiple of the model's 64"),
        ({"ssm.inner_size": 192}, "has the shape"),
        ({"ssm.time_step_rank": 3}, "ssm.inner_size 128 is not a multiple of granitehybrid.ssm.time_step_rank 3"),
        ({"ssm.time_step_rank": 16}, "has the shape"),
        ({"ssm.group_count": 3}, "mamba_n_heads 8 is not a multiple of mamba_n_groups 3"),
        ({"ssm.group_count": 0}, "ssm.group_count must be a positive integer"),
        ({"ssm.state_size": 2**31}, "ssm.state_size must be a positive integer"),
        ({"ssm.state_size": 2**20}, "mamba_d_state must be a positive integer up to 65536"),
        ({"ssm.conv_kernel": 9}, "mamba_d_conv 9 is not supported: it may be 2 to 8"),
        ({"ssm.conv_kernel": 3}, "has the shape"),
        ({"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms=true, which makes it another model"),
        ({"attention.sliding_window": 8}, "sliding_window=8, which makes it another model"),
    ],
    "qwen3_5": [
        ({"more": {"blk.1.ssm_a": None}}, r"linear_attn\.A_log .* is missing"),
        ({"more": {"blk.1.ssm_a": torch.zeros(3)}}, r"linear_attn\.A_log has the shape \[3\], \[4\] is expected"),
        ({"more": {"blk.0.ssm_conv1d.weight": torch.zeros(88, 3)}}, r"conv1d\.weight has the shape"),
        ({"more": {"blk.2.ssm_a": torch.zeros(4)}}, "does not belong to this model"),
        ({"more": {"blk.0.ssm_d": torch.zeros(4)}}, "does not belong to the model"),
        ({"ssm.inner_size": 42}, "inner_size 42 is not a multiple of"),
        ({"ssm.group_count": 3}, "4 is not a multiple of linear_num_key_heads 3"),
        ({"ssm.conv_kernel": None}, "ssm.conv_kernel is missing"),
        ({"full_attention_interval": 9}, "no layer is full_attention"),
        ({"full_attention_interval": 2}, "is missing"),
        ({"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms"),
    ],
    "gemma4_31b": [
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv has 2 entries for 4 layers"),
        ({"attention.head_count_kv": [2, 1] * 3}, "head_count_kv has 6 entries for 4 layers"),
        ({"attention.head_count_kv": [2, 1, 4, 1]}, "differs among layers of one kind"),
        ({"attention.head_count_kv": [2, 0, 2, 0]}, "head_count_kv must be a positive integer, got 0"),
        ({"attention.head_count_kv": ["2", "1"] * 2}, "head_count_kv must be a positive integer, got '2'"),
        ({"attention.head_count_kv": [2, 2, 2, 2]}, r"1.self_attn.k_proj.weight has the shape"),
        ({"attention.sliding_window_pattern": [True, False]}, "has 2 entries for 4 layers"),
        ({"attention.sliding_window_pattern": 2}, "must be a list of flags, got 2"),
        ({"attention.sliding_window_pattern": None}, "must be a list of flags, got null"),
        ({"attention.sliding_window_pattern": [False, True] * 2}, "gives the last layer a window"),
        ({"block_count": 5}, "has 4 entries for 5 layers"),
        ({"block_count": 2**31 - 1}, "block_count must be between"),
        ({"attention.sliding_window": None}, "attention.sliding_window is missing"),
        ({"attention.key_length_swa": None}, "attention.key_length_swa is missing"),
        ({"attention.key_length": None}, "attention.key_length is missing"),
        ({"attention.key_length": 64, "attention.value_length": 64}, "dimension_count is 32, not the 64"),
        ({"attention.value_length": 16}, "keys and values of different widths"),
        ({"attention.value_length_swa": 32}, "keys and values of different widths"),
        ({"rope.dimension_count": 8}, "rope.dimension_count is 8, not the 32 of a head"),
        ({"rope.dimension_count_swa": 8}, "rope.dimension_count_swa is 8, not the 16 of a head"),
        ({"rope.freq_base": None}, "rope.freq_base is missing"),
        ({"rope.freq_base_swa": None}, "rope.freq_base_swa is missing"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, r"sets gemma4.rope.scaling"),
        ({"rope.scaling.type": "yarn"}, r"sets gemma4.rope.scaling"),
        ({"embedding_length_per_layer_input": 12}, "embed_tokens_per_layer.weight .* is missing"),
        ({"attention.sink": 1}, "gemma4.attention.sink=1"),
        ({"more": {"rope_freqs.weight": None}}, "tensor rope_freqs.weight is missing, which gives the rotated pairs"),
        ({"more": {"rope_freqs.weight": FACTORS[:8]}}, "rope_freqs.weight must hold 16 numbers"),
        ({"more": {"rope_freqs.weight": FACTORS[4:]}}, "rope_freqs.weight must hold 16 numbers"),
        ({"more": {"rope_freqs.weight": FACTORS[::-1].copy()}}, "rope_freqs.weight must hold 16 numbers"),
        ({"more": {"rope_freqs.weight": np.minimum(FACTORS, 8)}}, "rope_freqs.weight must hold 16 numbers"),
        ({"more": {"rope_freqs.weight": np.where(FACTORS > 1, np.nan, FACTORS)}}, "must hold 16 numbers"),
        ({"more": {"rope_freqs.weight": np.where(FACTORS > 1, np.inf, FACTORS)}}, "must hold 16 numbers"),
        ({"more": {"rope_factors_long.weight": FACTORS}}, "rope_factors_long.weight is not the one that gives"),
        ({"more": {"blk.2.layer_output_scale.weight": None}}, "layers.2.layer_scalar .* is missing"),
        (
            {"more": {"blk.1.attn_v.weight": np.zeros((32, 64), np.float32)}},
            "layers.1.self_attn.v_proj.weight .* does not belong to this model",
        ),
        ({"more": {"blk.2.attn_v.weight": None}}, "layers.2.self_attn.v_proj.weight .* is missing"),
        ({"more": {"blk.0.ffn_down.scale": np.ones(1, np.float32)}}, "tensor blk.0.ffn_down.scale does not belong"),
        ({"more": {"blk.0.ffn_gate_inp.scale": np.ones(64, np.float32)}}, "ffn_gate_inp.scale does not belong"),
    ],
    "gemma4_e2b": [
        ({"feed_forward_length": [96, 192]}, "feed_forward_length has 2 entries for 6"),
        ({"feed_forward_length": [96, 96, 192, 192, 192, 192]}, "or twice as much for the last 3"),
        ({"feed_forward_length": [96] * 3 + [288] * 3}, "or twice as much for the last 3"),
        ({"feed_forward_length": 96}, r"mlp.gate_proj.weight has the shape \[192, 64\]"),
        ({"attention.shared_kv_layers": 6}, "shared_kv_layers is 6 of 6 layers"),
        ({"attention.shared_kv_layers": 7}, "shared_kv_layers is 7 of 6 layers"),
        (
            {"attention.shared_kv_layers": 5, "feed_forward_length": 96},
            "leaves no layer of a kind whose keys others use",
        ),
        ({"attention.shared_kv_layers": 1.5}, "shared_kv_layers must be a positive integer"),
        ({"attention.shared_kv_layers": 2, "feed_forward_length": 96}, "layers.3.self_attn.k_proj"),
        ({"embedding_length_per_layer_input": 10}, r"embed_tokens_per_layer.weight has the shape"),
        ({"embedding_length_per_layer_input": 0}, "tensor .* does not belong to the model"),
        (
            {"more": {"per_layer_token_embd.weight": np.zeros((100, 72), np.float32)}},
            "vocab_size_per_layer_input 100 is less than vocab_size 128",
        ),
        ({"more": {"per_layer_token_embd.weight": None}}, "embed_tokens_per_layer.weight .* is missing"),
        ({"more": {"per_layer_token_embd.weight": np.zeros(9216, np.float32)}}, "has the shape|none that"),
    ],
    "gemma4_26b": [
        ({"expert_count": 7}, "for 7 experts"),
        ({"expert_count": 0}, "tensor .* does not belong to the model"),
        ({"expert_feed_forward_length": 16}, "ffn_gate_up_exps has the shape"),
        ({"expert_used_count": 9}, "do not go together"),
        ({"expert_used_count": None}, "expert_used_count is missing"),
        ({"more": {"blk.1.ffn_down_exps.scale": None}}, "router.per_expert_scale .* is missing"),
        ({"more": {"blk.1.ffn_down_exps.scale": np.ones(9, np.float32)}}, r"has the shape \[9\]"),
        (
            {"more": {"blk.1.ffn_up_exps.weight": np.zeros((8, 32, 64), np.float32)}},
            "ffn_up_exps.weight appears under another name",
        ),
        ({"more": {"blk.1.ffn_gate_up_exps.weight": np.zeros(8, np.float32)}}, "for 8 experts"),
    ],
    "lfm2": [
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv has 2 entries for 5 layers"),
        ({"attention.head_count_kv": [0, 0, 2, 0, 1]}, "head_count_kv differs from layer to layer"),
        ({"attention.head_count_kv": [0] * 5}, "no layer is full_attention"),
        ({"attention.head_count_kv": [0, 2, 2, 0, 2]}, "does not belong to the model|is missing"),
        ({"shortconv.l_cache": 0}, "shortconv.l_cache must be a positive integer"),
        ({"shortconv.l_cache": 4}, "has the shape"),
        ({"attention.sliding_window": 8}, "sliding_window=8, which makes it another model"),
    ],
    "lfm2_moe": [
        ({"expert_gating_func": 1}, "experts of this architecture are chosen by sigmoids"),
        ({"expert_used_count": 9}, "do not go together"),
    ],
    "glm4_moe": [
        ({"expert_gating_func": 1}, "expert_gating_func is 1: experts of this architecture are chosen by sigmoids"),
    ],
    "deepseek_v3": [
        ({"expert_gating_func": 3}, r"expert_gating_func is 3: supported are 1 \(softmax\) and 2"),
        ({"rope.dimension_count": 64}, "rope.dimension_count is 64, not less than"),
        ({"expert_count": 12}, "has the shape .* for 12 experts"),
    ],
    "deepseek_v2": [
        ({"expert_weights_norm": True}, "norm_topk_prob false"),
    ],
    "gpt_oss": [
        ({"expert_count": 7}, "for 7 experts"),
    ],
    "granitemoe": [
        ({"rope.scaling.finetuned": False}, "finetuned=false: no layer would rotate"),
    ],
    "granite": [
        ({"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned=false: no layer would rotate"),
    ],
}


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        pytest.param(family, options, message, id=f"{family}-{message[:60]}")
        for family, rows in REFUSED.items()
        for options, message in rows
    ],
)
def test_inconsistent_file_is_refused(
    family: str, options: dict[str, Any], message: str, source_of: SourceOf, tmp_path: Path
) -> None:
    file = convert(source_of(family), tmp_path / "model.gguf", **options)
    with pytest.raises(LoadError, match=message) as refused:
        describe_gguf([file])
    assert str(refused.value).startswith(f"{file}: ") and str(refused.value).isprintable()
