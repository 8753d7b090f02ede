"""Text work in processes that can be killed: the pool, its lanes, the fork server and the worker."""
