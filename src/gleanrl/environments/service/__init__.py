"""Environments over HTTP: a server for any taskset, and a taskset whose environments live behind one.

``gleanrl serve-env`` is `gleanrl.environments.service.server`; ``environment.name = "service"`` is
`gleanrl.environments.service.client`. Only the server needs FastAPI and uvicorn.
"""
