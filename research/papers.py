"""What the papers say, and the variants that are to show it. Data alone: `findings` runs it."""

from __future__ import annotations

import msgspec

UNITS, LENGTH, CHUNK, SINKS, STABILIZERS, FOCUS = 48, 4096, 128, 4, 4, 6  # FOCUS: at least what a question takes
TUNED_FOR = 64  # units, by the recipe
LABELS = {"": {}, "-zscore": {"label": "zscore"}, "-logit": {"label": "logit"}}
TRAINED = {  # heads by folder: what differs from the others (times: as many steps), and which text they read
    "heads": ({}, "all"),
    "heads-zscore": ({"label": "zscore"}, "all"),
    "heads-logit": ({"label": "logit"}, "all"),
    **{f"heads{label}-plain": ({"input_norm": False, "bias": False} | more, "all") for label, more in LABELS.items()},
    **{f"heads{label}-{seed}": ({"seed": seed} | more, "all") for seed in (1, 2)
       for label, more in LABELS.items()},  # how far heads differ by chance
    "heads-hidden": ({"features": "hidden"}, "all"),
    "heads-hidden-zscore": ({"features": "hidden", "label": "zscore"}, "all"),
    "heads-rough": ({"alpha": 0.0}, "all"),
    "heads-smooth": ({"alpha": 2.5e-2}, "all"),
    "heads-32": ({"width": 32}, "all"),
    "heads-512": ({"width": 512}, "all"),
    "heads-books": ({}, "books"),
    "heads-code": ({}, "code"),
    "heads-plain-text": ({}, "books and code"),
    "heads-query": ({"query_tokens": 4}, "all"),
    "heads-query-zscore": ({"query_tokens": 4, "label": "zscore"}, "all"),
    "heads-query-long": ({"query_tokens": 4, "label": "zscore", "times": 4}, "all"),
}

RECIPE, FADING = "recipe", "recipe-retention"  # the recipe's own heads, of locret and of trimkv
OWN = {RECIPE: "heads", FADING: "heads-retention"}
UNTUNED, ALONE, MORE, UNFADED = "recipe-untuned", "recipe-alone", "recipe-more", "recipe-retention-untuned"
COPIES = {UNTUNED: RECIPE, ALONE: RECIPE, MORE: RECIPE, UNFADED: FADING}
"""As they were before their second stage; alone: tuned on examples that begin in an empty memory; more: given as many
steps behind a text, in which what eviction does to answers counts for nothing."""
STANDARDISED = "heads-zscore-tuned"  # heads-zscore with the recipe's second stage
FIRST = {ALONE: UNTUNED, MORE: UNTUNED, STANDARDISED: "heads-zscore"}  # what they are where tuning was not kept

HEEDING = {
    "heads that never saw a query": "heads", "heads trained with it": "heads-query",
    "standardised logits, heads that never saw a query": "heads-zscore",
    "standardised logits, heads trained with it": "heads-query-zscore",
    "standardised logits, heads trained with it for four times as long": "heads-query-long"}


class Finding(msgspec.Struct, frozen=True):
    """What a paper says, and the variants that show it: label -> settings of a `Cell`."""

    name: str
    claim: str
    variants: dict[str, dict]


def locret(heads: str = "heads", **more: object) -> dict:
    return {"policy": "locret", "heads": heads, "allocation": "main"} | more


SHORT = {"length": 896, "units": 256}  # that fits the window in one chunk
ROOMY = SHORT | {"units": 512}  # with fewer nothing is left to compare where nobody is told a question
LAST = SHORT | {"task": "recall_question_last"}
NACL_LAST = LAST | {"chunk_size": 896, "units": 128}
FEW = 0.01  # 9 of 896 tokens, the question among them: proxies take places of what stays by score, which a tenth is


def nacl(where: dict, **knobs: float | str) -> dict:
    return {"policy": "nacl", "knobs": knobs, **where}


