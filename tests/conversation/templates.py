# ruff: noqa: E501
"""Chat templates of our own wording, each with a property that published ones have."""

from __future__ import annotations

GEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
EACH = "{% for m in messages %}"
END = "{% endfor %}"
CHATML = EACH + TURN + END + GEN
TOOLS = ("{% if tools %}{{ '<|im_start|>system\\nFunctions:' }}{% for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}"
         "{{ '<|im_end|>\\n' }}{% endif %}")
CALLS = ("{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}")
SAID = "{{ '<|im_start|>' + m.role + '\\n' + m.content }}" + CALLS + "{{ '<|im_end|>\\n' }}"
ALTERNATE = ("{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('one after the other, please') }}"
             "{% endif %}")

TEMPLATES = {
    "plain": CHATML,
    # As Mistral and Llama 2: no generation prompt at all, and user and assistant in turn.
    "no prompt": "{{ bos_token }}" + EACH + ALTERNATE + "{% if m.role == 'user' %}{{ '[ASK] ' + m.content + ' [/ASK]' }}"
                 "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}" + END,
    # As Gemma 2: no system role, user and assistant in turn, white space trimmed.
    "in turn": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system texts') }}{% endif %}"
               + EACH + ALTERNATE + TURN.replace("m.content", "m.content | trim") + END + GEN,
    # As Gemma 3: the system text stands in the first user's turn.
    "system in turn": "{% if messages[0].role == 'system' %}{% set top = messages[0].content + '\\n\\n' %}"
                      "{% set rest = messages[1:] %}{% else %}{% set top = '' %}{% set rest = messages %}{% endif %}"
                      + EACH.replace("messages", "rest") + ALTERNATE
                      + TURN.replace("m.content", "(top if loop.first else '') + m.content") + END + GEN,
    # As Phi-3: without a prompt it writes an end marker instead.
    "end instead": EACH + TURN + END + GEN.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}"),
    # As Phi-3 14B and Yi: the prompt comes whether it is asked for or not.
    "prompt always": EACH + TURN + END + "{{ '<|im_start|>assistant\\n' }}",
    # As Command R: behind the conversation it says once more how to answer.
    "reminder": EACH + TURN + END + "{{ '<|im_start|>system\\nAnswer shortly.<|im_end|>\\n' }}" + GEN,
    # As SmolLM3 and Granite 3: tools are shown, and calls are not.
    "no calls": TOOLS + EACH + TURN + END + GEN,
    # As Qwen 2.5.
    "calls": TOOLS + EACH + SAID + END + GEN,
    # As Llama 3.1: one call an answer.
    "one call": TOOLS + EACH + "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}"
                "{% endif %}" + SAID + END + GEN,
    # As gpt-oss: of several calls the first is shown, results only behind a call, and an answer ends otherwise once
    # something follows.
    "first call": TOOLS + "{% set ns = namespace(called=false) %}" + EACH
                  + "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call ahead') }}{% endif %}"
                  "{% set ns.called = m.role == 'tool' or (m.tool_calls or []) | length > 0 %}"
                  "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
                  + CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
                  + "{{ eos_token if loop.last and m.role == 'assistant' else '<|endoftext|>' }}" + END + GEN,
    # As gpt-oss: a call ends with a mark of its own, and its result tells its name once more.
    "named results": TOOLS + "{% set ns = namespace(name='') %}" + EACH + "{% if m.role == 'tool' %}"
                     "{{ '<|im_start|>' + ns.name + ' to assistant\\n' + m.content + '<|im_end|>\\n' }}{% else %}"
                     "{% for c in m.tool_calls or [] %}{% set ns.name = c.function.name %}{% endfor %}"
                     + SAID.replace("'<|im_end|>\\n'", "(eos_token if m.tool_calls else '<|endoftext|>') + '\\n'")
                     + "{% endif %}" + END + GEN,
    # As Kimi K2: a call is named by its id.
    "names by id": TOOLS + EACH + SAID.replace(
        "(c.function | tojson)", "c.id + ' ' + (c.function.arguments | tojson)") + END + GEN,
    # As Qwen 3.5: one system text, at the beginning, and somebody must have asked.
    "system first": EACH + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system goes first') }}"
                    "{% endif %}" + TURN + END + "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
                    "{{ raise_exception('nobody asks') }}{% endif %}" + GEN,
    # As DeepSeek: system texts are gathered at the beginning, wherever they stand.
    "systems gathered": EACH + "{% if m.role == 'system' %}{{ m.content }}{% endif %}" + END
                        + EACH + "{% if m.role != 'system' %}" + TURN + "{% endif %}" + END + GEN,
    # As Llama 2 conversions that leave the system text out.
    "system left out": EACH + "{% if m.role != 'system' %}" + TURN + "{% endif %}" + END + GEN,
    # As GLM-4: nothing closes an answer.
    "unclosed": EACH + "{{ '<|im_start|>' + m.role + '\\n' + m.content }}" + END + GEN,
    # As Qwen 3.5 and R1: the prompt begins a thought.
    "opened thought": EACH + TURN + END + GEN.replace("assistant\\n", "assistant\\n<think>\\n"),
    # As R1: thoughts of earlier answers are taken out of their texts.
    "thoughts out": EACH + TURN.replace("m.content", "m.content.split('</think>')[-1]") + END + GEN,
    # As SmolLM3: a flag in the system text decides, and is not shown.
    "flag": EACH + "{% if m.role == 'system' %}{{ '<|im_start|>system\\n' + m.content.replace('/quiet', '').rstrip() "
            "+ '<|im_end|>\\n' }}{% else %}" + TURN + "{% endif %}" + END + GEN.replace(
                "{% endif %}", "{% if messages[0].role == 'system' and '/quiet' in messages[0].content %}"
                "{{ '<think>\\n\\n</think>\\n' }}{% endif %}{% endif %}"),
    # As Hermes 2 Pro: it goes through the tools without asking whether there are any.
    "wants tools": "{{ '<|im_start|>system\\nFunctions:' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
                   "{{ '<|im_end|>\\n' }}" + EACH + TURN + END + GEN,
    # As Llama 3.2.
    "date": "{{ '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '.<|im_end|>\\n' }}" + CHATML,
}
