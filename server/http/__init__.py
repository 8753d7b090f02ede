"""The HTTP side's connections: who is let in, how long each may keep the server waiting, how all of them end."""
