"""Which safetensors files make up a directory, and the table of all their tensors. Single files: safetensors.py."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

from ..errors import CheckpointError
from .config import read_json
from .safetensors import TensorRef, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_tensors(directory: Path) -> dict[str, TensorRef]:
    """Every tensor of the checkpoint by its released name. The headers are the truth; the index must agree."""
    if (directory / SINGLE).exists():  # the order transformers uses
        return _merge([directory / SINGLE])
    if not (directory / INDEX).exists():
        raise CheckpointError(_nothing_here(directory))
    index_path = directory / INDEX
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{index_path}: no "weight_map" object in it: download the file again')
    for name in weight_map.values():
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"{index_path}: shard name {name!r} is not a file name: download the file again")
    tensors = _merge([_shard_path(directory, index_path, name) for name in dict.fromkeys(weight_map.values())])
    for tensor, shard in weight_map.items():
        if tensor not in tensors:
            raise CheckpointError(
                f"{index_path}: says that tensor {tensor!r} is in {shard}, but it is not:"
                f" index and shards are of different versions, download both again"
            )
    return tensors


def _shard_path(directory: Path, index_path: Path, name: str) -> Path:
    """The index is text from the outside: its names must stay inside. Links are fine, the hub cache is made of them."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)  # a backslash is no separator here, but never honest
    is_absolute = posix.is_absolute() or windows.drive or windows.root
    if is_absolute or ".." in posix.parts or ".." in windows.parts or "\0" in name:
        raise CheckpointError(
            f"{index_path}: shard name {name!r} points outside the directory; only names inside it are followed:"
            f" do not use this checkpoint, or correct the index"
        )
    path = directory / name
    if not path.is_file():
        broken = " (the link is broken)" if path.is_symlink() else ""
        raise CheckpointError(f"{path}: this shard is named in {INDEX} but missing{broken}: download it")
    return path


def _merge(paths: list[Path]) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for path in paths:
        for ref in read_header(path):
            other = tensors.setdefault(ref.name, ref)
            if other is not ref:
                raise CheckpointError(
                    f"tensor {ref.name!r} is in two shards, {other.path.name} and {path}:"
                    f" remove the stale file or download the checkpoint again"
                )
    return tensors


def _nothing_here(directory: Path) -> str:
    if any(directory.glob("*.safetensors")):
        return f"{directory}: has safetensors files but no {INDEX}: download it, it says which files belong together"
    if any(directory.glob("pytorch_model*.bin")):
        return f"{directory}: has only PyTorch .bin weights: get the safetensors files of this model"
    return f"{directory}: has neither {SINGLE} nor {INDEX}: download the weights"
