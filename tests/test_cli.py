"""The command `hybrid-moe` as its users call it: exit codes, what is on stdout and stderr, and no tracebacks."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hybrid_moe_ext
from checkpoint_fixtures import write_checkpoint
from hybrid_moe_ext.checkpoint import open_checkpoint
from hybrid_moe_ext.options import Options

COMMAND = [sys.executable, "-c", "from hybrid_moe_ext.cli import main; main()"]
README = Path(__file__).parent.parent / "README.md"
MODEL_CONTEXT = 512  # of checkpoint_fixtures' models


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "fp8"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def gguf_model(model) -> Path:
    path = model.parent / "f32.gguf"
    bf16 = model.parent / "bf16"
    write_checkpoint(bf16, "BF16")
    open_checkpoint(bf16).virtual_gguf("f32").write(path)
    return path


def call(*arguments: object, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """With one thread: on a busy machine ggml's threads wait for each other, a hundred times longer than they work."""
    if "-n" in arguments and "-t" not in arguments:
        arguments += ("-t", 1)
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, timeout=120, env=os.environ | environment
    )


def refusal(*arguments: object, **more) -> str:
    """The one line that wrong input gets."""
    done = call(*arguments, **more)
    assert done.returncode == 2, done.stderr
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1, done.stderr
    assert done.stderr.startswith(b"error: ")
    return done.stderr.decode()


@pytest.mark.parametrize("kind", ["model", "gguf_model"])
def test_run_streams_text_and_reports_where_experts_ran(kind, request):
    done = call("run", request.getfixturevalue(kind), "-p", "the", "-n", 5, "--isa", "scalar")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"\n")
    lines = done.stderr.decode().splitlines()  # nothing of llama.cpp's log, no progress bar
    assert [line.split(":")[0] for line in lines] == ["prefill", "decode", "device", "experts"]
    assert lines[3] == "experts: HybridMoE (scalar)"
    assert re.fullmatch(r"prefill: \d+ tokens, [\d.]+ tokens/s, first token after [\d.]+ s", lines[0])
    assert re.fullmatch(r"decode: 4 tokens, [\d.]+ tokens/s", lines[1])


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [
        (["-ngl", 99], True),
        (["--slp", "on"], True),
        (["--pinned-gib", 3], True),
        (["--slp", "off"], False),
        (["-ngl", 0], False),
    ],
)
def test_options_that_need_a_gpu_are_not_dropped_in_silence(model, flags, is_said):
    done = call("run", model, "-p", "the", "-n", 2, *flags)
    assert done.returncode == 0, done.stderr
    assert (b"placement: no experts are streamed: this host has no GPU\n" in done.stderr) == is_said


def test_more_tokens_per_pass_than_the_context_has_are_not_taken_in_silence(model):
    done = call("run", model, "-p", "the", "-n", 2, "-c", 64, "-ub", 100000)
    assert b"tokens per pass: 64, all of the context, not the 100000 of -ub\n" in done.stderr
    assert json.loads(call("run", model, "-p", "the", "-n", 2, "--json", "-ub", 64).stdout)["remarks"] == []


