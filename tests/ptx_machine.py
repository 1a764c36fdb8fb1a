"""An interpreter for the PTX of our kernels: runs what nvcc compiled, one thread at a time, on a machine without a GPU.

Knows the instructions that occur; any other is an error, as is any access outside the given memory or off its alignment."""

import re
import struct
from collections.abc import Callable

import numpy as np

GPU_NAN = 0x7FFFFFFF  # what an arithmetic instruction on a GPU answers instead of a number
REGISTER_WIDTH = {"%rs": 16, "%r": 32, "%f": 32, "%rd": 64}
WIDTH = {"pred": 1, "8": 8, "16": 16, "32": 32, "64": 64}


def _float_operation(operate: Callable[[np.float32, np.float32], np.float32]) -> Callable[[int, int], int]:
    def on_bits(a: int, b: int) -> int:
        x, y = np.array([a, b], np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            result = np.float32(operate(x, y))
        return GPU_NAN if np.isnan(result) else int(result.view(np.uint32))

    return on_bits


# Operands are unsigned integers of the instruction's width; results are cut to it.
OPERATIONS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "mov.high": lambda a: a >> 16,  # the upper half of a pair
    "cvt": lambda a: a,  # between unsigned integers
    "cvta.to.global": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "mul.wide": lambda a, b: a * b,
    "mad.lo": lambda a, b, c: a * b + c,
    "not": lambda a: ~a,
    "div": lambda a, b: a // b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "selp": lambda a, b, p: a if p else b,
    "setp.eq": lambda a, b: a == b,
    "setp.ne": lambda a, b: a != b,
    "setp.lt": lambda a, b: a < b,
    "setp.le": lambda a, b: a <= b,
    "setp.gt": lambda a, b: a > b,
    "setp.ge": lambda a, b: a >= b,
    "mul.rn.f32": _float_operation(lambda a, b: a * b),
    "add.rn.f32": _float_operation(lambda a, b: a + b),
}
UNSIGNED_ONLY = ("cvt", "div", "min", "max", "shr", "mul.wide", "setp.lt", "setp.le", "setp.gt", "setp.ge")


def _operation_name(name: str, kind: str) -> str:
    """With its type where other types would need another operation: floats unless they are only moved, signed numbers."""
    moved = name.startswith(("mov", "selp", "ld.", "st."))
    signed = name in UNSIGNED_ONLY and "s" in kind
    return f"{name}.{kind}" if signed or (kind.startswith("f") and not moved) else name


