"""Parts of a reply as LangChain's chunks, which add up to its message."""

from __future__ import annotations

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk

from langchain_locret.messages import RECEIPT, WARNINGS, as_argument
from locret_stream.conversation.parts import Call, End, Part


def chunk_of(part: Part | End) -> AIMessageChunk:
    """The chunk of a part; for the end of an answer the last one, with usage and receipt."""
    if isinstance(part, Part):
        beside = {"reasoning_content": part.reasoning} if part.reasoning else {}
        return AIMessageChunk(content=part.text, additional_kwargs=beside,
                              tool_call_chunks=[_call(call) for call in part.calls])
    usage = UsageMetadata(input_tokens=part.prompt, output_tokens=part.sampled,
                          total_tokens=part.prompt + part.sampled,
                          input_token_details=InputTokenDetails(cache_read=part.cached))
    if part.reasoning:
        usage["output_token_details"] = OutputTokenDetails(reasoning=part.reasoning)
    return AIMessageChunk(content="", chunk_position="last", usage_metadata=usage, response_metadata={
        RECEIPT: part.receipt, "finish_reason": part.finish, WARNINGS: part.warnings})


def _call(call: Call) -> ToolCallChunk:
    arguments = as_argument(call.arguments) if call.name is None else call.arguments
    return tool_call_chunk(name=call.name, args=arguments, id=call.id, index=call.index)