def test_json_is_one_object_and_counts_expert_products(model):
    done = call("run", model, "-p", "the", "-n", 3, "-t", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    result = json.loads(done.stdout)
    assert result["tokens"] == 3 and result["finish"] == "length" and result["threads"] == 1
    assert result["prompt_tokens"] == 2  # BOS, "the"
    assert result["experts_on"] == "HybridMoE"
    assert result["expert_matmuls"] == 3 * 2 * 3  # passes x MoE layers x projections: no pass too many
    assert result["prefill_tps"] > 0 and result["decode_tps"] > 0
    assert result["ttft_s"] == pytest.approx(2 / result["prefill_tps"]) and result["passes"] == 1
    assert result["prefill"] is None and result["placement"]["devices"] == []  # no GPU here


def test_same_text_streamed_and_as_json(model):
    arguments = "run", model, "-p", "in the", "-n", 12, "-t", 1
    streamed = call(*arguments).stdout.decode()
    assert streamed == json.loads(call(*arguments, "--json").stdout)["text"] + "\n"


def test_seed_decides_a_sampled_text(model):
    def sample(seed: int) -> str:
        return json.loads(call("run", model, "-p", "a", "-n", 16, "--temp", 1, "--seed", seed, "--json").stdout)["text"]

    assert sample(1) == sample(1) != sample(2)


def test_prompt_from_stdin_loses_one_newline(model):
    def n_tokens(stdin: bytes) -> int:
        done = call("run", model, "-p", "-", "-n", 1, "--json", stdin=stdin)
        return json.loads(done.stdout)["prompt_tokens"]

    assert n_tokens(b"abc") == n_tokens(b"abc\n") == n_tokens(b"abc\n\n") - 1


def test_chat_applies_the_template(tmp_path, model):
    def n_tokens(*flags: str) -> int:
        return json.loads(call("run", tmp_path, "-p", "ab", "-n", 1, "--json", *flags).stdout)["prompt_tokens"]

    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ bos_token }}<{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert n_tokens("--chat") == n_tokens() + 2  # < and >; BOS once
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert "no chat template" in refusal("run", tmp_path, "-p", "ab", "--chat")


def test_text_stops_when_the_context_is_full(model):
    done = call("run", model, "-p", "abcdefg", "-c", 12, "--temp", 1, "--seed", 5, "--json", "-t", 1)
    result = json.loads(done.stdout)
    assert result["prompt_tokens"] + result["tokens"] <= 12
    assert result["finish"] == "context"


def test_tokens_per_pass(model):
    arguments = "run", model, "-p", "abcdefghi", "-n", 2, "-t", 1, "--json"
    whole, cut = (json.loads(call(*arguments, *flags).stdout) for flags in ((), ("-ub", 3, "-ngl", 0)))
    assert whole["text"] == cut["text"] and whole["prompt_tokens"] == cut["prompt_tokens"] == 10
    assert (whole["passes"], cut["passes"]) == (1, 4)
    for result in (whole, cut):  # and one pass for the second token; MoE layers, projections
        assert result["expert_matmuls"] == (result["passes"] + 1) * 2 * 3


def test_verbose_shows_the_log(model):
    assert b"llama_model_loader" in call("run", model, "-p", "a", "-n", 1, "--verbose").stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fo"], "--fo"),
        (["-n", "0"], "-n"),
        (["-n", "-3"], "-n"),
        (["-n", "many"], "-n"),
        (["--temp", "-1"], "--temp"),
        (["--temp", "nan"], "--temp"),
        (["--temp", "inf"], "--temp inf"),
        (["-t", "0"], "--threads"),
        (["-c", "0"], "--ctx"),
        (["-ub", "0"], "--ubatch"),
        (["-ngl", "-2"], "--n-gpu-layers"),
        (["--slp", "maybe"], "choose one of auto"),
        (["--devices", "CUDA0"], "this host has none"),
        (["-c", str(MODEL_CONTEXT + 1)], "trained for: ask for less"),
        (["-c", str(10**12)], "trained for"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "a" * 40, "-c", "20"], "the prompt has 41 tokens, but a context of 20"),
        (["-p", b"\xff"], "not valid UTF-8"),
        (["--isa", "avx3"], "choose one of auto"),
        (["--dense-type", "q3"], "choose one of bf16"),
    ],
)
def test_bad_flags_get_one_line(model, arguments, expected):
    prompt = [] if "-p" in arguments else ["-p", "a"]
    done = subprocess.run([*COMMAND, "run", model, *prompt, *arguments], capture_output=True, timeout=120)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1
    assert expected in done.stderr.decode()


def test_bad_stdin_prompts_get_one_line(model):
    assert "empty" in refusal("run", model, "-p", "-")
    assert "not UTF-8" in refusal("run", model, "-p", "-", stdin=b"\xff\xfe")


