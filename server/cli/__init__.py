"""The command line: `windlass serve`, `generate`, `bench`, `rope`."""
