"""Triton programs compile for GPUs that are not present, fit into their memory, and wait for earlier programs first."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.device import ON_A_CPU

from windlass import kernels

TESTS = Path(__file__).parents[2]
LINE = re.compile(r"sm_\d+ (\w+) shared (\d+) registers \d+ spilled (\d+) .*; (\d*)")
# Bytes per thread. Tiles that are too large spill ten thousand. Rows of 576 float8 numbers (latent attention) spill more.
MOST_SPILLED, MOST_SPILLED_OF_LATENTS = 400, 900
NAMES = {
    "paged_attention_kernel", "merge_splits_kernel", "rotate_and_append_kernel", "rerotate_keys_kernel", "rotate_queries_kernel",
    "rms_norm_kernel", "layer_norm_kernel", "activation_kernel", "clamped_glu_kernel", "gate_by_sigmoid_kernel",
    "soft_cap_kernel", "sum_of_experts_kernel", "matmul_kernel", "embed_blocks_kernel", "gemv_kernel", "route_kernel",
    "by_expert_kernel", "grouped_gemm_kernel", "partial_maxima_kernel", "row_maxima_kernel", "log_sums_kernel",
    "adjust_logits_kernel", "begin_sampling_kernel", "radix_select_kernel", "sample_tokens_kernel", "short_convolution_kernel",
    "store_conv_window_kernel", "gated_delta_rule_kernel", "state_space_kernel", "low_rank_down_by_row_kernel",
    "low_rank_up_by_row_kernel", "low_rank_down_kernel", "low_rank_up_kernel",
}  # fmt: skip
OF_HOPPER = {"gather_kv_kernel", "prefill_attention_kernel"}
FOLDER = Path(kernels.__file__).parent / "triton"


pytest.importorskip("triton", reason="needs Triton: pip install --no-deps 'triton>=3.6,<3.9'")


@ON_A_CPU
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("capability", "shared", "every"),
    [
        pytest.param(86, 99 << 10, 16, marks=pytest.mark.slow),
        # The smallest shared memory with the tensor instructions of 8.0, and Hopper.
        pytest.param(86, 99 << 10, 1, marks=pytest.mark.soak),
        pytest.param(90, 227 << 10, 1, marks=pytest.mark.soak),
    ],
)
def test_programs_compile_for(capability: int, shared: int, every: int, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", TESTS / "helpers" / "compiling.py", str(capability), str(every)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert found.returncode == 0, found.stderr
    programs = LINE.findall(found.stdout)
    assert {name for name, *_ in programs} == (NAMES | OF_HOPPER if capability == 90 else NAMES)
    assert max(int(taken) for _, taken, _, _ in programs) <= shared
    for name, _, spilled, dim in programs:
        assert int(spilled) <= (MOST_SPILLED_OF_LATENTS if dim == "576" else MOST_SPILLED), (name, dim)


def test_launched_programs_wait_for_their_predecessor() -> None:
    launched = {
        ast.unparse(call.args[0]).rpartition(".")[2]
        for file in FOLDER.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "launch" and call.args
    } - {"program"}  # a parameter of `_by_row` and `_by_head`
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
