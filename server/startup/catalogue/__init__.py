"""Models that have a name of their own: what is known of them, where they are kept, and how one is had. Loads none."""
