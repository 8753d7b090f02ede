"""From options to a listening server, what a person sees meanwhile, and its end."""
