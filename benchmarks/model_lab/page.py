"""The tables of docs/models.md: every class that counts, and the models that most people run, with the states that a
results file gives them. Measures nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model_lab.counted import KINDS, counted

COMMAND = "python benchmarks/models.py all --keep models --write docs/models.md"
BEGIN, END = f"<!-- what follows is written by: {COMMAND} -->", "<!-- what that command writes ends here -->"

MOST_USED: tuple[tuple[str, str], ...] = (
    ("Qwen3 0.6B to 32B", "qwen3"),
    ("Qwen3.5 and 3.6, dense", "qwen3_5_text, qwen3_5"),
    ("Qwen3-30B-A3B, Coder", "qwen3_moe"),
    ("Qwen3.5 with experts", "qwen3_5_moe_text, qwen3_5_moe"),
    ("Qwen3-Next, Coder-Next", "qwen3_next"),
    ("Llama 3", "llama"),
    ("GPT-OSS", "gpt_oss"),
    ("Qwen2.5, Coder", "qwen2"),
    ("Gemma 3 4B to 27B", "gemma3"),
    ("Gemma 4 31B, 26B-A4B, E2B, E4B",
     "gemma4_text, gemma4; gemma4 26B-A4B (experts); gemma4 E2B (shared units, inputs per layer)"),
    ("DeepSeek V3, R1, V3.1, Kimi K2", "deepseek_v3"),
    ("GLM-4.5 to 4.7", "glm4_moe"),
    ("GLM-4.7-Flash", "glm4_moe_lite"),
    ("GLM-5", "glm_moe_dsa; glm_moe_dsa, an index of 2,048 tokens"),
    ("DeepSeek V3.2", "deepseek_v32; deepseek_v32, an index of 2,048 tokens"),
    ("DeepSeek V4", "deepseek_v4"),
    ("Kimi K2.5", "kimi_k25"),
    ("Mistral Small 3, Devstral, Magistral", "mistral3"),
    ("Ministral 3", "ministral3, mistral3"),
    ("Mistral 7B, Mixtral", "mistral, mixtral"),
    ("Qwen3-VL", "qwen3_vl"),
    ("Qwen2.5-VL", "qwen2_5_vl"),
    ("MiniMax M2", "minimax_m2"),
    ("Gemma 2, Gemma 3 270M and 1B", "gemma2, gemma3_text"),
    ("Phi-4, Phi-3.5", "phi3"),
    ("LFM2", "lfm2"),
    ("LFM2 with experts", "lfm2_moe"),
    ("Granite 4 H, Granite 4 Micro", "granitemoehybrid; granite 4 micro (dense, RoPE, all attention)"),
    ("Nemotron 3 Nano, Nemotron-H", "nemotron_h"),
    ("Falcon-H1", "falcon_h1"),
    ("Kimi Linear", "kimi_linear"),
    ("OLMo 2 and 3", "olmo2, olmo3"),
    ("OLMo Hybrid", "olmo_hybrid"),
    ("SmolLM3", "smollm3"),
    ("Llama 4", "llama4_text, llama4"),
    ("Granite 3", "granite, granitemoe"),
    ("Seed-OSS, Hunyuan 3, Command R and A", "seed_oss, hy_v3, cohere, cohere2"),
    ("MiMo-V2-Flash", "mimo_v2_flash"),
    ("LLaVA, InternVL, Aya Vision", "llava, internvl, aya_vision"),
    ("Ling 2.5, ERNIE 4.5, EXAONE 4, Apertus, AFM, Solar Open",
     "bailing_hybrid, ernie4_5, exaone4, apertus, arcee, solar_open"),
)
"""What people run, in an order of our own, and what it is made of: model types, and names of variants behind ";"."""

TITLES = {"causal": "### Decoders", "multimodal": "### Multimodal models, for their text",
          "variants": "### Other published forms, which are not counted"}


def write(page: Path, kept: Mapping[str, Any]) -> None:
    """Put the tables between the two marks in the page.

    Raises:
        ValueError: the page has no such marks.
    """
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} has no place for the tables; expected the lines {BEGIN!r} and {END!r}")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{tables(kept)}{after}", encoding="utf-8")


def tables(kept: Mapping[str, Any]) -> str:
    """The tables with their marks, of a results file."""
    result = kept["result"]
    served = {kind: f"{result[kind]['served']} of {len(result[kind]['classes'])}" for kind in KINDS}
    lines = [BEGIN, "", *_paragraph(
        f"Served are **{served['causal']}** classes of decoders and, for their text, **{served['multimodal']}** of "
        f"multimodal models, of those in transformers {kept['versions']['transformers']} that go on with a text. A "
        "tiny random model of each was saved, loaded by `Runtime.from_pretrained` and held against stock: 60 tokens in "
        "pieces that fit and 8 more, and 200 that do not fit. That says what is computed, not how well it remembers."),
        "",
        f"    {kept['command']}", "", *_paragraph(
        f"[The results](../benchmarks/results/models.json) are of commit {kept['commit']}, {kept['date']}, on "
        f"{kept['hardware']}."), "",
        "### The 40 most used", "", "| what people run | classes | state |", "|---|---|---|", *_most_used(result), ""]
    for kind, title in TITLES.items():
        lines += [title, "", f"| {'form' if kind == 'variants' else 'class'} | model type | state |", "|---|---|---|"]
        lines += [f"| {each['name']} | {each['type']} | {_cell(state(each))} |" for each in result[kind]["classes"]]
        lines += [""]
    return "\n".join([*lines, END])


def _paragraph(text: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + len(word) >= 120:
            yield line
            line = ""
        line += f" {word}" if line else word
    yield line


def _most_used(result: Mapping[str, Any]) -> Iterator[str]:
    for what, made_of in MOST_USED:
        parts = list(_parts(result, made_of))
        names = ", ".join(dict.fromkeys(each["class"] for each in parts))
        states = {_called(each): state(each) for each in parts}
        alike = len(set(states.values())) == 1
        told = next(iter(states.values())) if alike else "; ".join(f"{name}: {each}" for name, each in states.items())
        yield f"| {what} | {names} | {_cell(told)} |"


def _parts(result: Mapping[str, Any], made_of: str) -> Iterator[Mapping[str, Any]]:
    """The results of what a row is made of. Raises KeyError: the results lack one."""
    types, *variants = made_of.split("; ")
    of_types = {each["type"]: each for kind in KINDS for each in result[kind]["classes"]}
    of_variants = {each["name"]: each for each in result["variants"]["classes"]}
    yield from (of_types[each] for each in types.split(", "))
    yield from (of_variants[each] for each in variants)


def _called(each: Mapping[str, Any]) -> str:
    return each["class"] if each["name"] == each["class"] else each["name"]


def state(each: Mapping[str, Any]) -> str:
    """The state of a class in a few words."""
    verdict, why = each["verdict"], reason(each.get("says", ""))
    return {"EQUAL": "served", "REFUSED": f"refused: {why}", "WRAPPED": f"refused: {why}",
            "DIFFERS": f"**differs** by {each.get('gap')} standard deviations, tokens: {each.get('tokens')}",
            "BADEVICT": f"**evicts wrongly**: {why}", "RAW": f"**fails**: {why}",
            "NOSTOCK": f"not tried: transformers itself fails here ({why})", "NOTBUILT": f"not tried: {why}"}[verdict]


def reason(says: str) -> str:
    """The first clause of an error, without the names of the error and the class and without what this memory is."""
    said = re.sub(r"^(?:\w+(?:Error|Model|Exceeded|Mismatch): )?(?:\w+(?: \([^)]*\))?: )?", "", says)
    said = re.sub(r"^layer \d+ would hold [^,]*, ", "", said)
    return re.split(r"[;:(]|, (?:which|as|so|whose|and its)\b", said)[0].strip().rstrip(".,")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def out_of_date(kept: Mapping[str, Any]) -> list[str]:
    """What the installed transformers have and the results lack, and the other way round, in sentences."""
    said = []
    for kind in KINDS:
        here = {each.name for each in counted(kind)}
        there = {each["name"] for each in kept["result"][kind]["classes"]}
        said += [f"{name} ({kind}) is a class of the installed transformers, and the results lack it"
                 for name in sorted(here - there)]
        said += [f"{name} ({kind}) is in the results, and the installed transformers do not have it, or it is not "
                 "counted" for name in sorted(there - here)]
    return said
