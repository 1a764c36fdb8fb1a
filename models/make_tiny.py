#!/usr/bin/env python3
"""Tiny models in released layout: the command line and the importable names. The work is in tiny_*.py beside it.

    make_tiny.py train  --work WORK                    train the demo model, keep float32 weights in WORK
    make_tiny.py polish --work WORK                    second training phase, on the weights in WORK
    make_tiny.py write  --work WORK --out DIR          quantise and write the release
    make_tiny.py golden --out DIR                      reference logits and greedy continuations into DIR
    make_tiny.py report --out DIR                      perplexity and expert load
    make_tiny.py random --out DIR --dtype fp8 --set n_routed_experts=5 --set n_group=1 ...

`random` needs NumPy only; the others need torch, transformers and tokenizers. Importable: make_config, write_release,
read_state, random_state_dict, write_random, quantise, dequantise, and (torch) reference_model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))  # the tiny_* siblings are no package: scripts and tests import them as they lie

from tiny_config import ARCHS, make_config, parse_fields, random_state_dict, tensor_shapes  # noqa: E402
from tiny_fp8 import dequantise, quantise  # noqa: E402
from tiny_release import read_config, read_safetensors, read_state, read_stored, write_release  # noqa: E402
from tiny_tokenizer import tokenizer_files  # noqa: E402

__all__ = [
    "dequantise",
    "make_config",
    "quantise",
    "random_state_dict",
    "read_config",
    "read_state",
    "read_stored",
    "reference_model",
    "tensor_shapes",
    "tokenizer_files",
    "write_random",
    "write_release",
]

DEMO = HERE / "tiny-deepseek-v3-fp8"
# Small enough for seconds, and every matrix keeps its role; the vocabulary is the demo's, cut.
RANDOM_DEFAULTS = {"vocab_size": 512, "num_hidden_layers": 2, "intermediate_size": 320}


def reference_model(directory):
    """The float32 transformers model of a written directory (torch is imported only here)."""
    import tiny_reference

    return tiny_reference.reference_model(directory)


def write_random(directory, arch="deepseek_v3", dtype="fp8", seed=0, shard_count=2, **fields) -> dict:
    """A random-weight checkpoint in released layout; returns its config. dtype: fp8, bf16 or f32."""
    if dtype not in ("fp8", "bf16", "f32"):
        raise ValueError(f"dtype {dtype!r}: choose fp8, bf16 or f32")
    config = make_config(arch, **{**RANDOM_DEFAULTS, **fields})
    files = tokenizer_files(DEMO / "tokenizer.json", config)
    plain_dtype = "F32" if dtype == "f32" else "BF16"
    state = random_state_dict(config, seed)
    write_release(directory, config, state, files, dtype == "fp8", shard_count, plain_dtype)
    return config


def write_trained(work: Path, out: Path, dtype: str) -> None:
    config = make_config()
    state = {name: array for name, (_, array) in read_safetensors(work / "model.safetensors").items()}
    files = tokenizer_files(work / "tokenizer.json", config)
    write_release(out, config, state, files, dtype == "fp8", 2, "F32" if dtype == "f32" else "BF16")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, n_steps, about in (("train", 900, "first training phase"), ("polish", 250, "second training phase")):
        train = commands.add_parser(name, help=about)
        train.add_argument("--work", type=Path, required=True, help="where float32 weights and the tokenizer are kept")
        train.add_argument("--steps", type=int, default=n_steps)
        train.add_argument("--seed", type=int, default=1)
        train.add_argument("--threads", type=int, default=2, help="part of what makes a run repeatable")
    write = commands.add_parser("write", help="quantise the trained weights and write the release")
    write.add_argument("--work", type=Path, required=True)
    for command in (write, commands.add_parser("golden"), commands.add_parser("report")):
        command.add_argument("--out", type=Path, default=DEMO, help="the release directory")
    write.add_argument("--dtype", choices=("fp8", "bf16", "f32"), default="fp8")
    random = commands.add_parser("random", help="a random-weight checkpoint")
    random.add_argument("--arch", choices=sorted(ARCHS), default="deepseek_v3")
    random.add_argument("--out", type=Path, required=True)
    random.add_argument("--dtype", choices=("fp8", "bf16", "f32"), default="fp8")
    random.add_argument("--seed", type=int, default=0)
    random.add_argument("--shards", type=int, default=2)
    random.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config field, JSON value")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.command == "random":
        try:
            write_random(args.out, args.arch, args.dtype, args.seed, args.shards, **parse_fields(args.set))
        except ValueError as error:
            raise SystemExit(f"make_tiny.py: {error}") from None
    elif args.command in ("train", "polish"):
        import tiny_train

        phase = tiny_train.train if args.command == "train" else tiny_train.polish
        phase(args.work, args.steps, args.seed, args.threads)
    elif args.command == "write":
        write_trained(args.work, args.out, args.dtype)
    elif args.command == "golden":
        import tiny_golden

        tiny_golden.write_golden(args.out)
    else:
        import tiny_golden
        import tiny_train

        tiny_golden.report(args.out, {n: tiny_train.read_text(n) for n in (*tiny_train.TEXTS, tiny_train.HELD_OUT)})


if __name__ == "__main__":
    main()
