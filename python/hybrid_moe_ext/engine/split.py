"""Two GPUs, two models: whether each worker gets layers on a GPU of its own. Decided here, loaded by models.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OptionError
from ..gpus import Gpu

# Of a GPU's free memory, what the layers without their experts may take: keys, values and batches need the rest.
_MOST_OF_FREE = 0.9


@dataclass(frozen=True)
class Split:
    """Which GPU has the layers of which worker. Both empty: one model serves both workers, because of `why`."""

    prefill: str = ""
    decode: str = ""
    why: str = ""

    @property
    def is_on(self) -> bool:
        return bool(self.decode)

    def __str__(self) -> str:
        if not self.is_on:
            return f"one model serves prefill and decode: {self.why}"
        return (
            f"prefill on {self.prefill}, decode on {self.decode}: the model is there twice, its experts in host memory once"
            f"{f' ({self.why})' if self.why else ''}"
        )


def choose_split(mode: str, gpus: Sequence[Gpu], dense_bytes: int | None, obstacle: str) -> Split:
    """`mode`: the option split_gpus. `gpus`: that stream. `dense_bytes`: what both GPUs must have room for, None: it is no model
    whose experts stream. `obstacle`: an option or circumstance that rules it out, or "". Raises OptionError for mode "on" where
    it cannot be."""
    if mode == "off":
        return Split(why="split_gpus=off")
    found = Split(why=obstacle) if obstacle else _pair(gpus, dense_bytes)
    if mode == "on" and not found.is_on:
        raise OptionError(f"split_gpus='on' is not possible: {found.why}; leave it out, or choose 'auto'")
    return found


def _pair(gpus: Sequence[Gpu], dense_bytes: int | None) -> Split:
    """The first GPU with room is the prefill worker's, the last one the decode worker's."""
    if dense_bytes is None:
        return Split(why="no experts are streamed")
    # One card may be there by two back ends (CUDA0 and Vulkan0): those of the first are told apart for certain.
    same = [gpu for gpu in gpus if _family(gpu) == _family(gpus[0])]
    if len(same) < 2:
        return Split(why="there are no two GPUs" if len(gpus) < 2 else "there are no two GPUs of one back end")
    able = [gpu.name for gpu in same if dense_bytes <= _MOST_OF_FREE * gpu.memory()[0]]
    if len(able) < 2:
        return Split(
            why=f"{dense_bytes / 2**30:.1f} GiB, the layers without their experts, fit on {able[0] if able else 'none'} of "
            f"{', '.join(gpu.name for gpu in same)}" + (" alone" if able else "")
        )
    return Split(able[0], able[-1])


def _family(gpu: Gpu) -> str:
    return gpu.name.rstrip("0123456789")
