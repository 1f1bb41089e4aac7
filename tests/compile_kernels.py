"""Compiles every kernel of a loss ahead of time, as it would be launched. Run: python -m tests.compile_kernels LOSS ARCH...

In a process of its own, for the rest of the tests interprets kernels. Prints a line a kernel: name, type, rows,
architecture, bytes of shared memory.
"""

import importlib
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from pmlkit.losses.fused import plan_of
from pmlkit.losses.launch import Launch, Shape

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
SETTINGS = {"contrastive": (0.0, 1.0), "batch_hard_triplet": (0.05,), "ntxent": (0.07,), "proxy_anchor": (0.1, 32.0)}


def launches(name: str, rows: int, dtype: torch.dtype, reference_set: bool) -> list[tuple[Launch, list[str]]]:
    """Return the launches of a forward and backward pair, each with the types of its tensors."""
    importlib.import_module(f"pmlkit.losses.{name}")
    proxies = name == "proxy_anchor"
    others = 1024 if proxies or reference_set else rows
    other = torch.float32 if proxies else dtype
    plan = plan_of(name, Shape(rows, others, 128, dtype, other, proxies or reference_set, SETTINGS[name]))
    x, z = TYPES[dtype], TYPES[other]
    seen = [(launch, [x, "*i64", z, "*i64", "*fp64", "*fp32"]) for launch in plan.forward]
    sides = [(x, z), (z, x)]
    seen += [
        (launch, ["*fp32", a, "*i64", b, "*i64", "*fp64", a]) for launch, (a, b) in zip(plan.backward, sides, strict=False)
    ]
    return seen


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


def main(name: str, architectures: list[int]) -> None:
    """Compile for every architecture in bfloat16; for compute capability 9.0 also what else differs."""
    cases = [(512, torch.bfloat16, arch, False) for arch in architectures]
    cases += [(512, torch.float32, 90, False), (32768, torch.bfloat16, 90, False), (512, torch.bfloat16, 90, True)]
    cases += [(32768, torch.float32, 100, False)]
    for rows, dtype, arch, reference_set in cases:
        for launch, tensors in launches(name, rows, dtype, reference_set):
            options = {"num_warps": launch.tiles.warps, "num_stages": launch.tiles.stages}
            compiled: Any = triton.compile(source_of(launch, tensors), target=GPUTarget("cuda", arch, 32), options=options)
            kernel = launch.kernel.__name__
            # Triton 3.7.1 can make an empty kernel without an error: its body is then `unreachable` alone.
            assert "st.global" in compiled.asm["ptx"] and "unreachable" not in compiled.asm["llir"], (kernel, arch)
            sys.stdout.write(f"{kernel} {dtype} {rows} {arch} {compiled.metadata.shared}\n")


if __name__ == "__main__":
    main(sys.argv[1], [int(arch) for arch in sys.argv[2:]])
