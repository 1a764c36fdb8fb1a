"""The plug-in library: found, registered with llama-cpp-python, and its C functions typed. No models here."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import llama_cpp.llama_cpp as C

from .errors import OptionError, PluginError
from .options import ENV_PREFIX, Options, origin
from .patched import check as check_llama
from .patched import set_switches
from .patched.source import RELEASE

DEVICE = "HybridMoE"
PINNED_LLAMA_CPP_PYTHON = RELEASE

_lock = threading.Lock()
# Options that the plug-in reads once, when it is loaded: those it tells back, and those of streaming.
_TOLD = ("isa", "team", "pin")
STREAMING = ("slp", "devices", "cpu_help", "vram_share", "ring_mib", "copy_threads", "pinned_gib")
_PER_PROCESS = _TOLD + STREAMING


class Counters(NamedTuple):
    """What the plug-in has done since the process started."""

    n_matmuls: int
    n_rows: int  # token rows x experts
    weight_bytes: int
    n_dot_experts: int
    n_gemm_experts: int
    n_layers: int  # whole blocks; the matmuls in them are counted above too


@dataclass(frozen=True)
class Status:
    """Which kernels run, what runs the threads and where."""

    isa: str
    team: str
    host: str  # ggml's version
    pin: str


class ExpertTensorC(ctypes.Structure):
    """hybrid_moe_expert_tensor of cpp/plugin/api.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int32),
        ("n_expert", ctypes.c_int64),
        ("n_rows", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("scale_type", ctypes.c_int32),
        ("block_rows", ctypes.c_int64),
        ("block_k", ctypes.c_int64),
        ("code_file", ctypes.POINTER(ctypes.c_int32)),
        ("code_offset", ctypes.POINTER(ctypes.c_uint64)),
        ("scale_file", ctypes.POINTER(ctypes.c_int32)),
        ("scale_offset", ctypes.POINTER(ctypes.c_uint64)),
    ]


class MatrixC(ctypes.Structure):
    """hybrid_moe_matrix of cpp/plugin/api.h."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("n_rows", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("block_rows", ctypes.c_int64),
        ("block_k", ctypes.c_int64),
    ]


# hybrid_moe::WeightType and hybrid_moe::ScaleType
WEIGHT_TYPES = {
    "F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "FP8": 4,
    "Q4_0": 5, "Q4_K": 6, "Q5_K": 7, "Q6_K": 8, "IQ4_XS": 9, "MXFP4": 10, "NVFP4": 11,
}  # fmt: skip
SCALE_TYPES = {"F32": 0, "BF16": 1, "F8_E8M0": 2}

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "hybrid_moe_error": (ctypes.c_char_p, []),
    "hybrid_moe_refusal": (ctypes.c_char_p, []),
    "hybrid_moe_take_failure": (ctypes.c_char_p, []),
    "hybrid_moe_isa": (ctypes.c_char_p, []),
    "hybrid_moe_team": (ctypes.c_char_p, []),
    "hybrid_moe_pin": (ctypes.c_char_p, []),
    "hybrid_moe_available_isas": (ctypes.c_char_p, []),
    "hybrid_moe_counters": (None, [ctypes.POINTER(ctypes.c_uint64)]),
    "hybrid_moe_machine": (ctypes.c_char_p, [ctypes.c_char_p] * 3),
    "hybrid_moe_pretend_machine": (ctypes.c_int, [ctypes.c_char_p] * 3),
    "hybrid_moe_choose_experts_memory": (ctypes.c_int, [ctypes.c_char_p]),
    "hybrid_moe_copies": (ctypes.c_char_p, []),
    "hybrid_moe_stream_report": (ctypes.c_char_p, []),
    "hybrid_moe_record": (None, [ctypes.c_int64]),
    "hybrid_moe_recorded": (ctypes.c_char_p, [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
    "hybrid_moe_stream_allow": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int]),
    "hybrid_moe_stream_first": (None, [ctypes.c_int]),
    "hybrid_moe_pretend_cpu": (None, [ctypes.c_void_p]),
    "hybrid_moe_table_new": (ctypes.c_void_p, [ctypes.c_int]),
    "hybrid_moe_table_add_file": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]),
    "hybrid_moe_table_add_tensor": (ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(ExpertTensorC)]),
    "hybrid_moe_load_begin": (None, [ctypes.c_void_p]),
    "hybrid_moe_load_end": (ctypes.c_int, []),
    "hybrid_moe_table_free": (None, [ctypes.c_void_p]),
    "hybrid_moe_matmul": (
        ctypes.c_int,
        [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(MatrixC), ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p],
    ),
    "hybrid_moe_expand": (ctypes.c_int, [ctypes.c_char_p, ctypes.POINTER(MatrixC), ctypes.c_void_p]),
    "hybrid_moe_has_nan": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]),
    "hybrid_moe_measure_read": (ctypes.c_double, [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]),
    "hybrid_moe_measure_fma": (ctypes.c_double, [ctypes.c_int, ctypes.c_int]),
    "hybrid_moe_measure_team": (
        ctypes.c_int,
        [ctypes.c_char_p, ctypes.c_int, ctypes.c_double, ctypes.c_int, ctypes.c_double, ctypes.c_int, ctypes.c_void_p],
    ),
    "hybrid_moe_cuda_kernels": (ctypes.c_char_p, []),
    "hybrid_moe_judge_version": (ctypes.c_char_p, [ctypes.c_char_p]),
}


def library_path() -> Path:
    """The plug-in file, for hosts that load back ends by path (GGML_BACKEND_PATH). HYBRID_MOE_LIBRARY names another build."""
    if other := os.environ.get("HYBRID_MOE_LIBRARY"):
        return Path(other)
    return Path(__file__).parent / "lib" / "libggml-hybrid-moe.so"


@functools.cache
def library() -> Any:
    """The plug-in's C functions. Loading the file does not register it with any host."""
    path = library_path()
    if not path.exists():
        raise PluginError(f"{path} is missing: this installation is incomplete, install hybrid-moe-ext again")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise PluginError(f"{path} cannot be loaded ({error}): install hybrid-moe-ext again on this machine") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def sentence(text: bytes) -> str:
    return text.decode("utf-8", "replace").removeprefix("hybrid-moe: ")


