"""The application around the endpoints: authentication, bounds of a body, errors, state, streams, metrics."""
