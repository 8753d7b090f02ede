"""From options to a listening server, and its end."""
