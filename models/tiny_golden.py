"""golden.json and golden.npz of a release: prompts, float32 reference logits, greedy continuations, chosen experts.
Computes and writes them; comparing is the tests' work. Needs torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from tiny_reference import chosen_experts, greedy, logits_of, perplexity, reference_model
from tiny_release import read_config
from tiny_tokenizer import ASSISTANT, BOS, USER

N_NEW = 48
MIN_GAP = 0.05  # far above float32 noise (1e-4 here), so another summation order cannot change a greedy token

# (name, text of the user, as a chat?)
PROMPTS = (
    (
        "gpl",
        "The licenses for most software and other practical works are designed to take away your freedom"
        " to share and change the works. By contrast,",
        False,
    ),
    (
        "apache",
        "Unless required by applicable law or agreed to in writing, Licensor provides the Work",
        False,
    ),
    ("chat", "If the Program specifies that a certain numbered version of the GNU General Public License", True),
)
ALL_POSITIONS = "gpl"  # one prompt keeps the logits of every position; of the others the last is kept


def prompt_ids(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [BOS, USER, *ids, ASSISTANT] if chat else [BOS, *ids]


def golden_prompt(model, tokenizer: Tokenizer, name: str, text: str, chat: bool) -> tuple[dict, dict[str, np.ndarray]]:
    ids = prompt_ids(tokenizer, text, chat)
    logits = logits_of(model, ids)
    continuation, gaps = greedy(model, ids, N_NEW)
    if min(gaps) <= MIN_GAP:
        raise ValueError(f"prompt {name}: smallest top-1/top-2 gap {min(gaps):.3f} <= {MIN_GAP}: choose another prompt")
    entry = {
        "name": name,
        "text": text,
        "chat": chat,
        "ids": ids,
        "greedy_ids": continuation,
        "greedy_text": tokenizer.decode(continuation, skip_special_tokens=False),
        "smallest_gap": round(min(gaps), 4),
    }
    arrays = {f"{name}.last_logits": logits[-1], f"{name}.experts": chosen_experts(model, ids).astype(np.uint8)}
    if name == ALL_POSITIONS:
        arrays[f"{name}.all_logits"] = logits
    return entry, arrays


def write_golden(directory: Path) -> None:
    model, config = reference_model(directory), read_config(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    entries, arrays = [], {}
    for name, text, chat in PROMPTS:
        entry, found = golden_prompt(model, tokenizer, name, text, chat)
        entries.append(entry)
        arrays |= found
        print(f"{name}: {len(entry['ids'])} tokens, smallest gap {entry['smallest_gap']}\n  {text!r}")
        print(f"  -> {entry['greedy_text']!r}")
    golden = {
        "about": "float32 logits by Hugging Face transformers on our own dequantisation of these files",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "first_moe_layer": config["first_k_dense_replace"],
        "arrays": {key: list(value.shape) for key, value in arrays.items()},
        "prompts": entries,
    }
    (directory / "golden.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    np.savez_compressed(directory / "golden.npz", **arrays)


def report(directory: Path, texts: dict[str, str]) -> None:
    """Prints perplexity per text and the load of the experts; reads only."""
    model, config = reference_model(directory), read_config(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for name, text in texts.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        print(f"ppl {name}: {perplexity(model, ids, BOS):.2f} over {len(ids)} tokens")
    used = chosen_experts(model, [BOS, *tokenizer.encode(next(iter(texts.values()))).ids[:900]])
    for i_moe, layer in enumerate(used):
        load = np.bincount(layer.ravel(), minlength=config["n_routed_experts"]) / layer.size
        print(f"layer {config['first_k_dense_replace'] + i_moe}: share per expert {load.min():.3f} .. {load.max():.3f}")
