"""Compiles every kernel of a loss ahead of time, as it would be launched. Run: python -m tests.compile_kernels LOSS ARCH...

In a process of its own, for the rest of the tests interprets kernels. Prints a line a kernel: name, type, rows,
architecture, bytes of shared memory, bytes of stack.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from pmlkit.losses.fused import plan_of
from pmlkit.losses.launch import Launch
from pmlkit.losses.tiling import Shape

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
SETTINGS = {"contrastive": (0.0, 1.0), "batch_hard_triplet": (0.05,), "ntxent": (0.07,), "proxy_anchor": (0.1, 32.0)}


def launches(name: str, rows: int, dtype: torch.dtype, reference_set: bool, width: int = 128) -> list[tuple[Launch, list[str]]]:
    """Return the launches of a forward and backward pair, each with the types of its tensors."""
    importlib.import_module(f"pmlkit.losses.{name}")
    proxies = name == "proxy_anchor"
    others = 1024 if proxies or reference_set else rows
    other = torch.float32 if proxies else dtype
    plan = plan_of(name, Shape(rows, others, width, dtype, other, proxies or reference_set, SETTINGS[name]))
    x, z = TYPES[dtype], TYPES[other]
    seen = [(launch, [x, "*i64", z, "*i64", "*fp64", "*fp32"]) for launch in plan.forward]
    # The last one is for both sides, which the others have one of.
    return [*seen, (plan.backward[-1], ["*fp32", x, z, "*fp64", x, z])]


def source_of(launch: Launch, tensors: list[str]) -> Any:
    """Return what Triton would compile for the launch."""
    values = dict(zip(launch.kernel.arg_names, [*tensors, *launch.rest], strict=True))
    fixed = set(launch.kernel.arg_names[len(tensors) + len(launch.numbers) :])
    kinds = {int: "i32", float: "fp32"}
    types = {
        name: "constexpr" if name in fixed else value if isinstance(value, str) else kinds[type(value)]
        for name, value in values.items()
    }
    place = launch.kernel.arg_names.index
    aligned = {
        (place(name),): [["tt.divisibility", 16]]
        for name, value in values.items()
        if name not in fixed and (isinstance(value, str) or (isinstance(value, int) and value % 16 == 0))
    }
    constants = {(place(name),): values[name] for name in fixed}
    return triton.compiler.ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=aligned)


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of local memory a thread has: what the compiler had no registers for."""
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([str(dump), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))


def main(name: str, architectures: list[int]) -> None:
    """Compile for every architecture in bfloat16; for some also what else differs: type, size, width, a reference set."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    cases = [(512, bf16, arch, False, 128) for arch in architectures]
    cases += [(512, fp32, 90, False, 128), (32768, bf16, 90, False, 128), (512, bf16, 90, True, 128)]
    cases += [(32768, fp32, 100, False, 128), (32768, fp32, 120, False, 128)]
    cases += [(512, fp16, 90, False, 100), (20000, fp32, 120, False, 300)]
    for rows, dtype, arch, reference_set, width in cases:
        for launch, tensors in launches(name, rows, dtype, reference_set, width):
            source, target = source_of(launch, tensors), GPUTarget("cuda", arch, 32)
            compiled: Any = triton.compile(source, target=target, options=launch.options)
            kernel, stack = launch.kernel.__name__, stack_bytes(compiled.asm["cubin"])
            # Triton 3.7.1 can make an empty kernel without an error: its body is then `unreachable` alone.
            assert "st.global" in compiled.asm["ptx"] and "unreachable" not in compiled.asm["llir"], (kernel, arch)
            sys.stdout.write(f"{kernel} {dtype} {rows} {arch} {compiled.metadata.shared} {stack}\n")


if __name__ == "__main__":
    main(sys.argv[1], [int(arch) for arch in sys.argv[2:]])
