"""The float32 reference: Hugging Face transformers on weights that *we* dequantise. No files written; needs torch.

transformers' own FP8 path is not used: it derives the block size from the scale grid, which is wrong and silent where
rows are no multiple of 128 (192 rows become blocks of 96).
"""

from __future__ import annotations

import os
import re

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tiny_config import State
from tiny_release import read_config, read_state

EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def build_model(config: dict) -> DeepseekV3ForCausalLM:
    """An untrained float32 model of a released-style config."""
    if config["scoring_func"] != "sigmoid" or config["topk_method"] != "noaux_tc":
        raise ValueError("transformers implements only sigmoid routing with noaux_tc for deepseek_v3")
    drop = ("quantization_config", "torch_dtype", "transformers_version", "architectures")
    fields = {key: value for key, value in config.items() if key not in drop}
    hf_config = DeepseekV3Config.from_dict(fields)
    # eager experts: a plain loop of F.linear per expert, the clearest arithmetic to compare with
    hf_config._experts_implementation = "eager"
    hf_config._attn_implementation = "eager"
    return DeepseekV3ForCausalLM(hf_config).float()


def to_released(hf_state: dict[str, torch.Tensor]) -> State:
    """Fused 3-D experts of transformers 5 -> one tensor per expert, as released."""
    state: State = {}
    for name, tensor in hf_state.items():
        array = tensor.detach().float().numpy()
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":  # [n_expert, 2 * n_ff, n_embd], gate rows first
            n_ff = array.shape[1] // 2
            for i_expert in range(array.shape[0]):
                state[f"{prefix}.{i_expert}.gate_proj.weight"] = array[i_expert, :n_ff].copy()
                state[f"{prefix}.{i_expert}.up_proj.weight"] = array[i_expert, n_ff:].copy()
        elif last == "down_proj":  # [n_expert, n_embd, n_ff]
            for i_expert in range(array.shape[0]):
                state[f"{prefix}.{i_expert}.down_proj.weight"] = array[i_expert].copy()
        else:
            state[name] = array.copy()
    return state


def to_fused(state: State) -> dict[str, torch.Tensor]:
    """The inverse of to_released."""
    fused: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for name, array in state.items():
        match = EXPERT.match(name)
        if match:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = array
        else:
            fused[name] = torch.from_numpy(np.array(array))
    for prefix, by_index in experts.items():
        rows = [by_index[i_expert] for i_expert in range(len(by_index))]
        gate_up = np.stack([np.concatenate([row["gate"], row["up"]]) for row in rows])
        fused[f"{prefix}.gate_up_proj"] = torch.from_numpy(gate_up)
        fused[f"{prefix}.down_proj"] = torch.from_numpy(np.stack([row["down"] for row in rows]))
    return fused


def model_from_state(config: dict, state: State) -> DeepseekV3ForCausalLM:
    """The float32 model of a state dict in released names; MTP layers must already be left out."""
    model = build_model(config)
    missing, unexpected = model.load_state_dict(to_fused(state), strict=False)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"state dict does not fit the config: missing {missing[:4]}, unexpected {unexpected[:4]}")
    if tied:
        model.tie_weights()
    return model.eval()


def reference_model(directory: str | os.PathLike) -> DeepseekV3ForCausalLM:
    """The float32 model of a released directory, of any dtype; FP8 is expanded by our own dequantise()."""
    config = read_config(directory)
    return model_from_state(config, read_state(directory))


@torch.no_grad()
def logits_of(model: DeepseekV3ForCausalLM, ids: list[int]) -> np.ndarray:
    """[n_tokens, n_vocab] float32."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


@torch.no_grad()
def greedy(model, ids: list[int], n_new: int, eos: int | None = None) -> tuple[list[int], list[float]]:
    """Greedy ids and the top-1/top-2 logit gap of each. Recomputes the whole prefix: slow, and free of cache bugs."""
    out, gaps = list(ids), []
    while len(gaps) < n_new:
        top = model(torch.tensor([out]), use_cache=False).logits[0, -1].topk(2)
        gaps.append(float(top.values[0] - top.values[1]))
        out.append(int(top.indices[0]))
        if out[-1] == eos:
            break
    return out[len(ids) :], gaps


@torch.no_grad()
def chosen_experts(model: DeepseekV3ForCausalLM, ids: list[int]) -> np.ndarray:
    """[n_moe_layers, n_tokens, n_used] expert indices, each row sorted."""
    rows: list[np.ndarray] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: rows.append(np.sort(out[2].numpy(), -1))) for gate in gates]
    try:
        model(torch.tensor([ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return np.stack(rows)


@torch.no_grad()
def perplexity(model: DeepseekV3ForCausalLM, ids: list[int], bos: int, window: int = 256) -> float:
    """Over consecutive windows, each after a BOS: every token is predicted once, from at most `window` - 1 tokens."""
    total, count = 0.0, 0
    for start in range(0, len(ids), window - 1):
        part = [bos, *ids[start : start + window - 1]]
        logits = model(torch.tensor([part]), use_cache=False).logits[0]
        target = torch.tensor(part[1:])
        total += float(torch.nn.functional.cross_entropy(logits[:-1], target, reduction="sum"))
        count += len(target)
    return float(np.exp(total / count))
