"""The kernels of messages, as text: sends and receives, of which any may have no blocks. Equal on all ranks.

They are written by hand, for no program of one rank has what they need: a sender runs ahead of the reader. A block of
it stores tile after tile into the slots that its row has at the reader, and raises a flag with each; before it fills a
slot again it waits until the reader has taken the tile that was there. So a message that fits the slots of its rows is
gone whether or not its receive has begun. Sends and receives have counters of their own, by peer: two directions, and
several peers, order nothing among each other.

Bytes are moved as words of 64 bits, 16 bytes an access; the last tile's odd bytes one by one.
"""

from unisono.gpu.device_text import MODULE_HEAD, of_one_peer
from unisono.gpu.layout import INBOX, MESSAGE_ROWS, ROWS, SENT, SLOT_NBYTES, SLOTS, TAKEN, WORLD_SIZE_MAX

__all__ = ["LAST", "MESSAGE_MODULE", "SIDE", "SIDES", "kernel_of_messages", "names_of_sides"]

SIDE = ("nbytes", "header", "peer", "first", "blocks")
"""What a kernel takes of a message after its address: bytes, header, peer, and which of its blocks move it."""
LAST = ("bases", "counters", "record", "rank", "world_size", "limit")
"""The last arguments: table of workspaces, counters, failure record, this rank, ranks, nanoseconds to wait."""
SIDES = (1, 2)
"""There is a kernel for so many sends and as many receives. Blocks that two messages share move them one by one."""
_RAISE, _AWAIT = of_one_peer()

