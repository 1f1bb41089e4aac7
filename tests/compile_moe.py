"""Compiles every kernel of the expert layer ahead of time, as it would be launched. Run: python -m tests.compile_moe ARCH...

In a process of its own, for the rest of the tests interprets kernels. The layer runs on tensors without data while its
launches are written down. Prints a line a kernel: name, architecture, registers, bytes of shared memory, bytes of stack.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from pmlkit.moe import launch as launching

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
Launch = tuple[Any, tuple[Any, ...], dict[str, int]]


def source_of(kernel: Any, arguments: tuple[Any, ...]) -> Any:
    """Return what Triton would compile for a launch with these arguments."""
    values = dict(zip(kernel.arg_names, arguments, strict=True))
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    types = {name: "constexpr" if name in fixed else type_of(value) for name, value in values.items()}
    place = kernel.arg_names.index
    aligned = {
        (place(name),): [["tt.divisibility", 16]]
        for name, value in values.items()
        if name not in fixed and (isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0))
    }
    constants = {(place(name),): values[name] for name in fixed}
    return triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)


def type_of(value: Any) -> str:
    """Return Triton's name of an argument's type."""
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def usage(cubin: bytes) -> tuple[int, int]:
    """Return registers of a thread, and bytes of local memory: what the compiler had no registers for."""
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(dump), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (max(int(size) for size in re.findall(rf"{what}:(\d+)", text)) for what in ("REG", "STACK"))
    return registers, stack


def main(architectures: list[int]) -> None:
    """Compile for every architecture the kernels of a large batch, and those of a small one."""
    seen: list[Launch] = []
    launching.launch = lambda kernel, grid, *arguments, **options: seen.append((kernel, arguments, options))
    from tests.moe_launches import everything  # its kernels' files take the name above

    done = set()
    for routes in (12288, 192):
        everything(routes)
    for kernel, arguments, options in seen:
        source = source_of(kernel, arguments)
        for arch in architectures:
            if (what := (source.hash(), arch, *options.items())) in done:
                continue
            done.add(what)
            compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            registers, stack = usage(compiled.asm["cubin"])
            sys.stdout.write(f"{kernel.__name__} {arch} {registers} {compiled.metadata.shared} {stack}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main([int(arch) for arch in sys.argv[1:]])
