"""Engine client: supervised engine processes behind an asyncio interface, without torch."""
