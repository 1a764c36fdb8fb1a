"""A program that holds ggml itself: reached when it exports its symbols, told how when it does not."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hybrid_moe_ext import library_path

SOURCE = Path(__file__).parent.parent / "cpp" / "fake_host.c"


@pytest.mark.parametrize(
    "flags, expected", [(["-rdynamic"], "init 0: loaded"), ([], "must export it (link it with -rdynamic")]
)
def test_symbols_of_the_program_itself(tmp_path, flags, expected):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    program = tmp_path / "host"
    subprocess.run([compiler, "-w", '-DVERSION="0.25.3"', *flags, "-o", program, SOURCE, "-ldl"], check=True)
    done = subprocess.run([program, library_path()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and expected in done.stdout + done.stderr
