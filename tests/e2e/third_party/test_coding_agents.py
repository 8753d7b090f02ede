"""Coding agents, as their makers distribute them, edit a file with the answers of a scripted model.

Each is skipped unless it is installed: on the path, in `agents/node_modules/.bin` or in `aider/bin` of the folder of clients.
The guide on coding agents has the same settings.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.coding_agents import MODELS, Call, shared_prefix
from helpers.live_server import MODEL

from windlass.engine.interface.request import EngineRequest

CLIENTS = Path(os.environ.get("WINDLASS_OUTSIDE", Path(__file__).parents[2] / "work" / "outside")).absolute()
PATH = os.pathsep.join(
    [str(CLIENTS / "agents" / "node_modules" / ".bin"), str(CLIENTS / "aider" / "bin"), os.environ["PATH"]]
)
TASK = "Add a function sub(a, b) to calc.py that returns a - b."
ADD = "def add(a, b):\n    return a + b\n"
SUB = "\n\ndef sub(a, b):\n    return a - b\n"
EDIT = f"calc.py\n```\n<<<<<<< SEARCH\n{ADD}=======\n{ADD}{SUB}>>>>>>> REPLACE\n```\n"
Settings = tuple[list[str], dict[str, str], list[Call]]  # command, environment, calls of the model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def claude(url: str, home: Path, folder: Path) -> Settings:
    file = str(folder / "calc.py")
    command = ["claude", "-p", TASK, "--tools", "Bash,Read,Edit,Write", "--allowedTools", "Bash,Read,Edit,Write"]
    variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": MODEL}
    edit = {"file_path": file, "old_string": ADD, "new_string": ADD + SUB}
    return (
        command,
        {**variables, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        [("Bash", {"command": "ls", "description": "List files"}), ("Read", {"file_path": file}), ("Edit", edit)],
    )


def codex(url: str, home: Path, folder: Path) -> Settings:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "windlass"\n\n[model_providers.windlass]\nname = "Windlass"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    commands = ["ls", "cat calc.py", f"cat >> calc.py <<'END'\n{SUB}END"]
    return (
        ["codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", TASK],
        {},
        [("exec_command", {"cmd": command}) for command in commands],
    )


def opencode(url: str, home: Path, folder: Path) -> Settings:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Windlass",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 32768, "output": 4096}}},
    }
    config = {"provider": {"windlass": provider}, "model": f"windlass/{MODEL}", "small_model": f"windlass/{MODEL}"}
    (home / ".config" / "opencode").mkdir(parents=True)
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps({**config, "autoupdate": False}))
    file = str(folder / "calc.py")
    edit = {"filePath": file, "oldString": ADD, "newString": ADD + SUB}
    return (
        ["opencode", "run", "--auto", TASK],
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        [("bash", {"command": "ls", "description": "List files"}), ("read", {"filePath": file}), ("edit", edit)],
    )


def qwen(url: str, home: Path, folder: Path) -> Settings:
    file = str(folder / "calc.py")
    edit = {"file_path": file, "old_string": ADD, "new_string": ADD + SUB}
    return (
        ["qwen", "-p", TASK, "--yolo"],
        {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
        [("list_directory", {"path": str(folder)}), ("read_file", {"file_path": file}), ("edit", edit)],
    )


def aider(url: str, home: Path, folder: Path) -> Settings:
    options = ["--edit-format", "diff", "--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings"]
    command = ["aider", "--model", f"openai/{MODEL}", "--message", TASK, *options, "--analytics-disable", "calc.py"]
    return command, {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}, []


@pytest.mark.parametrize("model", ["qwen3", "mistral3", "gpt_oss"])
@pytest.mark.parametrize("program", [claude, codex, opencode, qwen, aider], ids=lambda program: program.__name__)
def test_a_task_is_done_in_turns_that_find_the_prompt_in_the_cache(
    program: Callable[[str, Path, Path], Settings], model: str, tmp_path: Path
) -> None:
    if shutil.which(program.__name__, path=PATH) is None:
        pytest.skip(f"{program.__name__} is not installed")
    home, folder = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    folder.mkdir()
    (folder / "calc.py").write_text(ADD)
    kind = MODELS[model]
    with kind.serve() as live:
        command, variables, calls = program(live.url, home, folder)
        final = (
            "The function is there."
            if calls
            else f"calc.py\n```\n<<<<<<< SEARCH\n{ADD}=======\n{ADD}{SUB}>>>>>>> REPLACE\n```\n"
        )

        def answer(request: EngineRequest) -> list[int]:
            """The call after as many results as the prompt has."""
            prompt = live.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            done = prompt.count(kind.result)
            text = (
                kind.write("I think.", "I go on.", calls[done])
                if done < len(calls)
                else kind.write("Done.", final, None)
            )
            return live.tokenizer.encode(text, add_special_tokens=False)

        live.engine.answer = answer
        environment = {"HOME": str(home), "PATH": PATH, **variables}
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        prompts = [request.prompt_token_ids for request in live.engine.requests]
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "calc.py").read_text() == ADD + SUB
    longest = max(map(len, prompts))
    turns = [prompt for prompt in prompts if len(prompt) > longest / 2]  # without those for a title
    if calls:
        assert "The function is there." in done.stdout
        assert len(turns) == len(calls) + 1
        assert all(shared_prefix(before, after) >= 0.95 for before, after in itertools.pairwise(turns))
