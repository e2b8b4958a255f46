"""Tables of the catalog and of releases."""
