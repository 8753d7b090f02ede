"""One generation: from a request's prompt to the engine, and its outputs back to the client."""
