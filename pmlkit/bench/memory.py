"""Peak memory of one pair, in a pass that is not timed."""

from typing import Any

import torch

# Not torch.profiler.profile: its start imports 900 modules (1.5 s, measured with torch 2.13) for the same events.
from torch.autograd.profiler import profile

from pmlkit.losses.bind import Bound
from pmlkit.record import Memory


def peak_memory(bound: Bound, device: str) -> Memory:
    """Return the peak of one pair on a device."""
    return cuda_memory(bound) if device == "cuda" else profile_memory(bound)


def profile_memory(bound: Bound) -> Memory:
    """Return the peak that one pair allocates beyond its inputs; baseline = bytes of the leaves themselves.

    The CPU allocator keeps no counters, so the peak is the running maximum of the profiler's signed allocation events.
    """
    bound.clear()
    profiler: Any = profile(profile_memory=True)  # its raw events are outside torch's type hints
    with profiler:
        bound.pair()
    events = [(e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        live += size
        peak = max(peak, live)
    baseline = sum(leaf.numel() * leaf.element_size() for leaf in bound.leaves)
    return Memory(source="profiler", baseline_bytes=baseline, allocated_peak_bytes=baseline + peak)


def cuda_memory(bound: Bound) -> Memory:
    """Return the allocator's peak over one pair, as a page prints it, with the cuBLAS workspaces inside and beside it.

    baseline: what lives before the pair, workspaces excluded. They belong to handles (one a thread), not to the loss;
    dropping them shows their size. graph_pool: segments of private pools.
    """
    bound.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bound.pair()
    torch.cuda.synchronize()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    pools = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
    live = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    workspace = live - torch.cuda.memory_allocated()
    counts = torch.cuda.memory_stats()
    return Memory(
        source="cuda",
        baseline_bytes=before - workspace,
        allocated_peak_bytes=peak,
        reserved_peak_bytes=reserved,
        workspace_bytes=workspace,
        graph_pool_bytes=pools or None,
        alloc_retries=counts["num_alloc_retries"],
        ooms=counts["num_ooms"],
    )
