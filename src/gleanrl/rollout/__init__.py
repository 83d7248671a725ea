"""One episode: how a conversation becomes tokens, tool calls, thinking."""
