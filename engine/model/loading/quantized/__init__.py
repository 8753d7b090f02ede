"""Checkpoints whose weights are quantized already: what each weight is made of, and how to get it into memory."""
