"""The tokenizer files of a tiny release, as JSON values: special tokens, tokenizer_config, cutting a vocabulary.
Training a tokenizer is in tiny_train.py; nothing here needs the tokenizers package."""

from __future__ import annotations

import copy
import json
from pathlib import Path

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
BOS, EOS, PAD, USER, ASSISTANT = range(len(SPECIAL_TOKENS))
N_BYTES = 256

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)


def added_token(content: str) -> dict:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


def tokenizer_config(max_length: int) -> dict:
    """As released: tokenizer.json itself adds no BOS, `add_bos_token` here decides."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": added_token(SPECIAL_TOKENS[BOS]),
        "clean_up_tokenization_spaces": False,
        "eos_token": added_token(SPECIAL_TOKENS[EOS]),
        "legacy": True,
        "model_max_length": max_length,
        "pad_token": added_token(SPECIAL_TOKENS[PAD]),
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


def released_form(tokenizer: dict) -> dict:
    """Merges as "left right" strings, the form of the released file; new tokenizers versions write pairs."""
    tokenizer = copy.deepcopy(tokenizer)
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return tokenizer


def cut_tokenizer(tokenizer: dict, n_vocab: int) -> dict:
    """The first n_vocab tokens with their ids; a larger n_vocab leaves the tail of the embedding unused, as released
    models do."""
    if n_vocab < len(SPECIAL_TOKENS) + N_BYTES:
        raise ValueError(f"vocab_size {n_vocab}: special tokens and bytes alone need {len(SPECIAL_TOKENS) + N_BYTES}")
    tokenizer = released_form(tokenizer)
    model = tokenizer["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < n_vocab}
    model["merges"] = [merge for merge in model["merges"] if merge.replace(" ", "", 1) in model["vocab"]]
    return tokenizer


def tokenizer_files(tokenizer_json: Path, config: dict) -> dict[str, dict]:
    """What write_release wants: file name -> JSON, cut to the config's vocabulary."""
    if not tokenizer_json.is_file():
        raise FileNotFoundError(f"{tokenizer_json}: train and write the demo model first, or give another tokenizer")
    tokenizer = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    return {
        "tokenizer.json": cut_tokenizer(tokenizer, config["vocab_size"]),
        "tokenizer_config.json": tokenizer_config(config["max_position_embeddings"]),
    }
