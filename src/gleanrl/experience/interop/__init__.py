"""Interfaces to other systems: tensor batches of verl and AgentEvolver, and the ReMe memory service."""
