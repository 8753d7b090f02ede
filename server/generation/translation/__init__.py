"""Bodies of other APIs made into those of chats. Knows bodies only."""
