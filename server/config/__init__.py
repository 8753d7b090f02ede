"""Options of the commands, settings of the server, rotary profiles and API keys."""
