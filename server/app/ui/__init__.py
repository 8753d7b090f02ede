"""The page at `/`, on which a person tries the model, and the sending of the package's own files."""
