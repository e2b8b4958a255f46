"""The plan of each framework's memory, by version: defaults, loss paths, engines. No byte is counted here."""
