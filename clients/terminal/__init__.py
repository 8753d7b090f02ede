"""What the commands of both distributions share: running one, its options, the files it writes. Knows no command by name."""
