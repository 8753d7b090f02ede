"""The command line of load tests: `windlass-bench`, which the server's own command has as `windlass bench`."""
