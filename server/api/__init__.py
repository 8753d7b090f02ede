"""The HTTP API: one module per API with its routes and its rendering."""
