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
    "paged_attention_kernel", "merge_splits_kernel", "rotate_and_append_kernel", "rerotate_keys_kernel", "rotate_queries_kernel",
    "rms_norm_kernel", "layer_norm_kernel", "activation_kernel", "clamped_glu_kernel", "gate_by_sigmoid_kernel",
    "soft_cap_kernel", "sum_of_experts_kernel", "matmul_kernel", "embed_blocks_kernel", "gemv_kernel", "route_kernel",
    "by_expert_kernel", "grouped_gemm_kernel", "partial_maxima_kernel", "row_maxima_kernel", "log_sums_kernel",
    "adjust_logits_kernel", "begin_sampling_kernel", "radix_select_kernel", "sample_tokens_kernel", "short_convolution_kernel",
    "store_conv_window_kernel", "gated_delta_rule_kernel", "state_space_kernel", "low_rank_down_by_row_kernel",
    "low_rank_up_by_row_kernel", "low_rank_down_kernel", "low_rank_up_kernel",
}  # fmt: skip
OF_HOPPER = {"gather_kv_kernel", "prefill_attention_kernel"}


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
