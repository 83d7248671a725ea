"""Scheduling: when groups may start, which step consumes them, and which work has the device."""
