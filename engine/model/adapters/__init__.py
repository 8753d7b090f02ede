"""Low-rank adapters (LoRA, 2106.09685): which are loaded, and what they add to the rows of a step."""
