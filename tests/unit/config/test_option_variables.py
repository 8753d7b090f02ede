"""Environment variables of options."""

from __future__ import annotations

from typer.main import get_command

from windlass.server.cli import main as cli


def test_the_variable_of_an_option_has_its_name() -> None:
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    options = {name: p.envvar for p in command.params for name in p.opts if name.startswith("--") and p.envvar}
    assert len(options) > 25
    for name, variable in options.items():
        assert variable == "WINDLASS_" + name.removeprefix("--").replace("-", "_").upper()
