"""A job as its user says it: the fields, and which of them go together."""
