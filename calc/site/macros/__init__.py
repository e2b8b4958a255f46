"""What pages may ask for, and what surrounds it."""
