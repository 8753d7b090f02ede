"""`windlass chat`: a conversation on the terminal, with a server of its own or one that runs already."""
