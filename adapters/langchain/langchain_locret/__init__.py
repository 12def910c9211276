"""LangChain on a locret_stream memory. Not there yet: `LocretChatModel` and the session middleware are planned.

The package holds its place in the distribution, so that `locret-stream[langchain]` installs under its final name.
Until then, use `locret_stream` directly.
"""

__all__: list[str] = []
