"""Asks a model one question and says where its experts ran.

python examples/chat.py MODEL "Why is the sky blue?"        (a GGUF file or a Hugging Face directory)
"""

import sys

from hybrid_moe_ext import HybridMoeError, Llama, counters


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        llm = Llama(sys.argv[1], n_ctx=512, verbose=False)
    except HybridMoeError as error:
        sys.exit(f"error: {error}")
    for part in llm.create_chat_completion([{"role": "user", "content": sys.argv[2]}], max_tokens=128, stream=True):
        print(part["choices"][0]["delta"].get("content", ""), end="", flush=True)
    print()
    n = counters().n_matmuls
    print(f"{n} expert products on HybridMoE ({llm.status.isa})" if n else "no expert ran here", file=sys.stderr)


if __name__ == "__main__":
    main()
