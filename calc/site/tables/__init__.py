"""Tables and charts, whatever they show."""
