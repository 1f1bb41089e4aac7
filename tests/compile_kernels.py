"""Compiles every kernel of a loss ahead of time, as it would be launched. Run: python -m tests.compile_kernels LOSS ARCH...

In a process of its own, for the rest of the tests interprets kernels. Prints a line a kernel: name, type, rows,
architecture, bytes of shared memory.
"""

import importlib
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from pmlkit.losses import fused, tiling

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
# A loss's numbers in the order of its constructor, then whether TF32 is allowed.
SETTINGS = {
    "contrastive": [0.0, 1.0, 0.0],
    "batch_hard_triplet": [0.05, 0.0],
    "ntxent": [0.07, 0.0],
    "proxy_anchor": [0.1, 32.0, 0.0],
}


def launches(name: str, rows: int, dtype: torch.dtype, reference_set: bool) -> list[tuple[Any, tiling.Tiles, tuple, dict]]:
    """Return what a forward and backward pair would launch, instead of launching it."""
    seen: list[tuple[Any, tiling.Tiles, tuple, dict]] = []
    module: Any = importlib.import_module(f"pmlkit.losses.{name}")
    module.launch = lambda kernel, programs, t, *arguments, **constants: seen.append((kernel, t, arguments, constants))
    module.row_stats = lambda *arguments: None
    fused.INTERPRETED = True  # lets rows of a processor through; nothing runs
    emb, labels = torch.zeros(rows, 128, dtype=dtype, requires_grad=True), torch.zeros(rows, dtype=torch.int64)
    ref = ref_labels = None
    if name == "proxy_anchor":
        ref = torch.zeros(1024, 128, requires_grad=True)
    elif reference_set:
        ref, ref_labels = torch.zeros(1024, 128, dtype=dtype, requires_grad=True), torch.zeros(1024, dtype=torch.int64)
    fused.fused_loss(name, emb, labels, ref, ref_labels, SETTINGS[name]).backward()
    return seen


def signature(kernel: Any, arguments: tuple, constants: dict[str, Any], tiles: tiling.Tiles) -> tuple[dict, dict, dict]:
    """Return the types, the constants and the other values of a launch by name."""
    known = {"SPLITS": tiles.splits, **{k: getattr(tiles, k) for k in ("BM", "BN", "BK", "DC", "PREC")}, **constants}
    fixed = {name: known[name] for name in kernel.arg_names if name in known}
    free = [name for name in kernel.arg_names if name not in fixed]
    kinds = {int: "i32", float: "fp32"}
    types = {
        name: TYPES[value.dtype] if isinstance(value, Tensor) else kinds[type(value)]
        for name, value in zip(free, arguments, strict=True)
    }
    values = dict(zip(free, arguments, strict=True))
    return {name: types.get(name, "constexpr") for name in kernel.arg_names}, fixed, values


def main(name: str, architectures: list[int]) -> None:
    """Compile for every architecture in bfloat16; for compute capability 9.0 also what else differs."""
    cases = [(512, torch.bfloat16, arch, False) for arch in architectures]
    cases += [(512, torch.float32, 90, False), (32768, torch.bfloat16, 90, False), (512, torch.bfloat16, 90, True)]
    cases += [(32768, torch.float32, 100, False)]
    for rows, dtype, arch, reference_set in cases:
        for kernel, tiles, arguments, constants in launches(name, rows, dtype, reference_set):
            types, fixed, known = signature(kernel, arguments, constants, tiles)
            places = {(kernel.arg_names.index(key),): value for key, value in fixed.items()}
            even = {name for name, value in types.items() if value.startswith("*")}
            even |= {name for name, value in known.items() if isinstance(value, int) and value % 16 == 0}
            aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
            source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=places, attrs=aligned)
            options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
            compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            # Triton 3.7.1 can make an empty kernel without an error: its body is then `unreachable` alone.
            assert "st.global" in compiled.asm["ptx"] and "unreachable" not in compiled.asm["llir"], (kernel.__name__, arch)
            sys.stdout.write(f"{kernel.__name__} {dtype} {rows} {arch} {compiled.metadata.shared}\n")


if __name__ == "__main__":
    main(sys.argv[1], [int(arch) for arch in sys.argv[2:]])
