"""Other systems' formats and services."""
