"""PTX with which the programs of a cluster add numbers up: each writes its own straight into the memory of all.

In: how many programs, and warps of each. Out: text for `inline_asm_elementwise`, of a float32 a thread. They are
written with `st.async`, which counts arrived bytes at a barrier of the receiver: no fence, one way across the
cluster. `opening` comes first, in every thread; it gives the address that the other two take. Hopper (sm_90).
"""

from __future__ import annotations

from functools import cache

SENT = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"
CAME = ".reg .pred came; again: mbarrier.try_wait.parity.shared.b64 came, [{}], 0; @!came bra.uni again;"
TOTAL = "add.f32 s0, s0, s1; add.f32 s2, s2, s3; add.f32 $0, s0, s2;"


@cache
def opening(programs: int, warps: int) -> str:
    """PTX: $0 is where a program's shared space for the two sums is; of $1 nothing is used.

    Space: a barrier for each sum, that waits for as many bytes as will come, then [program, warp, lane] and, for the
    second, [program, warp] of float32. Both are used once: no write can meet a read, or a program that has left.
    """
    bytes_ = 4 * programs * warps
    lines = [
        f".shared .align 16 .b8 space[{16 + 33 * bytes_}]; .reg .pred first; .reg .b32 some;",
        "mov.u32 $0, space; mov.u32 some, %tid.x; setp.eq.u32 first, some, 0;",
        "@first mbarrier.init.shared.b64 [$0], 1; @first mbarrier.init.shared.b64 [$0+8], 1;",
        "@first fence.mbarrier_init.release.cluster;",
        f"@first mbarrier.arrive.expect_tx.shared.b64 _, [$0], {32 * bytes_};",
        f"@first mbarrier.arrive.expect_tx.shared.b64 _, [$0+8], {bytes_};",
        "barrier.cluster.arrive.relaxed.aligned;",  # `lane_sums` waits for all, before it writes to them
    ]
    return "{ " + " ".join(lines) + " }"


@cache
def lane_sums(programs: int, warps: int) -> str:
    """PTX: $0 is the sum of a lane's $1 over all warps of all programs of the cluster; $2 is the space."""
    lines = [
        ".reg .b32 place, away, bell, some; .reg .f32 s0, s1, s2, s3, share;",
        f"mov.u32 some, %cluster_ctarank; mad.lo.u32 place, some, {128 * warps}, $2;",
        "mov.u32 some, %tid.x; mad.lo.u32 place, some, 4, place; barrier.cluster.wait.aligned;",
    ]
    for program in range(programs):
        lines.append(f"mapa.shared::cluster.u32 away, place, {program}; mapa.shared::cluster.u32 bell, $2, {program};")
        lines.append(f"{SENT} [away+16], $1, [bell];")
    lines += [CAME.format("$2"), "and.b32 some, some, 31; mad.lo.u32 place, some, 4, $2;"]
    for n in range(programs * warps):  # four chains of sums
        at, add = f"[place+{16 + n * 128}]", f"add.f32 s{n % 4}, s{n % 4}, share;"
        lines.append(f"ld.shared.f32 s{n}, {at};" if n < 4 else f"ld.shared.f32 share, {at}; {add}")
    return "{ " + " ".join(lines) + TOTAL + " }"


@cache
def warp_sums(programs: int, warps: int) -> str:
    """PTX: $0 is the sum of $1, equal in the lanes of a warp, over all warps of all programs; $2 is the space."""
    begin = 16 + 128 * programs * warps
    lines = [
        ".reg .b32 place, bell, some; .reg .f32 s0, s1, s2, s3, t0, t1, t2, t3; .reg .pred sends;",
        f"mov.u32 some, %cluster_ctarank; mad.lo.u32 place, some, {4 * warps}, $2;",
        "mov.u32 some, %tid.x; shr.u32 some, some, 5; mad.lo.u32 place, some, 4, place;",
        f"mov.u32 some, %tid.x; and.b32 some, some, 31; setp.lt.u32 sends, some, {programs};",  # lane p writes to p
        "@sends mapa.shared::cluster.u32 place, place, some; @sends mapa.shared::cluster.u32 bell, $2, some;",
        f"@sends {SENT} [place+{begin}], $1, [bell+8];",
        CAME.format("$2+8"),
        f"ld.shared.v4.f32 {{s0, s1, s2, s3}}, [$2+{begin}];",
    ]
    for n in range(1, programs * warps // 4):
        lines.append(f"ld.shared.v4.f32 {{t0, t1, t2, t3}}, [$2+{begin + 16 * n}];")
        lines.append(" ".join(f"add.f32 s{k}, s{k}, t{k};" for k in range(4)))
    return "{ " + " ".join(lines) + TOTAL + " }"
