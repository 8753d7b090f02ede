"""What an operator may set: options as they are spelt, the settings that become of them, and names of the engine's fields."""
