"""The real loop on a virtual clock."""
