"""Engine core: the step loop, its process, the messages between processes, memory budgeting and ranks."""
