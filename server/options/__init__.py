"""What an operator may set: options as they are spelt, the settings they become, and the names of the engine's fields."""
