"""tokenizer.json and its neighbours -> the vocabulary a GGUF carries. Byte-level BPE; the cutting: pretokenizers.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from ..errors import CheckpointError, UnsupportedModelError
from .config import Fields, read_json
from .pretokenizers import recognise


@dataclass(frozen=True)
class Vocabulary:
    pre: str  # llama.cpp's name of the pre-tokenizer
    tokens: list[str]
    types: list[TokenType]
    merges: list[str]  # "left right"
    bos: int | None
    eos: list[int]  # the first is *the* end, all end a generation
    pad: int | None
    add_bos: bool
    add_eos: bool
    chat_template: str | None

    def write(self, w: gguf.GGUFWriter) -> None:
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre(self.pre)
        w.add_token_list(self.tokens)
        w.add_token_types(self.types)
        w.add_token_merges(self.merges)
        # GGUF has room for three ends; llama.cpp also knows the usual ones by their text.
        adders = (w.add_eos_token_id, w.add_eot_token_id, w.add_eom_token_id)
        for add, token in zip(adders, self.eos, strict=False):
            add(token)
        if self.bos is not None:
            w.add_bos_token_id(self.bos)
        if self.pad is not None:
            w.add_pad_token_id(self.pad)
        w.add_add_bos_token(self.add_bos)
        w.add_add_eos_token(self.add_eos)
        if self.chat_template:
            w.add_chat_template(self.chat_template)


def read_vocabulary(directory: Path, config: Fields, n_vocab: int) -> Vocabulary:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path}: is missing: download it (tiktoken or SentencePiece files are not enough)")
    root = Fields(path, read_json(path))
    model = _check_model(root)
    settings = _optional(directory / "tokenizer_config.json")
    generation = _optional(directory / "generation_config.json")
    tokens, types = _tokens(root, model, n_vocab)
    ids = {token: i for i, token in enumerate(tokens)}
    add_bos, add_eos = (_adds(root, settings, name) for name in ("bos", "eos"))
    eos = _token_ids("eos", ids, settings, (generation, config))
    if not eos:
        raise CheckpointError(f"{config.path}: no eos_token_id here or in generation_config.json: nothing would end")
    bos = _token_ids("bos", ids, settings, (config, generation))
    pad = _token_ids("pad", ids, settings, (config, generation))
    if add_bos and not bos:
        raise CheckpointError(f"{settings.path}: add_bos_token is true, but no bos_token is named: add it")
    return Vocabulary(
        pre=recognise(path, root.values.get("pre_tokenizer")),
        tokens=tokens,
        types=types,
        merges=_merges(path, model),
        bos=bos[0] if bos else None,
        eos=eos,
        pad=pad[0] if pad else None,
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=_chat_template(directory, settings),
    )


def _optional(path: Path) -> Fields:
    return Fields(path, read_json(path) if path.exists() else {})


def _check_model(root: Fields) -> Fields:
    model = root.child("model")
    if model is None:
        raise root.fail("model", "but is required")
    model.only("type", ("BPE",), "byte-level BPE", default="BPE")
    for key in ("byte_fallback", "ignore_merges"):
        model.only(key, (False,), "byte-level BPE", default=False)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        model.only(key, ("",), "byte-level BPE", default="")
    normalizer = root.child("normalizer")
    if normalizer is not None and normalizer.values not in ({"type": "Sequence", "normalizers": []}, {"type": "NFC"}):
        raise root.unsupported("normalizer", "text must not be changed before it is cut")
    decoder = root.child("decoder")
    if decoder is not None:
        decoder.only("type", ("ByteLevel",), "byte-level BPE")
    return model


def _tokens(root: Fields, model: Fields, n_vocab: int) -> tuple[list[str], list[TokenType]]:
    """Every id below `n_vocab`. llama.cpp aborts the process when two ids have one text, so that is refused here."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab or not all(type(i) is int for i in vocab.values()):
        raise model.fail("vocab", "but must map tokens to ids")
    by_id: dict[int, tuple[str, TokenType]] = {i: (token, TokenType.NORMAL) for token, i in vocab.items()}
    for entry in root.items("added_tokens", []):
        added = Fields(root.path, entry if isinstance(entry, dict) else {}, "added_tokens.")
        token, i = added.text("content"), added.count("id", least=0)
        for key in ("lstrip", "rstrip", "single_word"):
            added.only(key, (False,), f"token {token!r}; GGUF cannot express it", default=False)
        control = added.flag("special", default=False) or _looks_special(token)
        by_id[i] = (token, TokenType.CONTROL if control else TokenType.USER_DEFINED)
    if min(by_id) < 0 or max(by_id) >= n_vocab:
        i = min(by_id) if min(by_id) < 0 else max(by_id)
        raise CheckpointError(
            f"{root.path}: token {by_id[i][0]!r} has the id {i}, outside the vocab_size {n_vocab} of config.json:"
            f" the files are of different models, download both again"
        )
    padding = ((f"[PAD{i}]", TokenType.UNUSED) for i in range(n_vocab))
    entries = [by_id.get(i, pad) for i, pad in enumerate(padding)]
    tokens = [token for token, _ in entries]
    if len(set(tokens)) != n_vocab or "" in tokens:
        counts = Counter(tokens)
        bad = next(token for token in tokens if not token or counts[token] > 1)
        raise CheckpointError(f"{root.path}: token {bad!r} is empty or has two ids, which llama.cpp cannot load")
    return tokens, [kind for _, kind in entries]


