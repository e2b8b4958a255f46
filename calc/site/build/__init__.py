"""From the data to a finished site."""
