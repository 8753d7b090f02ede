"""The formats in which models write calls, one module each: how a call is read, and how one is forced."""