FINDINGS = (
    Finding("label scaling", "Locret regresses unscaled attention logits (arXiv:2410.01805, section 3.2); each "
            "with three seeds of the heads", {
                **{f"{words}{f', seed {seed[1:]}' * bool(seed)}": locret(f"heads{label}{seed}")
                   for label, words in (("", "log-probabilities"), ("-zscore", "standardised logits"),
                                        ("-logit", "raw logits")) for seed in ("", "-1", "-2")},
                "log-probabilities, heads without LayerNorm and biases": locret("heads-plain"),
                "standardised logits, heads without LayerNorm and biases": locret("heads-zscore-plain"),
                "raw logits, heads without LayerNorm and biases (the paper's)": locret("heads-logit-plain"),
                "log-probabilities, heads on hidden states (kvzap)": locret("heads-hidden", policy="kvzap"),
                "standardised logits, heads on hidden states (kvzap)": locret("heads-hidden-zscore", policy="kvzap")}),
    Finding("smoothing", "without the smoothing loss R.Number falls from 97.46 to 79.15 (Locret, revision)", {
        "none": locret("heads-rough"), "2.5e-3 (the paper's)": locret(), "2.5e-2": locret("heads-smooth")}),
    Finding("stabilizers", "the last n_s units of a chunk must stay; with n_s = 0 the released code protects, and so "
            "ties, every unit, so that whatever sorting puts first stays; 96 units in every layer", {
                **{f"n_s = {n}": locret(stabilizers=n, units=96, allocation="uniform") for n in (0, 4, 16, 32, 64)},
                **{f"n_s = 0 as released, if of all that tie {words} stay": {
                    "policy": policy, "stabilizers": 0, "units": 96}
                   for policy, words in (("streaming_llm", "the newest"), ("random", "any"))}}),
    Finding("stabilizers and text", "recent units keep the text itself predictable: bits per byte, lower is better; "
            "96 units in every layer", {
                f"n_s = {n}": locret(task="text", stabilizers=n, units=96, allocation="uniform")
                for n in (0, 4, 16, 32, 64)}),
    Finding("head width", "the width of the heads hardly matters (Locret, appendix)", {
        "32": locret("heads-32"), "128": locret(), "512": locret("heads-512")}),
    Finding("training data", "the training data of the heads hardly matters (Locret, appendix); here the text "
            "around facts whose form is the same", {
        "books, code and figures": locret(), "books and code": locret("heads-plain-text"),
        "books": locret("heads-books"), "code": locret("heads-code")}),
    Finding("chunked prefill", "H2O and SnapKV fail under chunked prefill, whose scores see no later tokens (Locret, "
            "Figure 1); streams of 896 tokens that end with the question, evicted once behind it or every 64 tokens; "
            "256 units", {
                f"{policy}, {words}": {"policy": policy, "chunk_size": chunk, **LAST, **more}
                for policy, more in (("h2o", {}), ("snapkv", {}), ("locret", {"heads": "heads"}))
                for words, chunk in (("once", 896), ("every 64", 64))}),
    Finding("chunked prefill, not told", "the same, and no question in what is read", {
                f"{policy}, {words}": {"policy": policy, "chunk_size": chunk, **SHORT}
                for policy in ("h2o", "snapkv", "random") for words, chunk in (("once", 896), ("every 64", 64))}),
    Finding("pyramid", "PyramidKV's budgets on top of Locret gain (47.57 to 48.38, Locret, revision)", {
        "uniform": locret(allocation="uniform"), "pyramid": locret(allocation="pyramid"),
        "learned with the recipe's heads": locret()}),
    Finding("eviction in the loop", "heads that decide what is evicted while they learn from the full cache's answers "
            "keep more in the same memory (TRIM-KV, arXiv:2512.03324, section 4); here also where a text has filled "
            "it; 40 units", {
                f"{words}, {length:,} tokens": locret(heads, units=40, length=length)
                for length in (4096, 65_536) for heads, words in (
                    (UNTUNED, "first stage"), (MORE, "as many more steps of it behind a text"),
                    (ALONE, "tuned on examples"), (RECIPE, "tuned behind a text"),
                    ("heads-zscore", "standardised logits, first stage of 300 steps"),
                    (STANDARDISED, "standardised logits, tuned behind a text"))}),
    Finding("retention learnt end to end", "gates learn what is to last from attention that fades and a capacity loss "
            "(TRIM-KV, section 4)", {
                words: {"policy": "trimkv", "heads": heads, "allocation": "main"} for heads, words in (
                    (UNFADED, "what labels leave after 4,096 tokens"), (FADING, "end to end, 150 steps from there"))}),
    Finding("random share of NaCl", "a random share of the budget helps (arXiv:2408.03675, table 3); streams of 896 "
            "tokens that end with the question, evicted once behind it; 128 units, 1 % proxies", {
                f"{share:.0%}": nacl(NACL_LAST, proxies=FEW, random=share)
                for share in (0.0, 0.1, 0.37, 0.7, 0.9, 1.0)}),
    Finding("random share of NaCl in a stream", "the same where every 128 tokens are evicted and no question is told; "
            "streams of 896 tokens, 512 units, 5 % proxies", {
                f"{share:.0%}, {words}": nacl(ROOMY, proxies=0.05, random=share, draw=draw)
                for share in (0.0, 0.37, 0.7, 1.0) for draw, words in (
                    ("fresh", "drawn anew"), ("reservoir", "one lot per unit")) if share or draw == "fresh"}),
    Finding("head-wise draws of NaCl", "drawing for every head loses no token in all of them (arXiv:2408.03675, 6.3); "
            "streams of 896 tokens that end with the question, evicted once behind it; 128 units, 1 % proxies", {
                f"{words}, {share:.0%} random": nacl(NACL_LAST, proxies=FEW, lots=lots, random=share)
                for lots, words in (("head", "every head"), ("layer", "one lot a layer"))
                for share in (0.37, 0.7, 0.9, 1.0)}),
    Finding("chunk size", "Locret is stable over chunk sizes (Locret, appendix)", {
        str(chunk): locret(chunk_size=chunk) for chunk in (32, 64, 128, 256, 512)}),
    Finding("Locret-Q", "a query in front makes query-driven tasks survive budgets that fail without (RULER: 34.33 to "
            "75.54); one question a stream where it is told, 16 where it is not", {
                f"{told}, {words}": locret(folder, focus=told == "told")
                for words, folder in HEEDING.items() for told in ("told", "not told")}),
)
