"""One prompt through the plug-in and a text after it, in a process of its own: the environment names the libraries and switches.

    python prompt.py MODEL [SIMGPU]     (JSON: devices, tokens, logits of the prompt's last token, layers that were streamed)

With the library of the simulated GPU, attention runs there and the experts are streamed to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "simgpu"))

N_PROMPT, N_TEXT = 400, 24
WORDS = b"Everyone is permitted to copy and distribute verbatim copies of this license document, but changing it is not allowed. "


def main(model: str, simgpu: str = "") -> None:
    import hybrid_moe_ext  # first: it decides which llama.cpp is loaded
    from hybrid_moe_ext import streamed

    options = {"slp": "on", "cpu_help": "off"} if simgpu else {}
    if simgpu:
        import host

        assert host.load(simgpu.encode()), "the simulated GPU did not load"
    llm = hybrid_moe_ext.Llama(
        model, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, n_threads_batch=1, verbose=False, **options
    )
    tokens = llm.tokenize(WORDS * 20)[:N_PROMPT]
    assert len(tokens) == N_PROMPT
    before = streamed.report()
    llm.reset()
    llm.eval(tokens)
    streams = streamed.between(before, streamed.report()).layers if simgpu else 0
    logits = llm._ctx.get_logits_ith(-1)[: llm.n_vocab()]
    text = [token for token, _ in zip(llm.generate(tokens, temp=0.0), range(N_TEXT), strict=False)]
    print(json.dumps({"devices": llm.placement.devices, "tokens": text, "logits": list(logits), "streamed": streams}))


if __name__ == "__main__":
    main(*sys.argv[1:])
