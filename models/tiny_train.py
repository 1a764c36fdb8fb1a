"""Trains the demo model: tokenizer, corpus, loop. Keeps float32 weights in a work directory; writes no release.

Texts: the licence texts that every Debian system carries. Seeded and deterministic for one machine, torch version and
thread count; other CPUs add in another order, so the committed release, not this script, is the fixed point.
"""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tiny_config import make_config, tensor_shapes
from tiny_reference import build_model, model_from_state, to_released
from tiny_release import read_safetensors, write_safetensors
from tiny_tokenizer import ASSISTANT, BOS, EOS, PAD, SPECIAL_TOKENS, USER

TEXTS = ("GPL-3", "GPL-2", "LGPL-3", "Apache-2.0")
HELD_OUT = "LGPL-2.1"  # never trained on, but a relative of GPL-2
TEXT_DIR = Path("/usr/share/common-licenses")


def read_text(name: str) -> str:
    """Paragraphs on one line each: hard wraps and indents are layout, and a tiny model should spend nothing on them."""
    raw = (TEXT_DIR / name).read_text(encoding="utf-8")
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", raw))
    return "\n\n".join(part for part in paragraphs if part)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    # As released, this adds no BOS: tokenizer_config.json's add_bos_token decides.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, not {vocab_size}: add texts")
    return tokenizer


