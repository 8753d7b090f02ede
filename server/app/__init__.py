"""Application state, authentication, limits, middleware, request bodies, and the pages for browsers."""
