"""The description of the API for machines, `/openapi.json`, and the pages that show it."""
