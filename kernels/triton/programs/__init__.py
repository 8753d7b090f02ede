"""What runs on the device: Triton programs. Each module's neighbour one folder up makes their arguments and launches them."""
