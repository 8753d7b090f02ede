"""Bodies and answers of `/v1/messages`."""
