"""State that requests share: callers, adapters, stored responses, limits; and the pages for browsers."""