class Memory:
    """Buffers at addresses of our choice; bytes between them do not exist."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, bytearray]] = []

    def place(self, address: int, content: bytes) -> bytearray:
        self.buffers.append((address, bytearray(content)))
        return self.buffers[-1][1]

    def access(self, address: int, size: int) -> tuple[bytearray, int]:
        assert address % size == 0, f"{size} bytes at {address:#x}: not aligned"
        for start, content in self.buffers:
            if start <= address and address + size <= start + len(content):
                return content, address - start
        raise AssertionError(f"{size} bytes at {address:#x}: no memory there")


class Kernel:
    """One entry point of a PTX text."""

    def __init__(self, text: str, entry: str) -> None:
        body = re.search(rf"\.entry {entry}\(.*?\n\{{\n(.*?)\n\}}", text, re.S)
        assert body, f"no entry {entry}"
        self.code: list[tuple[str, str, str, list[str]]] = []  # guard, opcode, type, operands
        self.labels: dict[str, int] = {}
        self.executed: set[int] = set()
        for line in body[1].split("\n"):
            line = line.split("//")[0].strip()
            if label := re.fullmatch(r"(\$\w+):", line):
                self.labels[label[1]] = len(self.code)
            elif line and not line.startswith("."):
                self.code.append(self._parsed(line))

    @staticmethod
    def _parsed(line: str) -> tuple[str, str, str, list[str]]:
        if high := re.fullmatch(r"\{ \.reg \.b16 tmp; mov\.b32 \{tmp, (%rs\d+)\}, (%r\d+); \}", line):
            return "", "mov.high", "b16.b32", [high[1], high[2]]
        parsed = re.fullmatch(r"(?:@(!?%p\d+)\s+)?([\w.]+)\s*(.*);", line)
        if parsed is None:
            return "", line, "", []  # an unknown instruction
        guard, opcode, operands = parsed.groups()
        typed = re.fullmatch(r"(.*?)\.((?:pred|[busf]\d+)(?:\.[busf]\d+)?)", opcode)
        name, kind = typed.groups() if typed else (opcode, "")
        return guard or "", name, kind, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)

    def unknown_instructions(self) -> list[str]:
        """A later nvcc may choose others."""
        known = (
            *OPERATIONS,
            "ret",
            "bra",
            "bra.uni",
            "ld.param",
            "ld.global",
            "st.global",
            "ld.global.v4",
            "st.global.v4",
        )
        return sorted({_operation_name(name, kind) for _, name, kind, _ in self.code} - {*known})

    def run(self, memory: Memory, parameters: bytes, block: int, thread: int) -> None:
        registers: dict[str, int] = {"%ctaid.x": block, "%tid.x": thread}
        at = 0
        while True:
            guard, name, kind, operands = self.code[at]
            self.executed.add(at)
            at += 1
            if guard and registers[guard.lstrip("!")] != (not guard.startswith("!")):
                continue
            if name == "ret":
                return
            if name in ("bra", "bra.uni"):
                at = self.labels[operands[0]]
            elif name.startswith(("ld.", "st.")):
                self._move(name, kind, operands, registers, memory, parameters)
            else:
                self._compute(name, kind, operands, registers)

    @staticmethod
    def _value(operand: str, registers: dict[str, int]) -> int:
        if operand.startswith("%"):
            return registers[operand]
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        return int(operand, 0)

    def _compute(self, name: str, kind: str, operands: list[str], registers: dict[str, int]) -> None:
        operation = OPERATIONS[_operation_name(name, kind)]
        to, *rest = kind.split(".")
        width = WIDTH[to.lstrip("busf")]
        values = [self._value(o, registers) for o in operands[1:]]
        if name == "selp":
            values = [values[0], values[1], values[2] & 1]
        elif name not in ("shl", "shr"):
            values = [v & ((1 << WIDTH[(rest or [to])[0].lstrip("busf")]) - 1) for v in values]
        if name.startswith("setp"):
            width = 1
        elif name == "mul.wide":
            width *= 2
        registers[operands[0]] = operation(*values) & ((1 << width) - 1)

    def _move(
        self, name: str, kind: str, operands: list[str], registers: dict[str, int], memory: Memory, parameters: bytes
    ) -> None:
        direction, space, *vector = name.split(".")
        size = int(kind[1:]) // 8
        place = operands[0] if direction == "st" else operands[1]
        names = (operands[1] if direction == "st" else operands[0]).strip("{}").replace(",", " ").split()
        assert len(names) == (int(vector[0][1:]) if vector else 1)
        base, offset = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", place).groups()
        at = int(offset or 0)
        if space == "param":
            content = bytearray(parameters)
        else:
            assert space == "global"
            content, at = memory.access(registers[base] + at, size * len(names))
        for i, register in enumerate(names):
            where = slice(at + i * size, at + (i + 1) * size)
            if direction == "ld":
                value = int.from_bytes(content[where], "little", signed=kind.startswith("s"))
                registers[register] = value & ((1 << REGISTER_WIDTH[re.sub(r"\d+", "", register)]) - 1)
            else:
                content[where] = (registers[register] & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def job(codes: int, scales: int, out: int, n_rows: int, k: int, block_rows: int, block_k: int) -> bytes:
    """Fp8Job of cpp/cuda/fp8_expand_body.h."""
    return struct.pack("<8Q", codes, scales, out, n_rows, k, block_rows, block_k, -(-k // block_k))
