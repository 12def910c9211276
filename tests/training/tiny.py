"""A tokenizer and chat templates small enough to check by eye, and random examples for the random models."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from locret_stream.training import Example

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = (
    "{{ '<|im_start|>' }}{% for m in messages %}{{ m.role + ': ' + m.content | trim + '<|im_end|>' }}{% endfor %}"
)
THINKING = (  # like Qwen3: the last reply gets an empty thought in front, earlier ones do not
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
)
BARE = "{% for m in messages %}{{ m.role + '=' + m.content }}{% endfor %}"
SHOUTING = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}<|im_end|>{% endfor %}"
STRICT = CHATML.replace("<|im_start|>", "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
                        "<|im_start|>", 1)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level with a few merges that cross what a template writes and what is said."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), (".", "Ċ"), (":", "Ġ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<eos>")])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    made.chat_template = CHATML
    return made


def make_examples(count: int, length: int = 48, seed: int = 0, vocab: int = 401) -> list[Example]:
    """Two replies each, ids of the models of `tests.architectures`."""
    noise = torch.Generator().manual_seed(seed)
    spans = ((length // 2, length // 2 + 3), (length - 5, length))
    return [Example(torch.randint(3, vocab, (length,), generator=noise), spans) for _ in range(count)]
