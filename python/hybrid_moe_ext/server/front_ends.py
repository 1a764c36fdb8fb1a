"""Fields that front ends send beside OpenAI's: what each becomes here. Unknown ones stay errors, so that a misspelt parameter is
found out; these are known, and a person behind a front end cannot leave them out."""

from __future__ import annotations

from typing import Any

# No part of the answer depends on them here: names of chats, caching and loading by other servers, progress reports.
NO_EFFECT = frozenset(
    {
        "chat_id", "session_id", "id", "title", "features", "background_tasks", "variables", "model_item", "tool_ids",
        "tool_servers", "files", "params", "filter_ids",  # Open WebUI and what stands behind it
        "keep_alive", "options",  # Ollama's: it ignores these itself at this path
        "ttl", "draft_model",  # LM Studio
        "cache_prompt", "id_slot", "slot_id", "n_keep", "return_progress", "timings_per_token", "post_sampling_probs",
        "samplers", "reasoning_format", "n_probs", "backend_sampling",  # llama-server's own page, Jan
        "provider", "transforms", "route", "usage", "include_reasoning", "plugins",  # OpenRouter's, sent by Cline and others
        "extra_body", "prompt_cache_options", "web_search_options", "prediction",
    }
)  # fmt: skip

# Samplers that are not here: their value for "off" is taken, another is an error and not silently left out.
_OFF = {
    "mirostat": 0, "typical_p": 1, "typ_p": 1, "tfs_z": 1, "xtc_probability": 0, "dry_multiplier": 0, "dynatemp_range": 0,
    "top_n_sigma": -1, "top_a": 0, "adaptive_target": -1, "use_beam_search": False, "min_tokens": 0,
}  # fmt: skip

# Settings of those, without an effect while they are off.
_OF_OFF = frozenset(
    {
        "mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
        "dry_sequence_breakers", "dynatemp_exponent", "adaptive_decay",
    }
)  # fmt: skip

# vLLM's name
_ALSO_CALLED = {"repetition_penalty": "repeat_penalty"}


def known(given: dict[Any, Any], fields: set[str]) -> dict[Any, Any]:
    """A body without what has no effect; `fields`: those that it may have. Raises ValueError for a sampler that is not here."""
    kept = {}
    for name, value in given.items():
        if name in fields:
            kept[name] = value
        elif name in NO_EFFECT or name in _OF_OFF or (isinstance(name, str) and value is None):
            continue
        elif name in _OFF:
            if isinstance(value, (list, dict, str)) or value != _OFF[name]:
                raise ValueError(f"{name} is not here: leave it out, or give {_OFF[name]}, which turns it off")
        elif (other := _ALSO_CALLED.get(name)) in fields and other not in given:
            kept[other] = value
        else:
            kept[name] = value
    return kept
