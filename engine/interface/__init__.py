"""Engine interface: requests, outputs, configuration and validation. Plain data without torch."""
