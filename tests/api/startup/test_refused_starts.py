"""What `windlass serve` refuses before it loads anything: one line, exit code 2. On a CPU no engine is even started.

The real program for one refusal of each kind; the others are its command, run in this process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.device import DEVICE
from helpers.refused import inside, program, reason
from safetensors.torch import load_file, save_file

from windlass.engine.errors import LoadError
from windlass.engine.host_resources import available_memory
from windlass.engine.interface.config import EngineConfig
from windlass.engine.model.loading.preflight import check_replicas

DEMO = Path(__file__).parents[3] / "models" / "demo"


def refusal(
    *arguments: object, command: tuple[str, ...] = ("serve", "--port", "0"), real: bool = False, **environment: str
) -> str:
    """The error line of a refused start without its prefix; "listening" is never printed. real: in a process."""
    given = (*command, *arguments)
    result = program(*given, **environment) if real else inside(*given, **environment)
    assert result.stderr.count("\n") == 1, result
    return reason(result)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model to damage."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        shutil.copy(DEMO / name, directory)
    return directory


def configure(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without_weights(name: str, content: str = "") -> Callable[[Path], None]:
    """Turns a model into one that holds this file instead of safetensors."""

    def change(model: Path) -> None:
        (model / "model.safetensors").unlink()
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(content)

    return change


def adapter(model: Path) -> None:
    without_weights("adapter_model.safetensors")(model)
    (model / "config.json").unlink()
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')


def original_format(model: Path) -> None:
    without_weights("consolidated.00.pth")(model)
    (model / "config.json").unlink()
    (model / "params.json").write_text("{}")


def diffusers(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')


def sharded(model: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


def cut_off(model: Path) -> None:
    os.truncate(model / "model.safetensors", 1_000_000)


def configured(**changes: object) -> Callable[[Path], None]:
    return lambda model: configure(model, **changes)


QUANTIZED = r"this checkpoint is quantized \({}\).*unquantized one.*--quantization int8"

DIRECTORIES = {
    "pickle": (without_weights("pytorch_model.bin"), r"holds pytorch_model\.bin.*safetensors.*python -c \"from transformers"),
    "checkpoint": (without_weights("model.pt"), r"holds model\.pt.*python -c"),
    "gguf": (without_weights("x-Q4_K_M.gguf"), r"x-Q4_K_M\.gguf is not a GGUF file .*download it again"),
    "adapter": (adapter, r"is a LoRA adapter of base model org/base.*merge.*python -c .*merge_and_unload"),
    "original": (original_format, r"consolidated\.00\.pth, the original format of Meta or Mistral: give the Hugging Face"),
    "onnx": (without_weights("onnx/model.onnx"), r"weights for ONNX .*safetensors"),
    "diffusers": (diffusers, "diffusers pipeline.*give a language model"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), r"no model\.safetensors.*WINDLASS_LOAD_FORMAT=dummy"),
    "other name": (lambda model: (model / "model.safetensors").rename(model / "w.safetensors"), r"w\.safetensors is not"),
    "shards": (sharded, r"shards are missing: model-00002-of-00002\.safetensors: download"),
    "pointer": (pointer, "pointer of Git LFS.*git lfs pull"),
    "cut off": (cut_off, r"cannot read .*model\.safetensors: it has 1000000 bytes.*download or copy the file again"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), r"no tokenizer\.json in .*copy it"),
    "config": (lambda model: (model / "config.json").write_text("{"), "not valid JSON.*download it again"),
    "architecture": (configured(architectures=["MambaForCausalLM"]), "'MambaForCausalLM'.*without attention.*LlamaForCausal"),
    "no architecture": (configured(architectures=None), 'names no architecture.*"architectures": '),
    "experts": (configured(architectures=["JetMoeForCausalLM"], num_local_experts=8), "a mixture of experts of another.*not sup"),
    "program": (
        configured(architectures=["FooForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_foo.Foo"}),
        r"custom code in the checkpoint \(modeling_foo\.Foo\), which is not run, and is not supported: use one of",
    ),
    "other shape": (configured(intermediate_size=777), r"has shape \[256, 704\] where config.json asks for \[256, 777\]"),
    "pictures": (
        configured(architectures=["PaliGemmaForConditionalGeneration"], vision_config={"x": 1}),
        "a multimodal model",
    ),
    "half of it": (configured(architectures=["LlavaForConditionalGeneration"]), "needs the object text_config"),
    "encoder": (configured(architectures=["BertForMaskedLM"]), "an encoder, which writes no text"),
    "rotation": (configured(rope_scaling={"rope_type": "spiral"}), "spiral"),
    "gptq": (configured(quantization_config={"quant_method": "gptq", "bits": 5}), QUANTIZED.format("GPTQ, 5 bits")),
    "awq": (configured(quantization_config={"quant_method": "awq", "version": "gemv"}), QUANTIZED.format("AWQ, version gemv")),
    "bitsandbytes": (
        configured(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        QUANTIZED.format("bitsandbytes, 8 bits"),
    ),
    "hqq": (configured(quantization_config={"quant_method": "hqq"}), QUANTIZED.format("HQQ")),
    "compressed": (
        configured(quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
        QUANTIZED.format("compressed-tensors, format nvfp4-pack-quantized"),
    ),
    "mlx": (configured(quantization={"group_size": 64, "bits": 4}), QUANTIZED.format("MLX, 4 bits")),
}  # fmt: skip


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("case", DIRECTORIES)
def test_a_directory_that_cannot_be_served(case: str, model: Path) -> None:
    change, says = DIRECTORIES[case]
    change(model)
    assert re.search(says, said := refusal(model, real=case == "gguf")), said


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_a_file_in_place_of_a_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    said = refusal(tmp_path / name)
    assert ("is not a GGUF file" in said) if name.endswith("gguf") else (f"give its directory, {tmp_path}," in said)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("file", "says"), [("q.gguf", "is not a GGUF file"), ("pytorch_model.bin", "name-safetensors")]
)
def test_a_hub_id_cached_in_another_format(file: str, says: str, tmp_path: Path) -> None:
    storage = tmp_path / "hub" / "models--org--name"
    snapshot = storage / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text("0123")
    for name in ("config.json", file):
        (snapshot / name).touch()
    assert says in refusal("org/name", real=True, HF_HUB_CACHE=str(tmp_path / "hub"), HF_ENDPOINT="http://127.0.0.1:9")


OPTIONS = {
    "cache": (
        ("--max-model-len", "4000000", "--kv-cache-memory", "500GiB"),
        ("needs 500.0 GiB of memory", "are free", "--kv-cache-memory", "--max-model-len", "--max-num-seqs", "int8"),
    ),
    "context": (
        ("--max-model-len", "4000000", "--kv-cache-memory", "1GiB", "--dtype", "float32"),
        (
            "4000000 tokens does not fit",
            "15.3 GiB",
            "only 1.0 GiB are available",
            "262144 tokens",
            "lower --max-model-len",
        ),
    ),
    "device": (("--device", "gpu"), ("--device gpu is not known", "cuda:1")),
    "kept blocks": (("--kv-persist", "/proc/windlass"), ("--kv-persist /proc/windlass cannot be written to",)),
    "few kept blocks": (
        ("--kv-persist", "{folder}", "--config", "{folder}/small.yaml"),
        ("configuration key kv-persist-size is 1.0 MiB", "64 blocks of this model take", "raise it"),
    ),
    "blocks of a GPU": (
        ("--device", "cpu", "--kv-host-memory", "1GiB"),
        ("--kv-host-memory stores what the cache of a GPU evicts", "leave it out and raise --kv-cache-memory"),
    ),
    "short passages": (("--cache-reuse", "5"), ("--cache-reuse must be 0 or at least 32, got 5",)),
    "no window": (("--attention-window", "0"), ("--attention-window must be at least 1",)),
    "wide window": (
        ("--attention-window", "600"),
        ("--attention-window and attention_sinks are 600", "may be at most 480"),
    ),
    "kept": (
        ("--context-overflow", "shift", "--config", "{folder}/kept.yaml"),
        ("configuration key keep-tokens must lie between 0 and 480",),
    ),
    "kept by default": (
        ("--context-overflow", "shift", "--max-model-len", "32"),
        ("keep-tokens must lie between 0 and 0", "got 16 (its default)"),
    ),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_do_not_fit_the_machine(case: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("kv-persist-size: 1MiB")
    (tmp_path / "kept.yaml").write_text("keep-tokens: 100000")
    options, parts = OPTIONS[case]
    said = refusal(DEMO, *(option.format(folder=tmp_path) for option in options), real=case == "context")
    assert all(part in said for part in parts), said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu() -> None:
    assert "--device cpu" in refusal(DEMO, "--device", "cuda", "--quantization", "int8")


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server assumes that its torch supports CUDA; the engine process finds no GPU."""
    monkeypatch.setattr("windlass.engine.model.loading.preflight._torch_has_cuda", lambda: True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_errors_of_the_engine_are_one_line(cuda_build: None) -> None:
    assert re.match("--device cuda: .*CUDA.*: use --device cpu$", said := refusal(DEMO, "--device", "cuda")), said


@pytest.mark.parametrize("case", ["context", "few kept blocks"])
def test_gpu_restrictions_are_checked_without_a_gpu(case: str, tmp_path: Path, cuda_build: None) -> None:
    (tmp_path / "small.yaml").write_text("kv-persist-size: 1MiB")
    (tmp_path / "kept.yaml").write_text("keep-tokens: 100000")
    options, parts = OPTIONS[case]
    given = [option.format(folder=tmp_path) for option in options]
    said = refusal(DEMO, "--device", "cuda", "--dtype", "float32", *given)
    assert all(part in said for part in parts), said


LISTS = '{"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [2, 2]}'
SCALINGS = [
    ('{"rope_type": "learned"}', ".rope_type 'learned' cannot run on this model: use one of default,"),
    (LISTS, ".short_factor must hold 16 numbers, one per rotated pair of this model, got 2"),
    ('{"rope_type": "linear", "factor": 1e-300}', ".factor gives frequencies outside 0 .. 1e+06"),
    ('{"sliding_attention": {"rope_type": "linear", "factor": 2}}', ".sliding_attention: this model has"),
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("scaling", "says"), SCALINGS, ids=lambda value: str(value)[:30])
def test_a_scaling_that_the_model_cannot_run(scaling: str, says: str) -> None:
    real = scaling == LISTS
    assert refusal(DEMO, "--rope-scaling", scaling, real=real).startswith(f"--rope-scaling{says}")
    assert refusal(DEMO, "--rope-profile", f"x={scaling}").startswith(f"--rope-profile x{says}")


@pytest.mark.parametrize(
    ("ladder", "says"),
    [
        ("600=two,500=four", "step 2 holds up to 500 tokens, the one before it 600: lengths must go up"),
        ("600=four,900=two", "step 2 scales by 2, the one before it by 4: factors must not go down"),
        ("600=four,900=none", "step 2 scales by 1, the one before it by 4: factors must not go down"),
        ("600=lists", "step 1.short_factor must hold 16 numbers"),
    ],
)
def test_unreachable_ladder_steps(ladder: str, says: str) -> None:
    given = {"two": '{"rope_type": "yarn", "factor": 2}', "four": '{"rope_type": "linear", "factor": 4}'}
    given |= {"lists": LISTS} if "lists" in ladder else {}
    profiles = [part for name, scaling in given.items() for part in ("--rope-profile", f"{name}={scaling}")]
    assert refusal(DEMO, *profiles, "--rope-scaling", f"auto,{ladder}").startswith(f"--rope-scaling: {says}")


def test_a_profile_for_learned_frequencies(model: Path) -> None:
    """They are read from the files, so their number is known, as is that of other learned parameters."""
    configure(model, rope_scaling=None, rope_parameters={"rope_type": "learned", "rope_theta": 10_000.0})
    assert "needs the tensor model.rotary_emb.inv_freq" in refusal(model)
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "model.rotary_emb.inv_freq": torch.rand(16)}, model / "model.safetensors")
    assert "phi.short_factor must hold 16 numbers" in refusal(model, "--rope-profile", f"phi={LISTS}")
    save_file({**tensors, "model.rotary_emb.inv_freq": torch.full((16,), torch.nan)}, model / "model.safetensors")
    assert "tensor model.rotary_emb.inv_freq contains numbers that are not frequencies" in refusal(model)


