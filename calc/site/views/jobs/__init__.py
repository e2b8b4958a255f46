"""Tables of jobs."""
