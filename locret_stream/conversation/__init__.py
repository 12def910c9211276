"""Conversations over a memory: messages in, what is new of them fed, an answer out. Both faces for agents, LangChain's
and the server, are built on it.

Its modules are imported by name: `messages`, `parts`, `tool_prompt` and `request` load no torch.
"""
