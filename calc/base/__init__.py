"""What everything else is said in: units, the ledger, reading of files, and the terms of a plan."""
