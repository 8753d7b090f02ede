"""The processes of the ranks of one model: the first, which is the engine, starts the others and tells them what to compute."""
