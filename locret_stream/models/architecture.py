"""What a model's config says of what it computes, told apart from what it says besides. Knows configs of transformers;
knows no weights.

Versions of transformers add fields and drop fields, and the model stays the same. So what is stored is each field with
its value, and whether it is as usual: `snapshot.identity.first_difference` compares two of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_NAMES = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
          "_attn_implementation", "attn_implementation")
_UNCOMPUTED = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "output_attentions",
               "output_hidden_states", "return_dict", "return_dict_in_generate", "problem_type", "id2label", "label2id",
               "num_labels", "initializer_range", "task_specific_params", "tokenizer_class", "prefix",
               "finetuning_task")


def architecture(config: Any) -> str:
    """The config as JSON, without names and what a run chooses: what earlier libraries took the digest of. Another
    version of transformers may have other fields."""
    return _written(_without(config.to_dict(), _NAMES))


def settings(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that say what the model computes, and all that a config of its kind has where nobody sets any."""
    return _without(config.to_dict(), _NAMES + _UNCOMPUTED), _usual(config)


def is_earlier(config: Any, digest: str, digest_of: Callable[[str], str]) -> bool:
    """Whether that is the digest of `architecture`, as this version of transformers has it, or one that did not know up
    to two fields which are as usual here."""
    fields, usual = _without(config.to_dict(), _NAMES), _usual(config)
    unset = [name for name, value in fields.items() if name in usual and usual[name] == value]
    return any(digest == digest_of(_written(_without(fields, names)))
               for count in range(3) for names in itertools.combinations(unset, count))


def _usual(config: Any) -> dict[str, Any]:
    try:
        return dict(type(config)().to_dict())
    except Exception:  # some kinds cannot be made without fields
        return {}


def _written(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, default=str)


def _without(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    fields = {name: value for name, value in config.items() if name not in names}
    if isinstance(fields.get("quantization_config"), dict):  # gguf_file is only a file's name
        fields["quantization_config"] = {name: value for name, value in fields["quantization_config"].items()
                                         if name != "gguf_file"}
    return fields
