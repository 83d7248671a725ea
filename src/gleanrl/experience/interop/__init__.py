"""Exchange of experience with the formats and services of other systems."""