_HEAD = (
    MODULE_HEAD
    + f"""

INBOX = tl.constexpr({INBOX})
SENT = tl.constexpr({SENT})
TAKEN = tl.constexpr({TAKEN})
SLOTS = tl.constexpr({SLOTS})
SLOT_NBYTES = tl.constexpr({SLOT_NBYTES})
MESSAGE_ROWS = tl.constexpr({MESSAGE_ROWS})
SEND_COUNTERS = tl.constexpr({ROWS})
RECV_COUNTERS = tl.constexpr({ROWS + WORLD_SIZE_MAX * MESSAGE_ROWS})
"""
    + '''
# $1 table of bases, $2 offset of a flag at the peer, $3 the flag, $4 the peer, $5 ranks
RAISE_ONE = tl.constexpr("""'''
    + _RAISE
    + '''""")

# As AWAIT, but $4 the peer, and $2 the flags of all peers of which its one is awaited
AWAIT_ONE = tl.constexpr("""'''
    + _AWAIT
    + '''""")


@triton.jit
def raise_at(bases, offset, flag, peer):
    """After the loads and stores of all threads: one thread raises a flag at a peer."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        RAISE_ONE, "=r,l,l,l,r,r", [bases.to(tl.int64), offset, flag, peer, peer],
        dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit
def await_one(bases, mine, line, flag, record, limit, peer, world_size):
    """One thread waits for a peer's flag among those at ``line`` of the own workspace; then all threads go on."""
    tl.inline_asm_elementwise(
        AWAIT_ONE, "=r,l,l,l,r,r,l,l,l",
        [bases.to(tl.int64), mine + line, flag, peer, world_size, mine, record.to(tl.int64), limit.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )
    tl.debug_barrier()


@triton.jit
def sent_line(row, number):
    """Where the flags of a row's tile lie at a reader, one per source."""
    return SENT + ((number & (SLOTS - 1)) * MESSAGE_ROWS + row).to(tl.int64) * FLAG_LINE


@triton.jit
def taken_line(row):
    """Where a sender reads, one flag per reader, which tile of a row has been taken."""
    return TAKEN + row.to(tl.int64) * FLAG_LINE


@triton.jit
def tile_at(base, source, row, number):
    """The slot of a row's tile in the workspace at ``base`` of its reader."""
    slots = (source * MESSAGE_ROWS + row) * SLOTS + (number & (SLOTS - 1))
    return base + INBOX + slots.to(tl.int64) * SLOT_NBYTES


@triton.jit
def send(
    x, nbytes, header, peer, blocks, row, bases, counters, record, rank, world_size, limit, BLOCK: tl.constexpr
):
    """The tiles of one row to a peer."""
    mine, theirs = tl.load(bases + rank), tl.load(bases + peer)
    counter = counters + (SEND_COUNTERS + peer * MESSAGE_ROWS + row)
    number = tl.load(counter)
    offsets = tl.arange(0, BLOCK)
    words = nbytes // 16 * 2
    for start in range(row * BLOCK, (nbytes + 7) // 8, blocks * BLOCK):
        number += 1
        at = start + offsets
        value = tl.load(x + at, mask=at < words)
        taken = (number - SLOTS).to(tl.int64) << 32
        await_one(bases, mine, taken_line(row), taken, record, limit, peer, world_size)
        place = tile_at(theirs, rank, row, number)
        tl.store(slot(place, 0, x, offsets), value, mask=at < words)
        if (nbytes > words * 8) & (start + BLOCK > words):
            odd, single = nbytes - words * 8, tl.arange(0, 16)
            source = x.to(tl.pointer_type(tl.int8)) + words * 8 + single
            target = (place + (words - start) * 8).to(tl.pointer_type(tl.int8)) + single
            tl.store(target, tl.load(source, mask=single < odd), mask=single < odd)
        raise_at(bases, sent_line(row, number) + rank * 8, flag_of(number, header), peer)
    tl.store(counter, number)
    tl.debug_barrier()


@triton.jit
def receive(
    out, nbytes, header, peer, blocks, row, bases, counters, record, rank, world_size, limit, BLOCK: tl.constexpr
):
    """The tiles of one row from a peer."""
    mine = tl.load(bases + rank)
    counter = counters + (RECV_COUNTERS + peer * MESSAGE_ROWS + row)
    number = tl.load(counter)
    offsets = tl.arange(0, BLOCK)
    words = nbytes // 16 * 2
    for start in range(row * BLOCK, (nbytes + 7) // 8, blocks * BLOCK):
        number += 1
        at = start + offsets
        await_one(bases, mine, sent_line(row, number), flag_of(number, header), record, limit, peer, world_size)
        place = tile_at(mine, peer, row, number)
        value = tl.load(slot(place, 0, out, offsets), mask=at < words, cache_modifier=".cg")
        tl.store(out + at, value, mask=at < words)
        if (nbytes > words * 8) & (start + BLOCK > words):
            odd, single = nbytes - words * 8, tl.arange(0, 16)
            source = (place + (words - start) * 8).to(tl.pointer_type(tl.int8)) + single
            target = out.to(tl.pointer_type(tl.int8)) + words * 8 + single
            tl.store(target, tl.load(source, mask=single < odd, cache_modifier=".cg"), mask=single < odd)
        raise_at(bases, taken_line(row) + rank * 8, number.to(tl.int64) << 32, peer)
    tl.store(counter, number)
    tl.debug_barrier()
'''
)


def _kernel(sides: int) -> str:
    """The kernel of so many sends and receives."""
    names, last = names_of_sides(sides), ", ".join(LAST)
    lines = ["@triton.jit", f"def {kernel_of_messages(sides)}("]
    lines += [f"    {', '.join((name, *(f'{name}_{word}' for word in SIDE)))}," for name in names]
    lines += [f"    {last}, ACC: tl.constexpr, BLOCK: tl.constexpr,", "):"]
    lines += [f'    """Up to {sides} sends, and as many receives."""', "    block = tl.program_id(0)"]
    for name in names:
        side = ", ".join(f"{name}_{word}" for word in SIDE if word != "first")
        lines += [
            f"    row = block - {name}_first",
            f"    if (row >= 0) & (row < {name}_blocks):",
            f"        {'send' if name.startswith('x') else 'receive'}({name}, {side}, row, {last}, BLOCK)",
        ]
    return "\n".join(lines) + "\n"


def names_of_sides(sides: int) -> list[str]:
    """What is sent, then what is received, as the arguments are called."""
    return [f"{word}{k or ''}" for word in ("x", "out") for k in range(sides)]


def kernel_of_messages(sides: int) -> str:
    """Its name."""
    return f"exchange_{sides}"


MESSAGE_MODULE = "\n\n".join([_HEAD, *map(_kernel, SIDES)])
