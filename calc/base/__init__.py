"""Terms that all other packages share: units, the ledger, reading of files, and the terms of a plan."""