def check(result: Any) -> Any:
    """Raises PluginError when a function of the plug-in reports failure by a negative number."""
    if result is None or result < 0:
        raise PluginError(sentence(library().hybrid_moe_error()))
    return result


# ggml's functions through libllama's own handle: the package carries several copies of the libraries under several
# names, and only the copies that libllama is bound to hold the registry it uses.
def ggml_function(name: str, result: Any, arguments: list[Any]) -> Any:
    """A function object of its own: setting types on the library's would change them for everybody else."""
    try:
        return ctypes.CFUNCTYPE(result, *arguments)((name, C._lib))
    except AttributeError as error:
        raise PluginError(f"llama-cpp-python's libraries have no function {name}: {_reinstall()}") from error


def _reinstall() -> str:
    return f"install the tested release, llama-cpp-python=={PINNED_LLAMA_CPP_PYTHON}"


def device_handle() -> int | None:
    """ggml's handle of our device in this process, or None while it is not registered."""
    return ggml_function("ggml_backend_dev_by_name", ctypes.c_void_p, [ctypes.c_char_p])(DEVICE.encode())


def buffer_type_handle() -> int:
    """Our buffer type, for tensor_buft_overrides."""
    return ggml_function("ggml_backend_dev_buffer_type", ctypes.c_void_p, [ctypes.c_void_p])(device_handle())


def register(options: Options | None = None) -> Status:
    """Loads the plug-in into llama-cpp-python, once per process; further calls only report.

    Raises PluginError when this llama-cpp-python cannot take it (which goes on working without us) and OptionError
    when `options` or the environment ask for something unknown, or for kernels other than the loaded ones.
    """
    options = options or Options.resolve()
    check_llama()
    set_switches()
    lib = library()
    _check_isa(options, lib)
    with _lock:
        if not device_handle():
            _load(options, lib)
    isa, team, pin = (f().decode() for f in (lib.hybrid_moe_isa, lib.hybrid_moe_team, lib.hybrid_moe_pin))
    status = Status(isa=isa, team=team, host=host_version(), pin=pin)
    for name in _PER_PROCESS:
        wanted = getattr(options, name)
        loaded = getattr(status, name) if name in _TOLD else _streaming.get(name, "auto")
        if wanted not in ("auto", loaded):
            raise OptionError(
                f"{name}={wanted!r} comes too late: this process runs {loaded!r}; choose it before the first use"
            )
    return status


_streaming: dict[str, str] = {}  # what the plug-in was loaded with


def loaded_options(options: Options) -> Options:
    """The same with what this process streams by, where `options` leave it open."""
    loaded = {name: value for name, value in _streaming.items() if getattr(options, name) == "auto"}
    return dataclasses.replace(options, **loaded)


def _check_isa(options: Options, lib: Any) -> None:
    available = lib.hybrid_moe_available_isas().decode().split()
    if options.isa not in ("auto", *available):
        raise OptionError(
            f"{origin('isa', options.isa)}={options.isa!r} does not run on this CPU: choose one of auto, {', '.join(available)}"
        )


