"""Full KV blocks kept in files, so that prefixes and passages outlive the process that computed them.

A block is a file of its own, named by its digest, which stands for all that its keys and values depend on. Two threads do all
that touches the disk; the engine's thread only puts books in order. `store` is what others see.
"""
