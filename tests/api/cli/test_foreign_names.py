"""Hints for options and commands of other servers."""

from __future__ import annotations

import pytest

from windlass.server.cli import main as cli


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("serve", "--enable-prefix-caching", "here it is --prefix-caching, on by default"),
        ("serve", "--ctx-size", "here it is --max-model-len"),
        ("serve", "-ngl", "a model is on one device: leave it out"),
        ("serve", "-np", "here it is --max-num-seqs"),
        (
            "serve",
            "--temp",
            "here it is a field of a request, temperature; --override-generation-config sets it for those without",
        ),
        ("serve", "--seed", "here it is a field of a request, seed"),
        ("generate", "--temp", "here it is --temperature"),
        ("serve", "-m", "name the model without an option, as in windlass serve MODEL"),
        ("generate", "-m", "here it is --model"),
        ("serve", "--model", "give it without an option, as MODEL"),
        ("top", "--url", "give it without an option, as URL"),
        # similar spelling
        ("serve", "--prot", "did you mean --port?"),
        ("serve", "--disable-prefix-caching", "did you mean --no-prefix-caching?"),
        ("serve", "--enable-ui", "did you mean --ui?"),
        # variables and configuration keys
        ("serve", "--cuda-graphs", "set the environment variable WINDLASS_CUDA_GRAPHS"),
        (
            "serve",
            "--pin-cores",
            "it is a configuration key: write pin-cores in --config FILE, or set WINDLASS_PIN_CORES",
        ),
        ("generate", "--block-size", "it is a configuration key: set WINDLASS_BLOCK_SIZE"),
        # no similar option, or one with the opposite meaning
        ("serve", "--ctx-len", ""),
        ("generate", "--alias", ""),
        ("serve", "--no-kv-persist", ""),
    ],
)
def test_the_hint_of_an_unknown_option(
    command: str, option: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([command, option, "5"]) == 2
    expected = f"error: No such option: {option}{hint and ': '}{hint} (see windlass {command} --help)\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("command", "suggestion"),
    [("run", "windlass chat"), ("list", "windlass models"), ("ls", "windlass models"), ("rm", "remove the file")],
)
def test_the_hint_of_a_command_of_ollama(command: str, suggestion: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "smollm2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: No such command '{command}': ") and error.endswith(" (see windlass --help)\n")
    assert suggestion in error


@pytest.mark.parametrize("words", [["rope", "run"], ["bench", "ls"]])
def test_subcommands_have_no_hint_of_ollama(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2 and "here it is" not in capsys.readouterr().err


def test_a_misspelled_command_has_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["servee"]) == 2 and "Did you mean 'serve'?" in capsys.readouterr().err
