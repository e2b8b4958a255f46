"""A model's tensors, counted exactly from its config."""
