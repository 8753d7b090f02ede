"""What a model still does with a long context under each scaling: generated tasks, asked and told apart."""
