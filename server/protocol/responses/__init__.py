"""Bodies and answers of `/v1/responses`."""
