"""LangChain on a locret_stream memory: threads that never end, in a fixed amount of memory."""

from langchain_locret.chat_model import LocretChatModel
from langchain_locret.thread import LateWarning, RebuildWarning, StateLost, ToolsWarning

__all__ = ["LateWarning", "LocretChatModel", "RebuildWarning", "StateLost", "ToolsWarning"]
