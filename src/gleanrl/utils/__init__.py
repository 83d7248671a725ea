"""Small tools that every room may use; nothing here knows of the others."""
