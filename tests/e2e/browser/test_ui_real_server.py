"""The page in a real browser, before a real engine: what it draws is what that engine computes for a request alone."""

from __future__ import annotations

import math
from itertools import pairwise

import httpx
import pytest
from helpers.browser import Seen, chromium
from helpers.real_server import serve
from playwright.sync_api import expect

TEXT = "The wind rose, and the old sailor told the children about the storm. " * 24
SCALINGS = {
    "the server's own": None,
    "YaRN, factor 4": {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1},
    "Linear, factor 4": {"rope_type": "linear", "factor": 4},
    "NTK-aware, factor 4": {"rope_type": "ntk", "factor": 4},
}


@pytest.mark.slow
def test_a_sweep_of_several_scalings_is_what_each_request_alone_gives() -> None:
    with serve() as server, chromium() as browser:
        ids = httpx.post(f"{server.url}/tokenize", json={"prompt": TEXT}).json()["tokens"]
        assert len(ids) > 256

        seen = Seen(browser, server, "/#rotary")
        page = seen.page
        for name in ("Linear, factor 4", "NTK-aware, factor 4"):
            page.get_by_role("button", name=name, exact=True).click()
        page.get_by_label("Text, up to 4,096 tokens").fill(TEXT)
        page.get_by_role("button", name="Run the sweep").click()
        expect(page.get_by_role("button", name="Run the sweep")).to_be_visible(timeout=60_000)
        shown = dict(text.split(": perplexity ") for text in page.locator(".totals span").all_inner_texts())
        assert list(shown) == list(SCALINGS)

        # The last length of each part is scored behind the one before: 128, 256, … and the whole.
        bounds = [0, *(length for length in (128, 256, 512, 1024) if length < len(ids)), len(ids)]
        for name, scaling in SCALINGS.items():
            surprise: list[float] = []
            for begin, end in pairwise(bounds):
                body = {"prompt": ids[:end], "max_tokens": 0, "echo": True, "logprobs": 0}
                answer = httpx.post(
                    f"{server.url}/v1/completions",
                    json=body | ({"rope_scaling": scaling} if scaling else {}),
                    timeout=60,
                ).json()
                surprise += [-p for p in answer["choices"][0]["logprobs"]["token_logprobs"][begin:] if p is not None]
            assert float(shown[name]) == pytest.approx(math.exp(sum(surprise) / len(surprise)), rel=2e-3), name
        assert len(set(shown.values())) == len(SCALINGS)
        seen.done(page.get_by_role("button", name="Run the sweep"))
