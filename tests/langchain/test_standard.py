"""LangChain's own standard suites, none of their tests overridden or left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_locret import LocretChatModel
from tests.langchain.support import runtime, scripted, thread


class _Scripted:
    @pytest.fixture(autouse=True)
    def _engine(self, tmp_path) -> Iterator[None]:
        with scripted() as self.script:
            self.runtime = runtime(tmp_path)
            yield
            LocretChatModel(**self.chat_model_params).close()

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return LocretChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted", "runtime": getattr(self, "runtime", None)}


class TestUnit(_Scripted, ChatModelUnitTests):
    pass


class TestIntegration(_Scripted, ChatModelIntegrationTests):
    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model, config = LocretChatModel(**self.chat_model_params), thread("standard")
        history = [HumanMessage("hello")]
        history += [model.invoke(history, config), HumanMessage("again")]
        if not stream:
            return model.invoke(history, config)
        chunks = list(model.stream(history, config))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        return whole


class TestBundledUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return LocretChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "bundled"}


class TestBundledText(ChatModelIntegrationTests):
    """What a text model without tools should pass, on the model that comes with the library."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return LocretChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "bundled", "max_tokens": 16}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False
