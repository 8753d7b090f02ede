"""Programs are started before those in front of them have ended: each has to wait for them before it does anything."""

from __future__ import annotations

import ast
from pathlib import Path

from windlass import kernels

FOLDER = Path(kernels.__file__).parent / "triton"


def test_every_program_that_is_launched_waits_first() -> None:
    launched = {
        ast.unparse(call.args[0]).rpartition(".")[2]
        for file in FOLDER.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "launch" and call.args
    } - {"program"}  # `_by_row` and `_by_head` pass one on
    started, waiting = set[str](), set[str]()
    for file in FOLDER.glob("*.py"):
        for found in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(found, ast.FunctionDef):
                started.add(found.name)
                body = [line for line in found.body if not isinstance(getattr(line, "value", None), ast.Constant)]
                if body and ast.unparse(body[0]) == "wait_for_predecessor()":
                    waiting.add(found.name)
    assert len(launched) > 12 and launched <= started
    assert launched <= waiting
    names = [
        "activation",
        "clamped_glu",
        "gate_by_sigmoid",
        "soft_cap",
        "sum_of_experts",
        "gated_delta_rule",
        "state_space",
    ]
    assert {f"{name}_kernel" for name in names} <= waiting
