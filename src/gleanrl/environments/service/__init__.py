"""Environments over HTTP: a server for any taskset, and a taskset whose environments run in such a server.

``gleanrl serve-env`` is `gleanrl.environments.service.server`; ``environment.name = "service"`` is
`gleanrl.environments.service.client`. Only the server needs FastAPI and uvicorn.
"""
