"""From what a user says to a whole scenario: defaults are filled in, and what cannot run is refused."""
