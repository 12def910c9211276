"""`locret-stream inspect`: whether a model is served, its shape, its budgets and what they cost, or what its chat
template does, without reading a token.

None of that needs weights: what layers keep and how they attend follows from the config, so that a twin of random
numbers shows it (`models.foreseen`), and the bytes follow from that. Two things do, and are told with `--load`: the
fingerprint, which is of the weights' content, and whether these weights are whole and answer as the stock model does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from locret_stream.cli.loading import foresee, make_runtime
from locret_stream.cli.options import Json, RuntimeOptions, grouped
from locret_stream.cli.output import in_bytes, out, print_json
from locret_stream.cli.signals import Summary, interruptible
from locret_stream.errors import ConfigError

if TYPE_CHECKING:
    from locret_stream.cache import Pool
    from locret_stream.engine.layout import Layout
    from locret_stream.models import Foreseen
    from locret_stream.runtime import Runtime
    from locret_stream.runtime.foresight import Foresight

HELP = """Show a model's shape, its budgets and the memory they take, or what its chat template does.

Whether a model is served, and what that costs, is told by its config, before any of its weights is read; one that is \
not served is refused here with its reason. --load reads the weights as well.

Examples:

\b
  locret-stream inspect
  # a model of the hub: its config alone is downloaded
  locret-stream inspect --model meta-llama/Llama-3.1-8B-Instruct --budget 6000
  locret-stream inspect --model ./llama --budget 6000
  # as a size; how many units is that?
  locret-stream inspect --model ./llama --policy h2o --budget 512MiB --json
  # what the chat template shows: roles, tools, thoughts, and its options
  locret-stream inspect --model ./llama --template"""
app = typer.Typer(rich_markup_mode="rich")

FORMULA = ("bytes = slots · Σ H · (b_l + chunk) · ((2 · D_K + D_V) · item + 4 · planes + 8)\n"
           "        + max H · b_l · max(D · item, 8)")
FORMULA_IN_BITS = (
    "bytes = slots · Σ H · (b_l · rows + (chunk + sinks) · (D_K + D_V) · item + (b_l + chunk) · (4 · planes + 8)"
    " + 8 · D_K)\n"
    "        + max H · b_l · max(D · item, 8) + H · (2 · D_K + D_V) · max(b_l + chunk) · item\n"
    "        (the last term, with --decode-copy, for each layer)\n"
    "{tier}"
    "rows: of K and of V, D · bits / 8, and for each group of at most 32 channels 4 (at 8 bits: of at most 64, 8; at 1 "
    "bit: of at most 64, 4); no sinks in layers with a sliding window")
OF_TIER = (  # in FORMULA_IN_BITS, where exact units are in the host's memory
    "        + slots · Σ H · min(residual, b_l) · (D_K + D_V) · item  (the newest units exactly)\n")
OF_HOST = "bytes in the host's memory = slots · Σ H · b_l · ((D_K + D_V) · item + 8)\n"


@app.command(help=HELP)
@grouped
def inspect(*, options: RuntimeOptions, template: Annotated[bool, typer.Option("--template", help=(
        "What the model's chat template does with messages."))] = False,
        weights: Annotated[bool, typer.Option("--load", help=(
            "Load the weights, too: try the model with them, and tell their fingerprint."))] = False,
        as_json: Json = False) -> None:
    if template and weights:
        raise ConfigError("found --template and --load; expected one of them")
    with interruptible(Summary("nothing was read")):
        if template:
            facts = _of_running(options, template_facts)
        else:
            runtime, foresight = foresee(options)
            facts = facts_of(foresight, options.model, runtime.acknowledge)
            if weights:
                facts |= _of_running(options, loaded_facts)
    if as_json:
        print_json(facts)
    elif template:
        show_template(facts)
    else:
        show(facts)


def _of_running(options: RuntimeOptions, told: Callable[[Runtime, str], dict[str, Any]]) -> dict[str, Any]:
    runtime = make_runtime(options)
    try:
        return told(runtime, options.model)
    finally:
        asyncio.run(runtime.aclose())


def template_facts(runtime: Runtime, model: str) -> dict[str, Any]:
    """What `--template --json` prints. Raises ConfigError: the tokenizer has no chat template."""
    from locret_stream.conversation.render import ChatTemplate
    from locret_stream.conversation.reply_forms import described

    if runtime.frames.raw:
        raise ConfigError(f"the tokenizer of {model} has no chat template; expected a chat model, or its template in a "
                          "file chat_template.jinja of its folder")
    template = ChatTemplate(runtime.tokenizer, runtime.codec, runtime.frames)
    source = runtime.frames.template or runtime.tokenizer.chat_template
    return {"model": model, "template": template.traits.described() | described(str(source), template.traits.marks,
                                                                               template.traits.prompt)}


def show_template(facts: dict[str, Any]) -> None:
    """Print the same as a table."""
    table = Table(title=f"the chat template of {facts['model']}", title_justify="left", show_header=False,
                  pad_edge=False)
    for what, value in facts["template"].items():
        shown = ("yes" if value else "no") if isinstance(value, bool) else (
            ", ".join(map(repr, value)) if isinstance(value, list) else repr(value) if "\n" in value else value)
        table.add_row(what, escape(shown or "none"))
    out.print(table)


def facts_of(foresight: Foresight, model: str, acknowledge: str | None) -> dict[str, Any]:
    """What `--json` prints: the bytes that the tensors take (`bytes_resident`), and those of the formula."""
    found = foresight.model
    return {
        "model": model, "fingerprint": None, "kind": kind_of(found), "keeps": list(found.keeps),
        **_of_memory(foresight.layout, foresight.pool, found.dtype), "device": str(found.device),
        "acknowledge": acknowledge, "snapshot_bytes": foresight.snapshot_bytes,
        "weights_bytes": foresight.weights_stored, "weights_bytes_in_memory": foresight.weights_held}


def loaded_facts(runtime: Runtime, model: str) -> dict[str, Any]:
    """The same of a runtime that holds the weights, as far as these may tell otherwise, and the fingerprint."""
    engine, attachment = runtime.engine, runtime.attachment
    return {"model": model, "fingerprint": attachment.fingerprint,
            **_of_memory(engine.layout, engine.pool, attachment.dtype), "device": str(attachment.device)}


def _of_memory(layout: Layout, pool: Pool, dtype: object) -> dict[str, Any]:
    shape = layout.shape
    return {
        "layers": shape.layers, **{name: [getattr(unit, name) for unit in shape.units]
                                   for name in ("kv_heads", "query_heads", "key_dim", "value_dim", "index_dim")},
        "window": shape.window, "item_bytes": shape.item_bytes, "dtype": str(dtype).removeprefix("torch."),
        "policy": layout.policy.name, "chunk_size": layout.chunk_size,
        "budgets": list(layout.budgets), "sliding": list(shape.sliding),
        "blocks": [unit.blocks for unit in shape.units], "rope": list(pool.rope),
        "by_head": layout.config.budget.by_head, "most": list(layout.most),
        "exact": None if layout.config.exact is None else msgspec.to_builtins(layout.config.exact),
        "store_bits": list(layout.config.store_bits), "firsts": list(pool.firsts), "planes": pool.planes,
        "host_bytes": pool.host_bytes, "formula_host_bytes": pool.formula_host_bytes(),
        "slots": pool.slots, "slot_bytes": pool.slot_bytes, "state_bytes": shape.state_bytes,
        "layer_bytes": pool.layer_bytes, "bytes_resident": pool.bytes_resident, "formula_bytes": pool.formula_bytes(),
        "full_cache_bytes_per_token": shape.token_bytes}


def kind_of(found: Foreseen) -> str:
    """How a model is served: the words of docs/models.md."""
    words = [word for word, holds in (
        ("hybrid: some layers carry a state", bool(found.states)),
        ("latent attention", not all(unit.value_dim for unit in found.shape.units)),
        ("layers of different shapes", not found.shape.alike),
        ("multimodal, for its text", found.wraps)) if holds]
    return ", ".join(words) or "plain: every layer keeps units"


def show(facts: dict[str, Any]) -> None:
    """Print the same as text and a table."""
    chunk = facts["chunk_size"]
    units = ["{} query and {} KV heads of {}{}".format(
        queries, heads, key if key == value else f"{key} (V: {value})", f" with index keys of {index}" if index else "")
             for queries, heads, key, value, index in zip(*(facts[name] for name in (
                 "query_heads", "kv_heads", "key_dim", "value_dim", "index_dim")), strict=True)]
    forms = list(dict.fromkeys(units))
    out.print(f"{facts['model']}: {facts['layers']} layers, {' or '.join(forms)}, {facts['window']:,} positions, "
              f"{facts['dtype']} on {facts['device']}", soft_wrap=True)
    each = [f"{count} {'keep' if count > 1 else 'keeps'} {what}" for what, count in Counter(facts["keeps"]).items()]
    out.print(f"served ({facts['kind']}); of its layers {'; '.join(each)}", soft_wrap=True)
    out.print(f"policy {facts['policy']}: budget {fmean(facts['budgets']):,.0f} + chunk {chunk} units per KV head, "
              "mean over the layers" + (f", which the heads of a layer share: at most {max(facts['most']):,} of one"
                                        if facts["by_head"] else ""), soft_wrap=True)
    table = Table(pad_edge=False)
    for heading in ("layer", "budget b_l", "kind", "b_l + chunk", "bytes of one context"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for layer, (units, window, blocks, size) in enumerate(zip(*(facts[name] for name in (
            "budgets", "sliding", "blocks", "layer_bytes")), strict=True)):
        kind = f"{'blocks of' if blocks else 'window'} {window:,}" if window else "full"
        table.add_row(str(layer), f"{units:,}", kind, f"{units + chunk:,}",
                      in_bytes(size))
    out.print(table)
    in_bits = FORMULA_IN_BITS.format(tier=OF_TIER if facts["host_bytes"] else "")
    out.print(f"{FORMULA if facts['store_bits'] == [16, 16] else in_bits}\n"
              f"      = {facts['formula_bytes']:,} bytes for {facts['slots']} slots; the tensors hold "
              f"{facts['bytes_resident']:,}; one context is {in_bytes(facts['slot_bytes'])}", soft_wrap=True)
    if facts["host_bytes"]:
        out.print(f"{OF_HOST}      = {facts['formula_host_bytes']:,}: the same units exactly; a token fetches "
                  f"{facts['exact']['units']:,} of each layer and KV head", soft_wrap=True)
    if facts["state_bytes"]:
        out.print(f"of these {in_bytes(2 * facts['state_bytes'])} are the recurrent state of its layers, committed and "
                  "provisional", soft_wrap=True)
    stored, held = (in_bytes(facts[name]) if facts[name] is not None else "unknown" for name in (
        "weights_bytes", "weights_bytes_in_memory"))
    out.print(f"weights: {stored} in the checkpoint, {held} in memory; a snapshot of a full memory: about "
              f"{in_bytes(facts['snapshot_bytes'])}", soft_wrap=True)
    per_token = facts["full_cache_bytes_per_token"]
    out.print(f"a full cache takes {per_token:,} bytes for every token: as much as one context after "
              f"{facts['slot_bytes'] // per_token:,} tokens, and {in_bytes(per_token * 1e6)} after a million",
              soft_wrap=True)
