"""What may start when, what is consumed when, and who has the device."""
