"""What this CPU can do, as far as a compiler makes use of it. Reads /proc/cpuinfo, nothing else."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# x86 lists mitigations and virtualisation as well, which change with the kernel; -march=native looks at these.
_COMPILED_FOR = (
    "sse", "ssse", "pni", "avx", "fma", "f16c", "bmi", "abm", "amx", "movbe", "popcnt", "aes", "vaes", "gfni", "vpclmul",
    "pclmul", "sha", "adx", "xsave",
)  # fmt: skip


def cpu_features() -> tuple[str, ...]:
    """Sorted; empty where the kernel tells nothing."""
    try:
        with _CPUINFO.open() as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return tuple(sorted({flag for flag in value.split() if flag.startswith(_COMPILED_FOR)}))
                if name.strip() == "Features":  # ARM
                    return tuple(sorted(set(value.split())))
    except OSError:
        pass
    return ()