def _load(options: Options, lib: Any) -> None:
    installed = importlib.metadata.version("llama_cpp_python")
    C.llama_backend_init()
    with _environment(**{ENV_PREFIX + name.upper(): getattr(options, name) for name in _PER_PROCESS}):
        loaded = ggml_function("ggml_backend_load", ctypes.c_void_p, [ctypes.c_char_p])(str(library_path()).encode())
    _streaming.update({name: getattr(options, name) for name in STREAMING})
    if not loaded:
        reason = (
            sentence(lib.hybrid_moe_refusal()) or f"llama-cpp-python {installed} refused the plug-in: {_reinstall()}"
        )
        raise PluginError(f"{reason}; choose a folder that exists" if ": No such file" in reason else reason)


class _environment:
    """Sets variables that the plug-in reads while it is loaded, and puts the old ones back; "auto" unsets."""

    def __init__(self, **values: str):
        self._values = values

    def __enter__(self) -> None:
        self._saved = {name: os.environ.get(name) for name in self._values}
        for name, value in self._values.items():
            self._set(name, None if value == "auto" else value)

    def __exit__(self, *_: object) -> None:
        for name, value in self._saved.items():
            self._set(name, value)

    @staticmethod
    def _set(name: str, value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def load_named_backend() -> str:
    """Loads what GGML_BACKEND_PATH names, unless that is the plug-in (see `register`). The path if that fails, else ""."""
    path = os.environ.get("GGML_BACKEND_PATH", "")
    if not path or Path(path).name == library_path().name:
        return ""
    C.llama_backend_init()
    return "" if ggml_function("ggml_backend_load", ctypes.c_void_p, [ctypes.c_char_p])(os.fsencode(path)) else path


def host_version() -> str:
    return ggml_function("ggml_version", ctypes.c_char_p, [])().decode()


def counters() -> Counters:
    out = (ctypes.c_uint64 * 6)()
    library().hybrid_moe_counters(out)
    return Counters(*out)


def allow_streaming(devices: bytes | None, cpu_may_help: bool) -> None:
    """What long batches of this process may use from now on: of the devices that stream those named, such as b"CUDA0,CUDA1"
    (None: all), and whether the CPU computes a part. Raises PluginError for a device that nothing streams to."""
    check(library().hybrid_moe_stream_allow(devices, int(cpu_may_help)))


def put_this_thread_first() -> None:
    """Its batches wait for no device that others stream to, and allow_streaming does not bind them."""
    library().hybrid_moe_stream_first(1)


class ExpertTable:
    """The plug-in's table of which file bytes stand for which tensor. Use it as a context around one load."""

    def __init__(self, copied: bool):
        self._lib = library()
        self._handle = self._lib.hybrid_moe_table_new(int(copied))
        self._files: dict[Path, int] = {}
        self.n_tensors = 0
        self.n_bound = 0

    def add(self, tensor: Any) -> None:
        """`tensor`: a checkpoint.ExpertTensor."""
        fp8 = tensor.scales is not None
        kind = "FP8" if fp8 else tensor.ggml_type.name
        c = ExpertTensorC(name=tensor.name.encode(), type=WEIGHT_TYPES[kind], n_expert=tensor.n_expert)
        c.n_rows, c.k = tensor.n_rows, tensor.k
        c.code_file, c.code_offset = self._ranges(tensor.codes)
        if fp8:
            c.block_rows, c.block_k = tensor.block
            c.scale_type = SCALE_TYPES[tensor.scales[0].dtype]
            c.scale_file, c.scale_offset = self._ranges(tensor.scales)
        check(self._lib.hybrid_moe_table_add_tensor(self._handle, c))
        self.n_tensors += 1

    def _ranges(self, refs: Iterable[Any]) -> tuple[Any, Any]:
        refs = list(refs)
        files = (ctypes.c_int32 * len(refs))(*(self._file(ref.path) for ref in refs))
        offsets = (ctypes.c_uint64 * len(refs))(*(ref.offset for ref in refs))
        return files, offsets

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = check(self._lib.hybrid_moe_table_add_file(self._handle, os.fsencode(path)))
        return self._files[path]

    def __enter__(self) -> ExpertTable:
        self._lib.hybrid_moe_load_begin(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.n_bound = self._lib.hybrid_moe_load_end()
        self._lib.hybrid_moe_table_free(self._handle)
        self._handle = None


__all__ = ["DEVICE", "Counters", "ExpertTable", "Status", "counters", "library_path", "llama_cpp", "register"]
