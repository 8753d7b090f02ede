"""Every Triton program compiles for GPUs that are not here, in the shapes that models bring, and fits into what they have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.device import ON_A_CPU

pytest.importorskip("triton", reason="needs Triton: pip install --no-deps 'triton>=3.6,<3.9'")
TESTS = Path(__file__).parents[2]
LINE = re.compile(r"sm_\d+ (\w+) shared (\d+) registers \d+ spilled (\d+) .*; (\d*)")
# Bytes of a thread. Tiles that were too large had ten thousand. Latent attention's rows of 576 numbers have more where they are
# float8.
MOST_SPILLED, MOST_SPILLED_OF_LATENTS = 400, 900
NAMES = {
    "attention", "merge_splits", "rotate_and_append", "rerotate_keys", "rotate_queries", "rms_norm", "layer_norm", "activation",
    "clamped_glu", "gate_by_sigmoid", "soft_cap", "sum_of_experts", "product", "gather_blocks", "thin_product", "route",
    "by_expert", "grouped_product", "maxima_of_parts", "row_maxima", "log_sums", "change_rows", "begin_draws",
    "narrow_draws", "sample_tokens", "short_convolution", "keep_inputs", "gated_delta_rule", "state_space", "low_rank_down_by_row",
    "low_rank_up_by_row", "low_rank_down", "low_rank_up",
}  # fmt: skip
OF_HOPPER = {"bring_in_order", "attention_in_order"}


@ON_A_CPU
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("capability", "shared"),
    [(86, 99 << 10), (90, 227 << 10)],  # with the multiplying instructions of 8.0 and least shared memory; Hopper
)
def test_for(capability: int, shared: int, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", TESTS / "helpers" / "compiling.py", str(capability)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert found.returncode == 0, found.stderr
    programs = LINE.findall(found.stdout)
    assert {name for name, *_ in programs} == (NAMES | OF_HOPPER if capability == 90 else NAMES)
    assert max(int(taken) for _, taken, _, _ in programs) <= shared
    for name, _, spilled, dim in programs:
        assert int(spilled) <= (MOST_SPILLED_OF_LATENTS if dim == "576" else MOST_SPILLED), (name, dim)
