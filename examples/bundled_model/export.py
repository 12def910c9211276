"""Writes the trained tensors as the folder that Hugging Face and the library load."""

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
from transformers import AutoModelForCausalLM

from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.models import attach

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


def retaining_heads(model: Recaller, head: RecallHead, fingerprint: str) -> RetainingHeads:
    """The trained head for the recall layer alone: the other layers keep their newest units."""
    shape, layer = model.shape, model.shape.recall_layer
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
            fingerprint=fingerprint,
            budget_shares=tuple(float(units) for units in budgets(model)),
            trained_layers=(layer,),
        )
    )
    heads.fc1[layer].load_state_dict(head.fc1.state_dict())
    heads.fc2[layer].load_state_dict(head.fc2.state_dict())
    return heads


def llama_weights(model: Recaller) -> dict[str, Tensor]:
    """bf16 tensors under the names of LlamaForCausalLM; the output matrix is the embedding."""
    return {f"model.{name}": tensor.detach().bfloat16().contiguous() for name, tensor in model.state_dict().items()}


def export(model: Recaller, head: RecallHead, tokenizer: Tokenizer, out: Path, card: str = "") -> None:
    """Write the whole folder beside `out`, then move it file by file, so that every file in `out` is complete."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch)
        end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
        (folder / "config.json").write_text(json.dumps(model.shape.llama_config(end, pad), indent=2) + "\n")
        generation = {"eos_token_id": end, "pad_token_id": pad, "do_sample": False, "max_new_tokens": 64}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        save_file(llama_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
        save_tokenizer(tokenizer, folder, model.shape.window)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        retaining_heads(model, head, attach(loaded).fingerprint).save(folder, torch.bfloat16)
        if card:
            (folder / "README.md").write_text(card)
        for file in sorted(folder.iterdir()):
            os.chmod(file, 0o644)
            shutil.move(str(file), out / file.name)
