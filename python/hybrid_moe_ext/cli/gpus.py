"""What `hybrid-moe info` says about GPUs: which there are, and what streaming would do with them."""

from __future__ import annotations

from typing import Any

from ..gpus import choose_gpus, find_gpus
from ..info import ModelInfo
from ..options import Options

_WHEN = {"auto": "where that is measured to be faster", "on": "from 32 tokens on"}


def gpu_facts(model: ModelInfo, options: Options) -> dict[str, Any]:
    """Raises OptionError when the options choose a device that is not there."""
    chosen = choose_gpus(options.devices)
    streams = options.slp != "off" and model.n_expert > 0
    gpus = []
    for gpu in find_gpus():
        free, total = gpu.memory()
        gpus.append({"name": gpu.name, "description": gpu.description, "free": free, "total": total})
    return {"gpus": gpus, "slp": options.slp, "streams_to": [gpu.name for gpu in chosen] if streams else []}


def gpu_lines(model: ModelInfo, facts: dict[str, Any]) -> list[str]:
    """None without a GPU."""
    if not facts["gpus"]:
        return []
    gpus = [
        f"{gpu['name']} ({gpu['description']}, {gpu['free'] / 1e9:.1f} of {gpu['total'] / 1e9:.1f} GB free)"
        for gpu in facts["gpus"]
    ]
    if not model.n_expert:
        return [f"GPUs:         {', '.join(gpus)}"]
    if facts["streams_to"]:
        what = f"experts are streamed to {', '.join(facts['streams_to'])} {_WHEN[facts['slp']]}; everything else is on GPUs"
    else:
        what = f"experts stay on the CPU ({'slp=off' if facts['slp'] == 'off' else 'devices=none'})"
    return [f"GPUs:         {', '.join(gpus)}", f"long prompts: {what}"]
