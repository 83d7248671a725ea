"""Scheduling: when groups may start, which step consumes them, and which work may use a shared device."""
