"""The engine as a whole: the core that takes a step, the loop around it, its process and the messages between processes."""
