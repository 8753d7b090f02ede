"""What an operator may set: the options as they are spelt, and what they become."""
