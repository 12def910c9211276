# ruff: noqa: E501
"""Chat templates with tools as published models have them: where they put tools, results, reasoning and ids."""

from __future__ import annotations

from tests.langchain.support import BUNDLED
from tests.tiny_tokenizers import MARKS

CHATML = (BUNDLED / "chat_template.jinja").read_text()

# As Llama 3.1: tools in the first user turn, results as JSON, one call at a time and no text beside it.
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\n\\n' }}{{- system_message }}{{- '<|eot_id|>' }}
{%- if tools %}{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# As Mistral v0.3: tools before the newest user turn, ids of nine letters and digits, calls as one list.
MISTRAL = """{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}{{- bos_token }}
{%- for message in turns %}{%- if message.role == 'user' %}
{%- if tools and message == asked[-1] %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- if loop.last and messages[0].role == 'system' %}{{- '[INST] ' + messages[0].content + '\\n\\n' }}{{- message.content }}
{%- else %}{{- '[INST] ' + message.content }}{%- endif %}{{- '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- else %}{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"""

# As Qwen 3: past reasoning is taken out, a newest answer is given an empty one, results are user turns.
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(seeking=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}{%- set at = messages | length - 1 - loop.index0 %}
{%- if ns.seeking and message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.seeking = false %}{%- set ns.last = at %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{%- set reasoning = message.reasoning_content or '' %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN}
TOKENS = (*MARKS, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
          "[INST]", "[/INST]", "<think>", "</think>", "<tool_response>", "</tool_response>")
