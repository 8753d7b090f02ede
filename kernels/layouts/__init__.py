"""How pages and weights lie in memory."""