def test_weights_that_do_not_fit_into_memory(model: Path) -> None:
    configure(model, hidden_size=65_536, intermediate_size=262_144, num_hidden_layers=100, num_attention_heads=512)
    said = refusal(model, "--dtype", "float32", WINDLASS_LOAD_FORMAT="dummy")
    where = "" if DEVICE == "cpu" else f" on {DEVICE}"
    assert said.startswith("the weights need ") and f"GiB are free{where}: use a smaller model" in said


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("command", [("generate", "hi", "--model"), ("bench", "engine")])
def test_other_commands_refuse_the_same(command: tuple[str, ...], model: Path) -> None:
    configure(model, quantization_config={"quant_method": "hqq"})
    assert refusal(model, command=command, real=True).startswith("this checkpoint is quantized (HQQ)")
    assert refusal(DEMO, "--rope-scaling", LISTS, command=command).startswith("--rope-scaling.short_factor")
    assert refusal(DEMO, "--rope-profile", f"x={LISTS}", command=command).startswith("--rope-profile x.short_factor")


@pytest.mark.slow
def test_nan_weights_end_the_start(model: Path) -> None:
    """Only reading them reveals it: the listener is open by then, and the server still ends."""
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2:] = b"\xc0\x7f"  # a bfloat16 NaN
    path.write_bytes(data)
    result = program("serve", "--port", "0", model)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "contains numbers that are NaN or infinite" in result.stderr.rstrip().splitlines()[-1]


def test_more_replicas_than_fit() -> None:
    assert refusal("demo", "--replicas", "0") == "--replicas must be a whole number between 1 and 1024, got '0'"
    cores = len(os.sched_getaffinity(0))
    said = refusal("demo", "--replicas", cores + 1)
    assert said == f"--replicas is {cores + 1}, there are {cores} cores for them: use {cores} or fewer"
    said = refusal("demo", "--replicas", cores, WINDLASS_PIN_CORES="true")
    assert said.endswith(
        f"there are {cores - 1} cores for them next to the server's (configuration key pin-cores): use {cores - 1} or fewer"
    )
    most = available_memory()
    assert most is not None
    long = ("--max-model-len", "100000", "--max-num-seqs", "4096", "--kv-cache-memory", str(int(0.7 * most)))
    said = refusal("demo", "--device", "cpu", "--replicas", "2", *long)
    assert re.match(
        r"the KV caches of 2 replicas need [0-9.]+ GiB of memory, .* lower --replicas, --kv-cache-memory", said
    )
    with pytest.raises(LoadError, match="need a CPU, whose cores and memory they share, not cuda:0"):
        check_replicas(EngineConfig(model="m", replicas=2), "cuda:0")
