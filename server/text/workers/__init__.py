"""Text work in processes that can be killed: the pool, its concurrency limits, the fork server and the worker."""