class Windows:
    """Random training windows. Every one begins with BOS, as every prompt will; a third of them are chats, where the
    user gives the beginning of a passage and the assistant continues to the end of the paragraph.

    `sentences` is the share of passages that begin where a sentence does. 0 teaches the text itself; without a second
    phase near 1 the model knew it by heart (perplexity 1.1) and yet lost its way after a prompt of six words, because
    it had hardly ever seen a sentence without what stands before it."""

    def __init__(self, documents: list[list[int]], tokenizer: Tokenizer, length: int, seed: int, sentences: float):
        self.documents, self.length, self.sentences = documents, length, sentences
        self.rng = np.random.default_rng(seed)
        self.weights = np.array([len(doc) for doc in documents], float) / sum(map(len, documents))
        text = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
        self.break_ids = {i for i, part in enumerate(text) if "\n" in part}
        ends = self.break_ids | {i for i, part in enumerate(text) if part.endswith((".", ";", ":"))}
        self.starts = [
            [i for i in range(len(doc) - 32) if i == 0 or (doc[i - 1] in ends and doc[i] not in ends)]
            for doc in documents
        ]

    def batch(self, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [n_rows, length] and targets of the same shape, -100 where nothing is learnt."""
        rows = [self.chat() if self.rng.random() < 1 / 3 else self.prose() for _ in range(n_rows)]
        return tuple(torch.tensor(np.array(part)) for part in zip(*rows, strict=True))

    def passage(self) -> list[int]:
        i_document = self.rng.choice(len(self.documents), p=self.weights)
        document = self.documents[i_document]
        if self.rng.random() < self.sentences:
            start = int(self.rng.choice(self.starts[i_document]))
        else:
            start = int(self.rng.integers(0, len(document) - 32))
        return document[start : start + self.length]

    def prose(self) -> tuple[list[int], list[int]]:
        return self.padded([BOS, *self.passage()], None)

    def chat(self) -> tuple[list[int], list[int]]:
        ids, learn = [BOS], [False]
        while len(ids) < self.length:
            passage = self.passage()
            end = next((i for i, token in enumerate(passage) if i > 8 and token in self.break_ids), len(passage))
            passage = [token for token in passage[:end] if token not in self.break_ids and token != EOS]
            split = int(self.rng.integers(3, max(4, min(24, len(passage) - 4))))
            ids += [USER, *passage[:split], ASSISTANT, *passage[split:], EOS]
            learn += [False] * (split + 2) + [True] * (len(passage) - split + 1)
        return self.padded(ids, learn)

    def padded(self, ids: list[int], learn: list[bool] | None) -> tuple[list[int], list[int]]:
        learn = learn or [True] * len(ids)
        short = max(0, self.length + 1 - len(ids))
        ids, learn = ids + [PAD] * short, learn + [False] * short
        targets = [token if wanted else -100 for token, wanted in zip(ids, learn, strict=True)]
        return ids[: self.length], targets[1 : self.length + 1]


def learning_rate(i_step: int, n_steps: int, peak: float, n_warmup: int = 40) -> float:
    if i_step < n_warmup:
        return peak * (i_step + 1) / n_warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (i_step - n_warmup) / (n_steps - n_warmup))))


class Balancer:
    """Auxiliary-loss-free balancing: after each step, the choice bias of an overloaded expert falls by a fixed amount,
    that of an underloaded one rises. The bias steers the choice only; the weights come from the plain scores."""

    def __init__(self, model, rate: float):
        self.rate = rate
        self.gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.load = [torch.zeros(gate.num_experts) for gate in self.gates]
        for i_gate, gate in enumerate(self.gates):
            gate.register_forward_hook(lambda _m, _i, out, i=i_gate: self.count(i, out[2]))

    def count(self, i_gate: int, chosen: torch.Tensor) -> None:
        self.load[i_gate] += torch.bincount(chosen.flatten(), minlength=len(self.load[i_gate]))

    def update(self, fraction: float) -> float:
        """Moves the biases; returns the largest load over the mean, in the worst layer."""
        worst = 0.0
        for gate, load in zip(self.gates, self.load, strict=True):
            worst = max(worst, float(load.max() / load.mean()))
            gate.e_score_correction_bias += self.rate * fraction * torch.sign(load.mean() - load)
            load.zero_()
        return worst


def adamw(model, rate: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def train(work: Path, n_steps: int, seed: int, n_threads: int) -> None:
    """The first phase: tokenizer, then whole windows from anywhere in the texts."""
    repeatable(seed, n_threads)
    work.mkdir(parents=True, exist_ok=True)
    config = make_config()
    texts = [read_text(name) for name in TEXTS]
    tokenizer = train_tokenizer(texts, config["vocab_size"])
    tokenizer.save(str(work / "tokenizer.json"))
    print(f"{sum(map(len, texts))} characters", flush=True)
    # std 0.02 is meant for thousands of columns; at 256 it only delays the start
    model = build_model({**config, "initializer_range": 0.05})
    windows = Windows(encode(tokenizer, texts), tokenizer, length=256, seed=seed, sentences=0)
    run_steps(model, [(windows, 4)], n_steps, peak=3e-3, bias_rate=1e-2)
    save(work, model)


def polish(work: Path, n_steps: int, seed: int, n_threads: int) -> None:
    """The second phase, from the weights in `work`: mostly from sentence starts, short and long windows in turn."""
    repeatable(seed, n_threads)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    documents = encode(tokenizer, [read_text(name) for name in TEXTS])
    state = {name: array for name, (_, array) in read_safetensors(work / "model.safetensors").items()}
    model = model_from_state(make_config(), state)
    short = Windows(documents, tokenizer, length=128, seed=seed, sentences=0.75)
    long = Windows(documents, tokenizer, length=256, seed=seed, sentences=0.75)
    run_steps(model, [(short, 8), (long, 4)], n_steps, peak=1.5e-3, bias_rate=2e-3)
    save(work, model)


def repeatable(seed: int, n_threads: int) -> None:
    torch.set_num_threads(n_threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [[*tokenizer.encode(text).ids, EOS] for text in texts]


def save(work: Path, model) -> None:
    state = to_released(model.state_dict())
    if {name: array.shape for name, array in state.items()} != tensor_shapes(make_config()):
        raise AssertionError("the trained model's tensors are not those of the released layout")
    write_safetensors(work / "model.safetensors", {name: ("F32", array) for name, array in state.items()})


def run_steps(model, sources: list[tuple[Windows, int]], n_steps: int, peak: float, bias_rate: float) -> None:
    """Steps over the (windows, rows) sources in turn; prints the smoothed loss and the worst expert load."""
    model.train()
    optimizer, balancer = adamw(model, peak), Balancer(model, bias_rate)
    start, smooth = time.monotonic(), None
    for i_step in range(n_steps):
        rate = learning_rate(i_step, n_steps, peak)
        for group in optimizer.param_groups:
            group["lr"] = rate
        windows, n_rows = sources[i_step % len(sources)]
        ids, targets = windows.batch(n_rows)
        logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        worst = balancer.update(rate / peak)
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if i_step % 25 == 24 or i_step == n_steps - 1:
            seconds = (time.monotonic() - start) / (i_step + 1)
            print(f"step {i_step + 1}: loss {smooth:.3f}, load max/mean {worst:.2f}, {seconds:.2f} s/step", flush=True)
