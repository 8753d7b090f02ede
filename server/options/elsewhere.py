"""Options of vLLM and llama.cpp and commands of Ollama that are not ours, and what is in their place: docs/coming-from.md on the
command line.

Knows names only; which options a command has is told by its parser.
"""

from __future__ import annotations

import re
from typing import Any

_SCALING = '--rope-scaling, an object such as \'{"rope_type": "yarn", "factor": 4}\''
_OURS = {  # theirs, separated by spaces: ours
    # vLLM
    "--enforce-eager": "--no-cuda-graphs",
    "--kv-cache-memory-bytes --num-gpu-blocks-override": "--kv-cache-memory",
    "--enable-prefix-caching": "--prefix-caching, which is on by default",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--hf-overrides": "--rope-scaling, the object of rope_parameters alone",
    "--allowed-origins --cors-origins": "--cors-origin",
    "--lora-modules": "--lora",
    "--speculative-config": "--speculative-model, --speculative-mtp or --speculative-ngram",
    "--enable-log-requests": "--access-log, which writes no prompts",
    "--disable-log-stats": "--stats-interval 0",
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
    "--cpu-mask --cpu-range": "--pin-cores",
    "-ctk -ctv --cache-type-k --cache-type-v": "--kv-cache-dtype",
    "--rope-scale --rope-freq-scale --rope-freq-base --yarn-orig-ctx": _SCALING,
    "--yarn-beta-fast --yarn-beta-slow --yarn-attn-factor": _SCALING,
    "--keep": "--keep-tokens",
    "-n --predict --n-predict": "--default-max-tokens",
    "-a --alias": "--served-model-name",
    "--chat-template-file": "--chat-template",
    "--chat-template-kwargs": "--default-chat-template-kwargs",
    "--reasoning-format": "--reasoning-parser",
    "--api-prefix": "--root-path",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "--slot-save-path": "--kv-persist",
    "-to --timeout": "--write-timeout or --request-timeout",
    "-lv -v": "--log-level",
    "--log-jsonl": "--log-format json",
    "-md --model-draft": "--speculative-model",
    "--draft-max --spec-draft-n-max": "--speculative-tokens",
    "--spec-type": "--speculative-mtp (draft-mtp), --speculative-model or --speculative-ngram",
    "--lookup-cache-static --lookup-cache-dynamic": "--speculative-ngram",
}
_FIELDS = {  # theirs: the field of a request
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
_FOR_ALL = "--override-generation-config"  # sets some of these fields where a request does not
_SET_BY_IT = {"temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty"}
_INSTEAD = {  # theirs: what to do
    "-m": "name the model without an option, as in windlass serve MODEL",
    "--revision": "name it with the model, as org/name@REV",
    "--download-dir": "set HF_HOME",
    "--offline": "set HF_HUB_OFFLINE=1",
    "--log-file": "the log goes to standard error",
    "--models-dir --models-max": "one model per server",
}
_NEEDLESS = {  # theirs: why it can be left out
    # vLLM
    "--enable-chunked-prefill": "prompts are always cut into pieces",
    "--compilation-config": "models are not compiled",
    "--swap-space --cpu-offload-gb": "a request that gives up its place is computed again",
    "--enable-lora": "--lora NAME=DIR is enough",
    "--enable-auto-tool-choice": "calls of tools are always read",
    "--tokenizer --tokenizer-mode": "the tokenizer lies beside the weights",
    "--runner --convert --task": "every model makes vectors, and generates if it can",
    "--max-logprobs": "a request may ask for up to 20 of a token",
    "--structured-outputs-config --guided-decoding-backend": "structured output is always there",
    "--disable-log-requests": "requests are not logged, unless --access-log asks for a line of each",
    "--disable-fastapi-docs": "the pages hold nothing of the server",
    "--enable-request-id-headers": "X-Request-Id is always sent",
    "--enable-server-load-tracking": "GET /metrics and windlass top always tell",
    "--limit-mm-per-prompt --mmproj": "it is text only here",
    "--pipeline-parallel-size -pp": "a model runs on one machine",
    "--trust-remote-code": "no code of a model is ever run",
    # llama.cpp
    "--mlock --no-mmap --load-mode --numa --repack": "weights are read once into memory",
    "-fit": "`windlass size` tells what fits",
    "-ngl --n-gpu-layers --gpu-layers -sm -ts -mg -ot --cpu-moe --kv-offload --rpc": "a model lies on one device, all of it",
    "-cram --kv-unified --ctx-checkpoints --swa-full": "one cache is for all, of --kv-cache-memory",
    "-fa --flash-attn --jinja --metrics --cont-batching --cache-prompt --warmup": "always so",
    "--context-shift": "--context-overflow shift is what does it",
    "--override-kv --control-vector --lora-scaled --prio": "there is nothing like it",
    "--samplers --mirostat --dynatemp-range --top-n-sigma --adaptive-target": "there is nothing like it",
    "--check-tensors": "sizes and names are always checked",
    "--slots --props": "GET /v1/cache and GET /v1/models are there",
    "--threads-http": "one process answers all",
    "--tools --mcp-servers-config": "no tool is ever run here",
    "--embedding --reranking": "they are always there",
}
_COMMANDS = {
    "run": "here it is `windlass chat`",
    "list ls": "here it is `windlass models`",
    "ps": "here it is `windlass top`, of a server",
    "show": "here it is `windlass size`, and GET /v1/models of a server",
    "create": "a model is served as it is: `windlass serve --config FILE` takes what a Modelfile sets",
    "rm": "remove the file that `windlass models` shows",
    "stop": "a server ends with ctrl-C or SIGTERM",
}
_NAMED = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def hint(context: Any, given: str) -> str | None:
    """What another server's option or command is called here, or that it is not needed; None for any other name."""
    if not given.startswith("-"):
        return _find(_COMMANDS, given) if context.parent is None else None
    known = {name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    if (ours := _find(_OURS, given)) and known.issuperset(_NAMED.findall(ours)):
        return f"here it is {ours}"
    if field := _find(_FIELDS, given):
        option = "--" + field.replace("_", "-")
        for_all = f"; {_FOR_ALL} sets it for those without" if field in _SET_BY_IT and _FOR_ALL in known else ""
        return f"here it is {option}" if option in known else f"here it is a field of a request, {field}{for_all}"
    if why := _find(_NEEDLESS, given):
        return f"{why}: leave it out" if known.issuperset(_NAMED.findall(why)) else "leave it out"
    return _find(_INSTEAD, given)


def _find(table: dict[str, str], given: str) -> str | None:
    return next((what for names, what in table.items() if given in names.split()), None)
