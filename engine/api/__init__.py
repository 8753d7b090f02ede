"""What goes in and out of the engine: requests, outputs, configuration. Plain data without torch."""
