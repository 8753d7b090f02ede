"""The HTTP server and its command line.

Each room imports from those below it alone: cli, startup, app, routes, answers, generation, exchange, text, protocol and
http, errors, options.
"""
