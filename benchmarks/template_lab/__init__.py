"""The parts of `benchmarks/templates.py`: chat templates of other people's models, and what sessions do with them.

The order: `collection`, `forms` · `scripted` · `verdicts` · `talking` · `chats`, `tool_loops`, `chains`, `rendering` ·
`going_on`. Nothing here knows a template by its name.
"""
