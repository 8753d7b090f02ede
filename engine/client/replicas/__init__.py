"""Several engines of one model behind one client: which of them a request goes to, and what they are together."""
