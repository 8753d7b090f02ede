"""`windlass replay`: repeats what a server has recorded, and compares the answers where their tokens are known."""
