"""Environments over HTTP: a server for any taskset, and a taskset whose environments run in such a server.

`gleanrl.environments.service.server` implements the command ``gleanrl serve-env``, and
`gleanrl.environments.service.client` the environment ``service`` of the settings. Only the server needs FastAPI and
uvicorn.
"""
