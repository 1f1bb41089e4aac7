"""What the programs of a fused loss leave for each other in the room of a call: places, counters, sums in a fixed order."""

import triton
import triton.language as tl


@triton.jit
def floats(room_ptr, place):
    """Return a pointer to float32 numbers at a place, in words of 8 bytes, of the room."""
    return (room_ptr + place).to(tl.pointer_type(tl.float32))


@triton.jit
def counters(room_ptr, place):
    """Return a pointer to counters of 32 bits at a place, in words of 8 bytes, of the room."""
    return (room_ptr + place).to(tl.pointer_type(tl.int32))


@triton.jit
def arrive(counter_ptr, parties):
    """Return whether this block is the last of `parties` to come here. The counter is back at 0 afterwards.

    What the others stored before is visible to the last: the addition releases and acquires, after all threads of the
    block have stored.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parties - 1
    if last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return last


@triton.jit
def totals(ptr, count, KINDS: tl.constexpr):
    """Return the sums of each of KINDS rows of `count` float64 numbers, always added in the same order, [KINDS].

    All rows at once: one after another each would wait for memory, which is most of a small batch's time.
    """
    kind, inside = tl.arange(0, KINDS), tl.arange(0, 256)
    sums = tl.zeros([KINDS, 256], tl.float64)
    for first in range(0, count, 256):
        at = first + inside
        sums += tl.load(ptr + kind[:, None] * count + at[None, :], mask=(at < count)[None, :], other=0.0)
    return tl.sum(sums, 1)


@triton.jit
def largest(ptr, count):
    """Return the largest of `count` float64 numbers that are not negative."""
    inside, top = tl.arange(0, 256), tl.zeros([256], tl.float64)
    for first in range(0, count, 256):
        top = tl.maximum(top, tl.load(ptr + first + inside, mask=first + inside < count, other=0.0))
    return tl.max(top, 0)


@triton.jit
def pick(values, place: tl.constexpr):
    """Return one number of a few."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == place, values, 0.0), 0)


@triton.jit
def poison_of(stats_ptr, count, program, programs):
    """Return 0, or NaN if this program's share of `count` rows has one with NaN or Inf. All programs see all rows."""
    found = tl.zeros([512], tl.float32)
    for first in range(program * 512, count, programs * 512):
        at = first + tl.arange(0, 512)
        found += tl.load(stats_ptr + at, mask=at < count, other=0.0) * 0.0
    return tl.sum(found, 0)
