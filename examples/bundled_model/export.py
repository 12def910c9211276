"""From trained tensors to the folder that Hugging Face and the library load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from locret_stream.heads import HeadsConfig, RetainingHeads

from .chat import save_tokenizer
from .model import Recaller
from .pretrain import RecallHead

CHUNK = 256
LOCAL_BUDGET = 96  # units of every layer but the recall layer: sinks and the most recent
RECALL_BUDGET = 2784  # mean over 4 layers: 768; with a chunk of 256, 1,024


def budgets(model: Recaller) -> tuple[int, ...]:
    """Units per KV head and layer at the recommended mean of 768."""
    return tuple(
        RECALL_BUDGET if layer == model.shape.recall_layer else LOCAL_BUDGET for layer in range(model.shape.layers)
    )


def retaining_heads(model: Recaller, head: RecallHead) -> RetainingHeads:
    """The trained head for the recall layer; zeros elsewhere, so that on equal scores the newest units stay."""
    shape = model.shape
    heads = RetainingHeads(
        HeadsConfig(
            layers=shape.layers,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            width=head.fc1.out_features,
            input_norm=True,
            bias=True,
            label="attention",
            alpha=0.0,
            budget_shares=tuple(float(units) for units in budgets(model)),
        )
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
        for theirs, ours in ((heads.fc1, head.fc1), (heads.fc2, head.fc2)):
            theirs[shape.recall_layer].weight.copy_(ours.weight)
            theirs[shape.recall_layer].bias.copy_(ours.bias)
    return heads


def llama_weights(model: Recaller) -> dict[str, Tensor]:
    """bf16 tensors under the names of LlamaForCausalLM; the output matrix is the embedding."""
    return {f"model.{name}": tensor.detach().bfloat16().contiguous() for name, tensor in model.state_dict().items()}


def export(model: Recaller, head: RecallHead, tokenizer: Tokenizer, out: Path, card: str = "") -> None:
    """Write the whole folder beside `out`, then move it file by file: what is in `out` always loads."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch)
        end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
        (folder / "config.json").write_text(json.dumps(model.shape.llama_config(end, pad), indent=2) + "\n")
        generation = {"eos_token_id": end, "pad_token_id": pad, "do_sample": False, "max_new_tokens": 64}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        save_file(llama_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
        save_tokenizer(tokenizer, folder, model.shape.window)
        retaining_heads(model, head).save(folder, torch.bfloat16)
        if card:
            (folder / "README.md").write_text(card)
        for file in sorted(folder.iterdir()):
            os.chmod(file, 0o644)
            shutil.move(str(file), out / file.name)
