"""Agents that own their loop: the endpoint that answers their model calls, and the environment that runs them."""
