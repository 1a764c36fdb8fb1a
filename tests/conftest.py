"""Environment of all tests, and the paths of what several of them use."""

import os
from pathlib import Path

os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml's crash handler starts a debugger, which can hang
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "models" / "tiny-deepseek-v3-fp8"
