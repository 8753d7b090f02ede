"""Rows of `peers.py server`: the waiting time and memory of a real server's users.

A row takes one sample of several figures. A figure is a value with its unit; `ratio` and `decode steps` are results, the others
explain them.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import http_cost
import speculation
import torch
from harness.contestants import BENCHMARKS
from harness.gguf_model import GGUFModel
from harness.machine import proportional_memory, proportional_memory_of_file
from harness.serving import Server, serving

from windlass.clients import Client
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.config import SpeculationConfig
from windlass.server.text.tokenizer import Tokenizer

Figures = dict[str, tuple[float, str]]

_STREAMS, _ANSWER = 64, 256  # over HTTP and of the engine alone; short answers would measure how they begin
_MEGABYTE = 1e6


class ServerRows:
    """Takes samples. model: which all servers and engines load. options: see peers.py."""

    def __init__(self, model: GGUFModel, options: argparse.Namespace) -> None:
        self.model, self._options = model, options
        self._engines: dict[str, dict[str, EngineCore]] = {}
        self._tokenizer = Tokenizer.from_directory(model.directory)
        self._random = random.Random(0)
        self.rows: dict[str, Callable[[], Figures]] = {
            "start": self.start,
            "chat": self.chat,
            "http": self.http,
            "busy": self.busy,
            "lookup": self.lookup,
        }
        if options.draft is not None:
            self.rows["draft"] = self.draft

    @contextmanager
    def _server(self) -> Iterator[tuple[Server, Client]]:
        log = self._options.work / "bench-logs" / "server.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with serving(self.model.file, self._options.serve, log, {}) as server, Client(server.url, api_key="") as client:
            yield server, client

    def start(self) -> Figures:
        """Seconds to /ready with a warm file cache, beyond those of a process that imports torch."""
        with self.model.file.open("rb") as file:
            while file.read(1 << 24):
                pass
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported = time.perf_counter() - begin
        with self._server() as (server, _):
            ready = server.ready_seconds
        return {
            "start: time to ready": (ready, "s"),
            "start: import torch": (imported, "s"),
            "start: beyond import torch": (ready - imported, "s"),
        }

    def chat(self) -> Figures:
        """First token of a chat's next turn after 2,000 cached tokens, in decode steps; then memory.

        The rest is proportional set size beyond mapped weights, used cache and torch. It includes weights that are not mapped.
        """
        tokens = min(2000, self.model.context // 2)
        steps = min(64, self.model.context // 8)
        with self._server() as (server, client):
            text = "\n".join(f"{i}. Parcel {i * 7919 % 10007} left on day {i % 28}." for i in range(tokens))
            text = self._tokenizer.decode(self._tokenizer.encode(text)[:tokens])
            messages = [{"role": "user", "content": text}]
            answer = client.chat(messages, max_tokens=8, temperature=0)
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": "Which parcel left last?"},
            ]
            begin = time.perf_counter()
            with client.chat(messages, stream=True, max_tokens=steps, temperature=0, ignore_eos=True) as stream:
                times = [time.perf_counter() for chunk in stream if chunk.text]
                usage = stream.get_final().usage
            assert usage is not None
            step = (times[-1] - times[0]) / (steps - 1)
            pids = server.processes()
            pss, weights = proportional_memory(pids), proportional_memory_of_file(pids, self.model.file)
            cache = usage.total_tokens * client.cache().bytes_per_token
        torch_only = _memory_of_torch()
        return {
            "chat: first token": (times[0] - begin, "s"),
            "chat: decode step": (step, "s"),
            "chat: first token over a decode step": ((times[0] - begin) / step, "decode steps"),
            "memory: all processes": (pss / _MEGABYTE, "MB"),
            "memory: mapped weights": (weights / _MEGABYTE, "MB"),
            "memory: weights in the file": (self.model.file.stat().st_size / _MEGABYTE, "MB"),
            "memory: used cache": (cache / _MEGABYTE, "MB"),
            "memory: import torch": (torch_only / _MEGABYTE, "MB"),
            "memory: the rest": ((pss - weights - cache - torch_only) / _MEGABYTE, "MB"),
        }

    def http(self) -> Figures:
        """Tokens per second of 64 streams over HTTP, over those of the engine alone."""
        found = http_cost.beside_the_engine(self.model.file, 1, self._options.serve, streams=_STREAMS, answer=_ANSWER)
        (engine,), (over_http,) = found["engine"], found["http"]
        return {
            f"http: engine alone, {_STREAMS} streams": (engine, "tokens/s"),
            f"http: over HTTP, {_STREAMS} streams": (over_http, "tokens/s"),
            "http: over HTTP / engine alone": (over_http / engine, "ratio"),
        }

    def busy(self) -> Figures:
        """Decoding and a prompt next to one busy process, over the same without it."""
        with self._server() as (_, client):
            self._decode_and_prompt(client)  # warms up
            quiet = self._decode_and_prompt(client)
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                disturbed = self._decode_and_prompt(client)
            finally:
                other.kill()
                other.wait()
        found: Figures = {}
        for name, alone, shared in zip(("decode", "prompt"), quiet, disturbed, strict=True):
            found[f"busy: {name}, quiet"] = (alone, "tokens/s")
            found[f"busy: {name}, next to a busy process"] = (shared, "tokens/s")
            found[f"busy: {name}, busy / quiet"] = (shared / alone, "ratio")
        return found

    def lookup(self) -> Figures:
        """Speculation by prompt lookup on an edit of code, over plain decoding, with the same greedy answers."""
        code = (BENCHMARKS / "harness" / "quiet.py").read_text("utf-8")
        prompt = f"A Python file:\n```python\n{code}```\nThe same file, with `attempt` renamed to `trial`:\n```python\n"
        return self._speculation("lookup", SpeculationConfig(num_tokens=8), prompt, code)

    def draft(self) -> Figures:
        """Speculation with a draft model on a question, over plain decoding, with the same greedy answers."""
        draft = SpeculationConfig(model=str(GGUFModel(self._options.draft).directory))
        prompt = "A Python module that reads a CSV file and prints a table with aligned columns:\n```python\n"
        return self._speculation("draft", draft, prompt, prompt * 8)

    def _speculation(self, name: str, config: SpeculationConfig, prompt: str, length: str) -> Figures:
        """Of answers with as many tokens as the text `length`."""
        if name not in self._engines:
            self._engines.clear()  # closes the engines of another row
            torch.set_num_threads(self._options.threads)
            self._engines[name] = {
                "off": speculation.engine(self.model.directory, SpeculationConfig(), 1),
                "on": speculation.engine(self.model.directory, config, 1),
            }
        asked, limit = self._tokenizer.encode(prompt), len(self._tokenizer.encode(length))
        asked = asked[: self.model.context // 2]
        found = speculation.measure(
            self._engines[name], [asked], "code", max_tokens=min(limit, self.model.context // 4), repeats=1
        )
        return {
            f"{name}: plain": (found["off"]["median"], "tokens/s"),
            f"{name}: speculative": (found["on"]["median"], "tokens/s"),
            f"{name}: speculative / plain": (found["on_over_off"], "ratio"),
            f"{name}: same answers": (float(found["same_answers"]), "(1: equal)"),
        }

    def _decode_and_prompt(self, client: Client) -> tuple[float, float]:
        """Tokens per second of one decoding stream, and of one prompt."""
        steps, length = min(64, self.model.context // 4), min(512, self.model.context // 2)
        with client.completions(
            self._random_tokens(32), stream=True, max_tokens=steps, temperature=0, ignore_eos=True
        ) as stream:
            times = [time.perf_counter() for chunk in stream if chunk.choices]
        begin = time.perf_counter()
        client.completions(self._random_tokens(length), max_tokens=1, temperature=0, ignore_eos=True)
        return (steps - 1) / (times[-1] - times[0]), length / (time.perf_counter() - begin)

    def _random_tokens(self, count: int) -> list[int]:
        return [self._random.randrange(10, self.model.vocab) for _ in range(count)]


def _memory_of_torch() -> int:
    """Proportional set size of a process that has imported torch, in bytes."""
    command = [sys.executable, "-c", "import torch; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = proportional_memory([process.pid])
        process.kill()
    return found
