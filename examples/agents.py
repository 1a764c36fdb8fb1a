"""Agents that take turns: what the engine's store of finished sequences (store_mib) is worth on a machine.

python examples/agents.py MODEL --store-mib 4096        (a GGUF file or a Hugging Face directory; 0: without)

Each conversation begins with a long prompt of random tokens; a later turn is all that came before, the answer and a new message.
"""

import argparse
import random
import statistics
import sys

from hybrid_moe_ext import HybridMoeError
from hybrid_moe_ext.engine import Engine, Request, RequestMetrics, Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--store-mib", type=float, default=4096)
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the first message")
    parser.add_argument("--message", type=int, default=50, help="tokens of the others")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    o = parser.parse_args()
    try:
        with Engine(o.model, n_ctx=o.n_ctx, n_parallel=1, store_mib=o.store_mib) as engine:
            turns = play(engine, o)
            told = engine.metrics()
    except HybridMoeError as error:
        sys.exit(f"error: {error}")
    for i, turn in enumerate(turns):
        computed = sum(m.n_prompt - m.n_reused for m in turn)
        stored = sum(m.n_stored for m in turn)
        in_cells = sum(m.n_reused for m in turn) - stored
        ttft = [m.ttft_s for m in turn]
        print(
            f"turn {i + 1}: TTFT median {statistics.median(ttft):.2f} s, longest {max(ttft):.2f} s; tokens of prompts: "
            f"{computed} computed, {in_cells} in cells, {stored} from the store"
        )
    held, written = told.store_bytes_now / 2**20, told.store_written_bytes / 2**20
    print(f"store: {held:.0f} MiB held, {written:.0f} MiB written, {told.store_evictions} evictions")


def play(engine: Engine, o: argparse.Namespace) -> list[list[RequestMetrics]]:
    """All conversations' first turns, then all their second ones, and so on."""
    chance = random.Random(0)

    def message(n: int) -> list[int]:
        return [chance.randrange(engine.n_vocab) for _ in range(n)]

    texts = [message(o.prompt) for _ in range(o.conversations)]
    sampling = Sampling(temperature=0, ignore_eos=True)
    engine.submit(Request(message(64), max_tokens=2, sampling=sampling)).result()  # weights are read, threads are there
    turns = []
    for _ in range(o.turns):
        turns.append([])
        for i, text in enumerate(texts):
            result = engine.submit(Request(text, max_tokens=o.answer, sampling=sampling)).result()
            turns[-1].append(result.finish.metrics)
            texts[i] = text + result.tokens + message(o.message)
    return turns


if __name__ == "__main__":
    main()
