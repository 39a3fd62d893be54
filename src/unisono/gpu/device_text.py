"""What every generated kernel calls, as the text at the head of its module: meetings, flags, the guard, addresses.

The waiting thread of a peer compares the number of the meeting, then the header. Who finds another header, waits past
the limit, or reads an abort word that is set leaves a record for its host and goes on: a kernel always ends. The first
record stays; who gives up sets the abort words of all ranks.

The clock and the abort word are read every 256 polls, the word that the host writes every 65,536, some 20 ms: 128
blocks that read host memory at once take 0.1 to 0.2 ms. When they did so every 256 polls, ranks that had once waited so
long made each other wait in every call from then on, 20 times as long as the call.
"""

from unisono.gpu.layout import FLAGS, HALF_NBYTES, ROWS, STAGE, WORLD_SIZE_MAX

__all__ = ["MODULE_HEAD", "of_one_peer"]

_OF_ALL_PEERS = """\
    setp.ge.u32 p, t, $5;
    @p bra DONE;
    setp.eq.u32 p, t, $4;
    @p bra DONE;
"""
_OF_ONE_PEER = """\
    setp.ne.u32 p, t, 0;
    @p bra DONE;
    mov.u32 t, $4;
"""

_RAISE = (
    """{
    .reg .pred p; .reg .u32 t; .reg .u64 a;
    mov.u32 t, %tid.x;
"""
    + _OF_ALL_PEERS
    + """\
    mad.wide.u32 a, t, 8, $1;
    ld.global.u64 a, [a];
    add.u64 a, a, $2;
    st.release.sys.global.u64 [a], $3;
    DONE:
    mov.u32 $0, 0;
    }"""
)
_AWAIT = (
    """{
    .reg .pred p, q; .reg .u32 t, n, k, lo, hi, ml, mh; .reg .u64 a, b, f, now, end;
    mov.u32 t, %tid.x;
"""
    + _OF_ALL_PEERS
    + """\
    mad.wide.u32 a, t, 8, $2;
    mov.b64 {ml, mh}, $3;
    mov.u32 n, 0;
    mov.u64 end, 0;
    POLL:
    ld.acquire.sys.global.u64 f, [a];
    mov.b64 {lo, hi}, f;
    sub.s32 k, hi, mh;
    setp.ge.s32 p, k, 0;
    @p bra CAME;
    add.u32 n, n, 1;
    and.b32 k, n, 255;
    setp.ne.u32 q, k, 0;
    @q bra POLL;
    mov.u64 now, %globaltimer;
    setp.ne.u32 q, n, 256;
    @q bra LATER;
    add.u64 end, now, $8;
    LATER:
    ld.relaxed.sys.global.u32 k, [$6];
    setp.ne.u32 q, k, 0;
    @q bra ABORTED;
    and.b32 k, n, 65535;
    setp.ne.u32 q, k, 0;
    @q bra CLOCK;
    ld.relaxed.sys.global.u32 k, [$7+24];
    setp.ne.u32 q, k, 0;
    @q bra FAIL;
    CLOCK:
    setp.lt.u64 q, now, end;
    @q bra POLL;
    mov.u32 k, 2;
    bra FAIL;
    CAME:
    setp.eq.u32 p, lo, ml;
    @p bra DONE;
    mov.u32 k, 1;
    FAIL:
    shl.b32 n, t, 8;
    or.b32 k, k, n;
    ld.relaxed.sys.global.u32 n, [$7];
    setp.ne.u32 q, n, 0;
    @q bra SPREAD;
    st.relaxed.sys.global.u64 [$7+8], f;
    st.relaxed.sys.global.u64 [$7+16], $3;
    st.release.sys.global.u32 [$7], k;
    SPREAD:
    mov.u32 n, 0;
    ALL:
    mad.wide.u32 b, n, 8, $1;
    ld.global.u64 b, [b];
    st.relaxed.sys.global.u32 [b], k;
    add.u32 n, n, 1;
    setp.lt.u32 q, n, $5;
    @q bra ALL;
    bra DONE;
    ABORTED:
    ld.relaxed.sys.global.u32 n, [$7];
    setp.ne.u32 q, n, 0;
    @q bra DONE;
    or.b32 k, k, 128;
    st.release.sys.global.u32 [$7], k;
    DONE:
    mov.u32 $0, 0;
    }"""
)


def of_one_peer() -> tuple[str, str]:
    """What raises, and what awaits, the flag of one peer, which takes the place of this rank among the operands."""
    return _RAISE.replace(_OF_ALL_PEERS, _OF_ONE_PEER), _AWAIT.replace(_OF_ALL_PEERS, _OF_ONE_PEER)


_CONSTANTS = f"""\
FLAGS = tl.constexpr({FLAGS})
STAGE = tl.constexpr({STAGE})
ROWS = tl.constexpr({ROWS})
HALF = tl.constexpr({HALF_NBYTES})
FLAG_LINE = tl.constexpr({8 * WORLD_SIZE_MAX})
"""

MODULE_HEAD = (
    '''"""Generated from programs by unisono.gpu.kernel_text; do not edit."""

import triton
import triton.language as tl

'''
    + _CONSTANTS
    + '''
# $1 table of bases, $2 offset of my flag at a peer, $3 the flag, $4 this rank, $5 ranks
RAISE = tl.constexpr("""'''
    + _RAISE
    + '''""")

# $1 table of bases, $2 my flags of this meeting, $3 the flag, $4 this rank, $5 ranks, $6 my base (abort word),
# $7 failure record (pinned host memory), $8 nanoseconds to wait
AWAIT = tl.constexpr("""'''
    + _AWAIT
    + '''""")


@triton.jit
def flag_line(block, number):
    """Where the flags of a meeting lie in every workspace, one per source."""
    return FLAGS + ((number & 1) * ROWS + block).to(tl.int64) * FLAG_LINE


@triton.jit
def flag_of(number, header):
    """What a rank raises at a meeting: the number above, the header below."""
    return (number.to(tl.int64) << 32) | (header.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def arrive(bases, block, number, header, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """After the stores of all threads: thread t raises this rank's flag at peer t."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        RAISE, "=r,l,l,l,r,r",
        [bases.to(tl.int64), flag_line(block, number) + RANK * 8, flag_of(number, header),
         tl.full((), RANK, tl.int32), tl.full((), WORLD_SIZE, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit
def await_peers(
    bases, mine, block, number, header, record, limit, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr
):
    """Thread t waits for peer t's flag in the own workspace; then all threads go on."""
    tl.inline_asm_elementwise(
        AWAIT, "=r,l,l,l,r,r,l,l,l",
        [bases.to(tl.int64), mine + flag_line(block, number), flag_of(number, header),
         tl.full((), RANK, tl.int32), tl.full((), WORLD_SIZE, tl.int32), mine, record.to(tl.int64), limit.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )
    tl.debug_barrier()


@triton.jit
def half_of(block, number):
    """Where the staging memory of a meeting begins in every workspace."""
    return STAGE + (block * 2 + (number & 1)).to(tl.int64) * HALF


@triton.jit
def slot(half, OFFSET: tl.constexpr, like, offsets):
    """Pointers to a slot, typed as ``like``. Of integers, the alignment must be stated of the pointers themselves."""
    return tl.multiple_of(half.to(like.dtype) + OFFSET + offsets, 16)
'''
)
