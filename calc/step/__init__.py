"""One step of training: roles on their GPUs, phases, and the instants that can be a peak."""