def _looks_special(token: str) -> bool:
    """<|...|> with either bar. Releases forget the flag (DeepSeek's User token); llama.cpp's converter looks too."""
    return any(token.startswith("<" + bar) and token.endswith(bar + ">") for bar in ("|", "\uff5c"))


def _merges(path: Path, model: Fields) -> list[str]:
    merges = []
    for merge in model.items("merges"):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(half, str) and half and " " not in half for half in pair):
            raise CheckpointError(f"{path}: merge {merge!r} is not a pair of byte-level tokens: download it again")
        merges.append(f"{pair[0]} {pair[1]}")
    return merges


def _token_ids(name: str, ids: dict[str, int], settings: Fields, configs: tuple[Fields, ...]) -> list[int]:
    """Ids from `<name>_token_id` of the first file that has it, else from the text in tokenizer_config.json."""
    for fields in configs:
        value = fields.values.get(f"{name}_token_id")
        found = value if isinstance(value, list) else [value]
        if value is None or not found:
            continue
        if not all(type(i) is int and 0 <= i < len(ids) for i in found):
            raise fields.fail(f"{name}_token_id", f"but must be an id below {len(ids)}")
        return list(dict.fromkeys(found))
    token = settings.values.get(f"{name}_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return []
    if not isinstance(text, str) or text not in ids:
        raise settings.fail(f"{name}_token", "but tokenizer.json has no such token")
    return [ids[text]]


def _adds(root: Fields, settings: Fields, name: str) -> bool:
    """tokenizer_config.json decides; without its word the post-processor's template does."""
    if settings.values.get(f"add_{name}_token") is not None:
        return settings.flag(f"add_{name}_token")
    processor = root.child("post_processor")
    nested = [] if processor is None else processor.items("processors", [processor.values])
    template = next((p.get("single") for p in nested if _is_template(p)), None)
    if not isinstance(template, list) or not template:
        return False
    return "SpecialToken" in template[0 if name == "bos" else -1]


def _is_template(processor: Any) -> bool:
    return isinstance(processor, dict) and processor.get("type") == "TemplateProcessing"


def _chat_template(directory: Path, settings: Fields) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    for fields in (settings, _optional(directory / "chat_template.json")):
        template = fields.values.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        if isinstance(template, str):
            return template
        if template is not None:
            raise UnsupportedModelError(f"{fields.path}: chat_template is not text: use the file of the release")
    return None
