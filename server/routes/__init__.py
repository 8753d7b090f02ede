"""One module per family of endpoints. A route reads its body, has the rooms below do the work, and declares what
the API's description says of it."""
