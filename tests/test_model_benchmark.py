"""The model benchmark: its file is a model that both hosts run, each host is what it says, and wrong logits are not timed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hybrid_moe_ext import OptionError, PluginError
from hybrid_moe_ext.bench import ModelResult
from hybrid_moe_ext.bench import model as model_module
from hybrid_moe_ext.bench.model_file import ModelShape, model_file
from hybrid_moe_ext.checkpoint import trailer
from hybrid_moe_ext.cli import bench as cli_module
from hybrid_moe_ext.cli import run as command_line
from hybrid_moe_ext.info import OURS, describe_model
from hybrid_moe_ext.options import Options

SMALL = ModelShape(
    n_layer=2, n_embd=256, n_ff=256, n_expert=8, n_used=2, n_head=4, n_head_kv=2, head_dim=64, n_vocab=320
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(model_module, "N_PROMPT", 24)
    monkeypatch.setattr(model_module, "N_GENERATED", 3)
    monkeypatch.setattr(model_module, "ModelShape", lambda: SMALL)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K", "FP8"])
def test_the_file_is_what_it_says(tmp_path, kind):
    path = model_file(tmp_path, kind, SMALL)
    info = describe_model(path)
    assert (info.architecture, info.n_layer, info.n_expert, info.n_expert_used) == ("qwen3moe", 2, 8, 2)
    assert list(info.parts["experts"].types) == [{"FP8": "F8_E4M3"}.get(kind, kind)]
    if kind == "FP8":
        assert info.experts_on == OURS and len(trailer.read_entries(path)) == 6
    before = path.stat().st_mtime_ns
    assert model_file(tmp_path, kind, SMALL) == path and path.stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_with_and_without_the_plug_in(tmp_path):
    results = list(model_module.bench_model(["Q8_0", "FP8"], 1, 1, Options(), tmp_path))
    found = {(r.kind, r.engine, r.test) for r in results}
    assert found == {("Q8_0", engine, test) for engine in ("hybrid-moe", "llama.cpp") for test in ("pp24", "tg3")} | {
        ("FP8", "hybrid-moe", test) for test in ("pp24", "tg3")
    }
    assert all(r.seconds > 0 and r.tokens_per_s > 0 for r in results)


def test_wrong_logits_are_not_timed(tmp_path, monkeypatch):
    true = np.load
    monkeypatch.setattr(model_module.np, "load", lambda path: true(path) * (1.5 if path.stem == "hybrid-moe" else 1))
    with pytest.raises(PluginError, match="Q8_0: logits differ"):
        list(model_module.bench_model(["Q8_0"], 1, 1, Options(), tmp_path))


def test_a_host_that_ends_says_why(tmp_path):
    path = model_file(tmp_path, "Q8_0", SMALL)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(PluginError, match="does not load"):
        list(model_module.bench_model(["Q8_0"], 1, 1, Options(), tmp_path))


def test_refusals(tmp_path):
    with pytest.raises(OptionError, match="FP8"):
        list(model_module.bench_model(["FP9"], 1, 1, Options(), tmp_path))
    with pytest.raises(OptionError, match="does not exist"):
        list(model_module.bench_model(["FP8"], 1, 1, Options(), tmp_path / "nowhere"))


def test_command_line(tmp_path, capfd, monkeypatch):
    arguments = ["bench", "model", "--types", "q8_0", "--rounds", "1", "--threads", "1", "--folder", str(tmp_path)]
    assert command_line([*arguments, "--json"]) == 0
    told = [ModelResult(**r) for r in json.loads(capfd.readouterr().out)["results"]]
    assert {r.engine for r in told} == {"hybrid-moe", "llama.cpp"}
    told = [replace(r, seconds=2.0 if r.engine == "llama.cpp" else 1.6) for r in told]
    monkeypatch.setattr(cli_module, "bench_model", lambda *_: told)
    assert command_line(arguments) == 0
    table = capfd.readouterr().out
    assert "vs llama.cpp" in table and table.count("1.25x") == 2
