"""How an episode is played, and how it becomes tokens.

`player` plays an episode; `context` holds its conversation; `renderer` turns messages into tokens and back;
`tool_calls` and `thinking` read calls and thoughts; `conversation` reads a finished trajectory.
"""