@pytest.mark.parametrize("command", [["run", "-p", "a"], ["info"]])
def test_bad_models_get_one_line(command, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0\1")
    (tmp_path / "directory").mkdir()
    assert "does not exist" in refusal(*command, tmp_path / "missing")
    assert "no GGUF" in refusal(*command, tmp_path / "empty")
    assert "no GGUF" in refusal(*command, tmp_path / "text")
    assert "cut off" in refusal(*command, tmp_path / "cut.gguf")
    assert f"{tmp_path}/directory/config.json: is missing" in refusal(*command, tmp_path / "directory")
    (tmp_path / "a.safetensors").touch()
    assert "give the folder it lies in" in refusal(*command, tmp_path / "a.safetensors")
    if command != ["info"]:  # which without a model is about llama.cpp
        assert f"MODEL'. (see hybrid-moe {command[0]} --help)" in refusal(*command)


@pytest.mark.parametrize("command", [["run", "-p", "a"], ["info"]])
def test_unknown_variables_and_values_get_one_line(command, model):
    assert "did you mean HYBRID_MOE_ISA?" in refusal(*command, model, HYBRID_MOE_ISO="avx2")
    assert "HYBRID_MOE_ISA='avx3' is not possible: choose one of auto" in refusal(
        *command, model, HYBRID_MOE_ISA="avx3"
    )
    assert "HYBRID_MOE_DEVICES='X0': there is no GPU" in refusal(*command, model, HYBRID_MOE_DEVICES="X0")


def test_a_file_that_cannot_be_written_gets_one_sentence(model):
    for variable in ("HYBRID_MOE_TRACE", "HYBRID_MOE_STATS"):
        said = refusal("run", model, "-p", "a", **{variable: "/nowhere/x.json"})
        assert said.count("cannot be written") == 1 and "choose a folder that exists" in said and "(" not in said


def test_a_back_end_that_does_not_load_is_named(model):
    assert "GGML_BACKEND_PATH=/nowhere/x.so cannot be loaded" in refusal(
        "run", model, "-p", "a", GGML_BACKEND_PATH="/nowhere/x.so"
    )


def test_benchmarks_check_their_input_before_they_measure():
    assert "unknown type 'FP9'" in refusal("bench", "layer", "--types", "FP9")
    assert "unknown shape 'tiny'" in refusal("bench", "kernels", "--shapes", "tiny")
    assert "digits only, it is no number (see hybrid-moe fits --help)" in refusal("fits", "qwen3-30b", "--vram", "32GB")


def test_command_alone_prints_help():
    done = call()
    assert done.returncode == 2 and b"Commands:" in done.stdout and done.stderr == b""


def test_version():
    assert call("--version").stdout.decode() == f"hybrid-moe-ext {hybrid_moe_ext.__version__}\n"


@pytest.mark.parametrize("arguments", [["run", "-p", "a", "-t1"], ["run", "-p", "a", "--json", "-t1"], ["info"]])
def test_closed_stdout_is_quiet(model, arguments):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, *arguments, model], stdout=write, stderr=subprocess.PIPE, timeout=120)
    os.close(write)
    assert done.returncode == 141 and done.stderr == b""


def test_ctrl_c_while_generating_is_quiet(model):
    process = subprocess.Popen(
        [*COMMAND, "run", model, "-p", "a", "-n", "500", "--temp", "1", "-t", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # the text has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")


def test_terminal_gets_a_progress_bar(model):
    ours, theirs = pty.openpty()
    command = [*COMMAND, "run", model, "-p", "a", "-n", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # EIO: the other end is closed
            break
        if not piece:
            break
        shown += piece
    assert process.wait(timeout=60) == 0
    assert b"loading" in shown and b"100%" in shown
    assert shown.index(b"100%") < shown.index(b"experts: ")


def test_demo_runs_the_bundled_model(tmp_path):
    command = [*COMMAND, "demo", "--isa", "scalar", "-t", "1"]
    done = subprocess.run(command, capture_output=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"experts: HybridMoE (scalar)\n" in done.stderr
    assert done.stdout.startswith(b"The licenses for most software")
    words = re.findall(r"[a-z]+", done.stdout.decode())
    assert len(words) > 20 and words.count("the") >= 2, done.stdout  # English prose


def test_info_prints_lines_and_json(model):
    lines = call("info", model).stdout.decode().splitlines()
    assert lines[2] == "experts:      2 of 4 per token"
    assert any(re.search(r"experts .* on HybridMoE +F8_E4M3", line) for line in lines)
    told = json.loads(call("info", model, "--json").stdout)
    assert told["format"] == "hf" and told["fp8_block"] == [128, 128]
    assert told["parts"]["experts"]["runs_on"] == "HybridMoE"


def test_readme_lists_every_option_as_it_is():
    text = README.read_text()
    rows = [
        f"| `{name}` | `--{name.replace('_', '-')}` | `{variable}` | {', '.join(f'`{c}`' for c in choices)} | {help_} |"
        for name, variable, choices, help_ in Options.describe()
    ]
    for row in rows:
        assert row in text, f"README.md lacks this row: {row}"


def test_help_lists_every_option():
    for command in ("run", "demo"):
        text = call(command, "--help").stdout.decode()
        for name, variable, _, _ in Options.describe():
            assert f"--{name.replace('_', '-')}" in text and variable in text


def test_run_reports_what_it_holds_in_memory(model):
    done = call("run", model, "-p", "the", "-n", 3, "--experts-memory", "copy")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.decode().splitlines()
    assert [line.split(":")[0] for line in lines[:5]] == ["prefill", "decode", "device", "experts", "memory"]
    assert re.fullmatch(r"memory: [\d.]+ MiB of [\d.]+ MiB of experts copied, .*", lines[4])
    assert re.fullmatch(r"node \d+: [\d.]+ MiB wanted, .* there", lines[5])
    held = json.loads(call("run", model, "-p", "the", "-n", 3, "--experts-memory", "copy", "--json").stdout)["copies"]
    assert 0 < held["copied"] <= held["planned"] and held["troubles"] == []
    assert json.loads(call("run", model, "-p", "the", "-n", 3, "--json").stdout)["copies"] is None
