"""Which classes of transformers count: those that go on with a text, each once, and why the others do not.

A class that is new in transformers counts until it is named here, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from transformers.models.auto import modeling_auto

KINDS = ("causal", "multimodal")


class Counted(NamedTuple):
    """A class that counts, and the type of the config that a tiny model of it is made from."""

    name: str
    model_type: str


_HALF = "is the decoder of an encoder-decoder"
_ENCODER = "is an encoder, with a head for masked or next words"
_SOUND = "writes or reads sound"
_IMAGES = "writes captions, or reads what is printed"
_ELSEWHERE = "is a multimodal model, which is counted as such or, as an old one, not at all"

NOT_COUNTED: dict[str, dict[str, str]] = {
    "causal": {
        _HALF: "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet",
        _ENCODER: "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
                  "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod xlnet",
        "hashes its queries to attend within buckets, and is an experiment of 2020": "reformer",
        _SOUND: "moshi moss_transcribe_diarize musicgen musicgen_melody whisper",
        _IMAGES: "git got_ocr2 trocr",
        "drafts for another model": "gemma4_assistant gemma4_unified_assistant",
        _ELSEWHERE: "fuyu gemma3 gemma3n gemma4 gemma4_unified",
    },
    "multimodal": {
        "answers about or describes an image, mostly as an encoder-decoder":
            "blip blip-2 git instructblip instructblipvideo kosmos-2 kosmos-2.5 pix2struct udop vision-encoder-decoder "
            "florence2",
        "reads what is printed":
            "pp_formulanet pp_chart2table got_ocr2 deepseek_ocr2 unlimited_ocr glm_ocr lighton_ocr paddleocr_vl "
            "minicpm_ocr qianfan_ocr granite_docling",
        "is an encoder-decoder": "t5gemma2",
        "writes by diffusion, not from left to right": "diffusion_gemma",
        "draws as well as writes": "chameleon emu3 janus",
        "is of proteins, of robots, or of a simulated world": "evolla pi0 cosmos3_edge cosmos3_omni",
        "judges an image, with the class of Gemma 3": "shieldgemma2",
        "is another name of the class of GLM-4.6V": "glmga",
        "is of 2023 to 2025, and newer models of its form are counted":
            "fuyu idefics video_llava vipllava perception_lm",
    },
}
"""By reason, the model types that do not count."""

_TYPES_OF = {"LlamaForCausalLM": "llama", "GPT2LMHeadModel": "gpt2"}
"""The config of a class that several types share, where it is not the first of them."""


def counted(kind: str) -> list[Counted]:
    """The classes of that kind, in the order of transformers' own list."""
    names: Iterable[tuple[str, str | tuple[str, ...]]] = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == "causal"
        else modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES).items()
    left_out = {each for types in NOT_COUNTED[kind].values() for each in types.split()}
    types_of: dict[str, list[str]] = {}
    for model_type, name in names:
        if model_type not in left_out and isinstance(name, str):
            types_of.setdefault(name, []).append(model_type)
    return [Counted(name, _type_of(name, types) if kind == "causal" else types[0]) for name, types in types_of.items()]


def _type_of(name: str, types: list[str]) -> str:
    """Of a class that is listed for a text and for the multimodal model around it: the text."""
    return _TYPES_OF.get(name) or next((each for each in types if each.endswith("_text")), types[0])


def unknown(kind: str) -> list[str]:
    """Types that are left out and that this version of transformers does not have."""
    names = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == "causal"
             else modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return [each for types in NOT_COUNTED[kind].values() for each in types.split() if each not in names]
