"""The HTTP server and its command line.

Each package imports only from those below it: cli, startup, application, openapi, api, serving, app and http, observability and
text, schemas, config, errors.
"""
