"""Three small tokenizers trained on the standard library's own sources, and six chat templates of the wild.

byte_level   as GPT-2, Llama 3 and Qwen: BPE over bytes
metaspace    as Llama 2, Mistral and Phi-3: BPE over `▁`, bytes as tokens for what it does not know, a prefix space
unigram      as T5 and XGLM: unigram over `▁`, `<unk>` for what it does not know, a prefix space
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

KINDS = ("byte_level", "metaspace", "unigram")
SPECIAL = ("<|im_start|>", "<|im_end|>")
ORDINARY = ("<tool_call>", "</tool_call>", "    ")  # added, not special; the last is white space alone
NAMED = ("<unk>", "<s>", "</s>")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MISTRAL_LATE_SYSTEM = (  # v0.3: the system text stands in the last user turn
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- bos_token }}{%- for message in loop_messages %}{%- if message['role'] == 'user' %}"
    "{%- if loop.last and system_message is defined %}{{- '[INST] ' + system_message + '\\n\\n'"
    " + message['content'] + '[/INST]' }}{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + "
    "'<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (  # reasoning is left out of earlier turns, and an empty one written into the last
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- if m.role != 'assistant' %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- else %}"
    "{%- set content = m.content %}{%- if '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
    "{{- content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>",
         "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|begin_of_text|>")
TEMPLATES = {"chatml": CHATML, "qwen2": QWEN2, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "phi3": PHI3,
             "qwen3": QWEN3, "mistral_late_system": MISTRAL_LATE_SYSTEM}


@functools.cache
def corpus() -> str:
    """About 250 kB of English and code that every Python carries."""
    import argparse
    import asyncio.base_events
    import inspect as inspect_module
    import json.decoder
    import statistics
    import typing

    return "\n".join(map(inspect.getsource, (
        argparse, asyncio.base_events, inspect_module, json.decoder, statistics, typing)))[:250_000]


def train(kind: str, text: str, size: int = 2000) -> Tokenizer:
    """A tokenizer of that kind; the named tokens have ids 0 to 2 inside the model's own vocabulary."""
    lines, named = text.splitlines(keepends=True), list(NAMED)
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                                       r"|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=named, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁\\n]*|[^▁\\n]+|\\n"), "isolated")
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, limit_alphabet=90,
                                      special_tokens=named + [f"<0x{b:02X}>" for b in range(256)])
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=named, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    if kind == "metaspace":  # the pre-tokenizer was for training; and bytes are tokens, not added tokens
        spec = json.loads(tokenizer.to_str())
        spec["pre_tokenizer"] = None
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in NAMED]
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    return tokenizer


def wrap(tokenizer: Tokenizer, *, template: str | None = CHATML, marks: Iterable[str] = (),
         ordinary: Iterable[str] = ORDINARY) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers gives it, with its added tokens and a chat template."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens([*SPECIAL, *marks])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ordinary])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
                                   chat_template=template)


@functools.cache
def trained(kind: str) -> Tokenizer:
    return train(kind, corpus())


def make(kind: str, template: str | None = "chatml") -> PreTrainedTokenizerFast:
    """A fresh tokenizer; `template` is a name of TEMPLATES, or None."""
    return wrap(trained(kind), template=TEMPLATES[template] if template else None, marks=MARKS)
