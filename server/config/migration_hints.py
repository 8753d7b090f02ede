"""Hints for options of other servers and of earlier versions, and for misspelled environment variables."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from windlass.engine.errors import LoadError, nearest
from windlass.server.config.option import SCALING_EXAMPLE
from windlass.server.config.option_names import with_option_names
from windlass.server.config.server_options import OPTIONS

# Options of earlier versions without one of the same name: the replacement, or the fixed value. The documentation has the
# same table, and the command refuses an option, its variable and its key with these words.
REMOVED = {
    "api_keys": "use `api_key_file`, which reads named keys too",
    "attention_sinks": "give it as the second number of `attention_window`, such as 4096,4",
    "lora_dtype": "leave it out: adapters have the model's type, or a narrower one that loses nothing",
    "max_response_bytes": "leave it out: the limit is 64 MiB",
    "max_waiting_tokens": "leave it out: the limit is 8,388,608 tokens; `max_waiting` limits requests",
    "rope_exact": "use `rope_policy=exact`",
    "rope_ladder": "append it to `rope_scaling`, such as auto,8192=none,32768=long, or give it alone",
    "speculative_ngram_max": "leave it out: it is 4",
    "speculative_ngram_min": "leave it out: it is 2",
}

_SCALING = f"--rope-scaling, an object such as '{SCALING_EXAMPLE}'"

# Options of other servers, separated by spaces, and the name here.
_RENAMED_OPTIONS = {
    # vLLM
    "--enforce-eager": "WINDLASS_CUDA_GRAPHS=false",
    "--kv-cache-memory-bytes --num-gpu-blocks-override": "--kv-cache-memory",
    "--enable-prefix-caching": "--prefix-caching, on by default",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--hf-overrides": "--rope-scaling, the object of rope_parameters alone",
    "--allowed-origins --cors-origins": "--cors-origin",
    "--lora-modules": "--lora",
    "--speculative-config": "--speculative-model, --speculative-mtp or --speculative-ngram",
    "--enable-log-requests": "--access-log, which writes no prompts",
    "--disable-log-stats": "WINDLASS_STATS_INTERVAL=0",
    "--otlp-traces-endpoint": "--otel-endpoint",
    "--data-parallel-size -dp": "--replicas",
    "--tensor-parallel-size -tp": "--tensor-parallel",
    "--kv-offloading-size": "--kv-host-memory, a size such as 64GiB",
    "--kv-transfer-config": "--kv-host-memory or --kv-persist",
    # llama.cpp
    "-m --model": "--model",
    "-c --ctx-size": "--max-model-len",
    "-np --parallel": "--max-num-seqs",
    "-b -ub --batch-size --ubatch-size": "--max-num-batched-tokens",
    "-t -tb --threads-batch": "--threads",
    "--cpu-mask --cpu-range": "WINDLASS_PIN_CORES=true",
    "-ctk -ctv --cache-type-k --cache-type-v": "--kv-cache-dtype",
    "--rope-scale --rope-freq-scale --rope-freq-base --yarn-orig-ctx": _SCALING,
    "--yarn-beta-fast --yarn-beta-slow --yarn-attn-factor": _SCALING,
    "--keep": "the configuration key keep-tokens",
    "-n --predict --n-predict": "--default-max-tokens",
    "-a --alias": "--served-model-name",
    "--chat-template-file": "--chat-template",
    "--chat-template-kwargs": "--default-chat-template-kwargs",
    "--reasoning-format": "--reasoning-parser",
    "--api-prefix": "--root-path",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "--slot-save-path": "--kv-persist",
    "-to --timeout": "--request-timeout, or WINDLASS_WRITE_TIMEOUT",
    "-lv -v": "--log-level",
    "--log-jsonl": "--log-format json",
    "-md --model-draft": "--speculative-model",
    "--draft-max --spec-draft-n-max": "--speculative-tokens",
    "--spec-type": "--speculative-mtp (draft-mtp), --speculative-model or --speculative-ngram",
    "--lookup-cache-static --lookup-cache-dynamic": "--speculative-ngram",
}

# The field of a request.
_REQUEST_FIELDS = {
    "--seed": "seed",
    "--temp": "temperature",
    "--top-p": "top_p",
    "--top-k": "top_k",
    "--min-p": "min_p",
    "--repeat-penalty": "repetition_penalty",
    "--presence-penalty": "presence_penalty",
    "--frequency-penalty": "frequency_penalty",
    "--logit-bias": "logit_bias",
    "--ignore-eos": "ignore_eos",
    "--dry-multiplier": "dry_multiplier",
    "--xtc-probability": "xtc_probability",
    "--typical": "typical_p",
    "--grammar": "grammar",
    "--json-schema": "json_schema",
    "--reasoning": "chat_template_kwargs",
    "--reasoning-effort": "reasoning_effort",
    "--reasoning-budget": "thinking_budget",
    "--scheduling-policy": "priority",
}

_SAMPLING_OPTION = "--override-generation-config"  # sets some of these fields where a request does not
_SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty"}

# What to do instead.
_ALTERNATIVES = {
    "-m": "name the model without an option, as in windlass serve MODEL",
    "--revision": "name it with the model, as org/name@REV",
    "--download-dir": "set HF_HOME",
    "--offline": "set HF_HUB_OFFLINE=1",
    "--log-file": "the log goes to standard error",
    "--models-dir --models-max": "one model per server",
}

# Why it can be left out.
_UNNEEDED_OPTIONS = {
    # vLLM
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--compilation-config": "models are not compiled",
    "--swap-space --cpu-offload-gb": "a preempted request is computed again",
    "--enable-lora": "--lora NAME=DIR is enough",
    "--enable-auto-tool-choice": "tool calls are always parsed",
    "--tokenizer --tokenizer-mode": "the tokenizer is read from the model's directory",
    "--runner --convert --task": "every model makes embeddings, and generates if it can",
    "--max-logprobs": "a request may ask for up to 20 of a token",
    "--structured-outputs-config --guided-decoding-backend": "structured output is always available",
    "--disable-log-requests": "requests are not logged, unless --access-log asks for a line of each",
    "--disable-fastapi-docs": "the pages contain nothing about the server",
    "--enable-request-id-headers": "X-Request-Id is always sent",
    "--enable-server-load-tracking": "GET /metrics and windlass top always show it",
    "--limit-mm-per-prompt --mmproj": "only text is supported",
    "--pipeline-parallel-size -pp": "a model runs on one machine",
    "--trust-remote-code": "code of a model is never executed",
    # llama.cpp
    "--mlock --no-mmap --load-mode --numa --repack": "weights are read once into memory",
    "-fit": "`windlass size` shows what fits",
    "-ngl --n-gpu-layers --gpu-layers -sm -ts -mg -ot --cpu-moe --kv-offload --rpc": "a model is on one device",
    "-cram --kv-unified --ctx-checkpoints --swa-full": "all requests share one cache, of --kv-cache-memory",
    "-fa --flash-attn --jinja --metrics --cont-batching --cache-prompt --warmup": "it is always on",
    "--context-shift": "--context-overflow shift does this",
    "--override-kv --control-vector --lora-scaled --prio": "there is no equivalent",
    "--samplers --mirostat --dynatemp-range --top-n-sigma --adaptive-target": "there is no equivalent",
    "--check-tensors": "sizes and names are always checked",
    "--slots --props": "GET /v1/cache and GET /v1/models show this",
    "--threads-http": "one process serves all",
    "--tools --mcp-servers-config": "the server never runs tools",
    "--embedding --reranking": "they are always available",
}

# Keywords of Python classes, separated by spaces, without an option of the same name: of llama-cpp-python and transformers.
_KEYWORDS = {
    "n_ctx": "--max-model-len",
    "n_seq_max": "--max-num-seqs",
    "n_batch n_ubatch": "--max-num-batched-tokens",
    "n_threads n_threads_batch num_threads": "--threads",
    "type_k type_v": "--kv-cache-dtype",
    "model_path filename repo_id pretrained_model_name_or_path": "the first argument, model",
    "rope_freq_base rope_freq_scale rope_scaling_type yarn_orig_ctx yarn_ext_factor yarn_attn_factor": _SCALING,
    "lora_path lora_base lora_scale": "--lora, a list such as ['name=folder']",
    "draft_model": "--speculative-model",
    "chat_format chat_handler": "--chat-template",
    "verbose": "log_level, such as 'info'",
    "torch_dtype": "--dtype",
    "device_map main_gpu": "--device",
    "load_in_8bit": "quantization='int8'",
    "load_in_4bit": "quantization='int4'",
}

# Why such a keyword can be left out.
_UNNEEDED_KEYWORDS = {
    "use_mmap use_mlock vocab_only": "weights are read once into memory",
    "flash_attn logits_all": "it is always available",
    "tensor_split split_mode offload_kqv": "a model is on one device",
    "disable_log_stats": "no statistics are logged",
    "max_seq_len_to_capture": "every length of a context is captured",
}

# Commands of Ollama.
_COMMANDS = {
    "run": "here it is `windlass chat`",
    "list ls": "here it is `windlass models`",
    "ps": "here it is `windlass top`, of a server",
    "show": "here it is `windlass size`, and GET /v1/models of a server",
    "create": "a model is served as it is: `windlass serve --config FILE` sets options as a Modelfile does",
    "rm": "remove the file that `windlass models` shows",
    "stop": "a server ends with ctrl-C or SIGTERM",
}

_NAMED = re.compile(r"(?<!\S)--[a-z][a-z-]*")
_PREFIX = "WINDLASS_"

# Variables that are not options: the cache folder, the CPU's instruction set, and the address and key that clients use.
_OTHER_VARIABLES = {
    "WINDLASS_CACHE",
    "WINDLASS_CPU_ISA",
    "WINDLASS_BASE_URL",
    "WINDLASS_API_KEY",
    "WINDLASS_CLIENT_KEY",
}


def moved_option_hint(context: Any, name: str, *, in_file: bool = False) -> str | None:
    """The replacement of an option of an earlier version, in markup; None for any other name.

    context: of a command, None for `LLM`. in_file: the option is a key of the configuration file.
    """
    if name in REMOVED:
        return f"it was removed: {REMOVED[name]}"
    option = OPTIONS.get(name)
    if option is None or option.scope == "flag" or (option.scope == "key" and (in_file or context is None)):
        return None
    if option.scope == "variable":
        return f"set the environment variable {option.variable}"
    has_file = any(parameter.name == "config" for parameter in context.command.params)
    in_config = f"write {option.key} in --config FILE, or " if has_file else ""
    return f"it is a configuration key: {in_config}set {option.variable}"


def foreign_option_hint(context: Any, given: str) -> str | None:
    """The name here of another server's or an earlier version's option or command, or why it is not needed; else None."""
    if not given.startswith("-"):
        return _find(_COMMANDS, given) if context.parent is None else None
    known = {
        name
        for parameter in context.command.params
        if not getattr(parameter, "hidden", False)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    name = given.removeprefix("--").removeprefix("no-").replace("-", "_")
    reads = any(parameter.name == name for parameter in context.command.params)
    if (reads or name in REMOVED) and (moved := moved_option_hint(context, name)) is not None:
        return with_option_names(moved)
    if (ours := _find(_RENAMED_OPTIONS, given)) and known.issuperset(_NAMED.findall(ours)):
        return f"here it is {ours}"
    if field := _find(_REQUEST_FIELDS, given):
        option = "--" + field.replace("_", "-")
        for_all = (
            f"; {_SAMPLING_OPTION} sets it for those without"
            if field in _SAMPLING_FIELDS and _SAMPLING_OPTION in known
            else ""
        )
        return f"here it is {option}" if option in known else f"here it is a field of a request, {field}{for_all}"
    if why := _find(_UNNEEDED_OPTIONS, given):
        return f"{why}: leave it out" if known.issuperset(_NAMED.findall(why)) else "leave it out"
    return _find(_ALTERNATIVES, given)


def foreign_keyword_hint(name: str, known: Collection[str]) -> str | None:
    """The keyword of `LLM` for one of vLLM, llama-cpp-python or transformers, or why it is not needed; else None.

    known: the keywords of `LLM`.
    """
    flag = f"--{name.replace('_', '-')}"
    if why := _find(_UNNEEDED_KEYWORDS, name):
        return f"{why}: leave it out"
    if ours := _find(_KEYWORDS, name) or _find(_RENAMED_OPTIONS, flag):
        keywords = {found: found.removeprefix("--").replace("-", "_") for found in _NAMED.findall(ours)}
        if not set(known).issuperset(keywords.values()):
            return None
        return f"use {_NAMED.sub(lambda found: keywords[found[0]], ours)}"
    if field := _find(_REQUEST_FIELDS, flag):
        return f"use {field} of the sampling parameters"
    if why := _find(_UNNEEDED_OPTIONS, flag):
        return "leave it out" if "--" in why else f"{why}: leave it out"
    return None


def _find(table: dict[str, str], given: str) -> str | None:
    return next((what for names, what in table.items() if given in names.split()), None)


def check_variables(environment: Mapping[str, str]) -> None:
    """Raise LoadError for a variable of an option that was removed. Without it, a server might start without its keys."""
    for name, hint in REMOVED.items():
        if environment.get(variable := f"{_PREFIX}{name.upper()}"):
            raise LoadError(f"the variable {variable} was removed: {hint}")


def misspelled_variables(program: Any, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each variable that no command of the program (a group of commands) reads, with the name that it resembles.

    Variables that resemble none are ignored: Kubernetes sets such variables for a service of this name.
    """
    known = _OTHER_VARIABLES | set(_variables(program))
    plain = {name.removeprefix(_PREFIX): name for name in known}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known and (near := nearest(name.removeprefix(_PREFIX), plain)):
            yield name, plain[near]


def _variables(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(variable := parameter.envvar, str):
            yield variable
    for inner in getattr(command, "commands", {}).values():
        yield from _variables(inner)
