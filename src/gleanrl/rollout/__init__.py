"""Plays episodes, and turns their conversations into tokens.

`player` plays an episode, and `context` holds its conversation. `renderer` turns messages into tokens and back.
`tool_calls` and `thinking` read calls and thoughts. `conversation` reads a finished trajectory.
"""
