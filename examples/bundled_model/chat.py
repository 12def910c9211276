"""The bundled model's tokenizer and chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>"]

CHAT_TEMPLATE = """\
{%- set turns = messages -%}
{%- set system = none -%}
{%- if messages and messages[0].role == 'system' -%}
  {%- set system = messages[0].content -%}
  {%- set turns = messages[1:] -%}
{%- endif -%}
{%- if system is not none or tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if system is not none -%}{{- system -}}{%- endif -%}
  {%- if tools -%}
    {%- if system is not none -%}{{- '\\n\\n' -}}{%- endif -%}
    {{- 'Tools:\\n' -}}
    {%- for tool in tools -%}
      {{- (tool.function if tool.function is defined else tool) | tojson -}}{{- '\\n' -}}
    {%- endfor -%}
    {{- 'To call one, reply with <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.content -%}{{- message.content -}}{%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {%- set function = call.function if call.function is defined else call -%}
    {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
    {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
    {%- set arguments = function.arguments -%}
    {{- arguments if arguments is string else arguments | tojson -}}
    {{- '}\\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE in which every digit is a token; the added tokens are the last ids of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return tokenizer


def segments(text: str) -> list[str]:
    """`text` cut as a stream is: after a run of newlines, else before whitespace past 1,024 characters."""
    out = []
    for line in re.findall(r"[^\n]*\n+|[^\n]+", text):
        while len(line) > 1024:
            blank = re.compile(r"\s").search(line, 1024)
            cut = blank.start() if blank and blank.start() < 4096 else 4096
            if cut >= len(line):
                break
            out.append(line[:cut])
            line = line[cut:]
        out.append(line)
    return out


def save_tokenizer(tokenizer: Tokenizer, folder: Path, window: int) -> None:
    """`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, as AutoTokenizer reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "model_max_length": window,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
