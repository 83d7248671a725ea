"""Plays episodes, and converts their conversations to tokens.

`player` plays an episode, and `context` stores its conversation. `renderer` converts messages to tokens, and sampled
tokens to messages. `tool_calls` and `thinking` parse tool calls and thoughts in the model's text. `conversation`
converts a finished trajectory to messages or to readable text.
"""
