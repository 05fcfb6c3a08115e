"""Kernel bodies that turn tiled MXFP4 bytes into an operand of a matrix instruction, for `tile_kernels`.

Need triton; imported on first use. The order of the bits: tile_layout.py.
"""

import triton
import triton.language as tl


@triton.jit
def numbers(words, factor, INTERPRET: tl.constexpr):
    """Woven words int32 [rows, 16], factors of that shape (bits of bf16, in both halves of an int32)
    -> first and second halves of the blocks, each [rows, 64]: bf16; under the interpreter, which multiplies the bit
    patterns of bf16, fp32. A word stays within an element, whatever order a layout gives the registers.
    """
    if INTERPRET:
        bits = words.to(tl.uint32, bitcast=True)
        late = ((bits << 1) & 0x80008000) | ((bits >> 3) & 0x01800180) | ((bits >> 7) & 0x00400040)
        b01, b23, b45 = bits & 0x81C081C0, (bits << 3) & 0x81C081C0, (bits << 6) & 0x81C081C0
        power = (factor << 16).to(tl.float32, bitcast=True)
        b0, b1, b2, b3 = exact(b01 << 16), exact(b01), exact(b23 << 16), exact(b23)
        b4, b5, b6, b7 = exact(b45 << 16), exact(b45), exact(late << 16), exact(late)
        b0, b1, b2, b3, b4, b5, b6, b7 = (
            b0 * power, b1 * power, b2 * power, b3 * power, b4 * power, b5 * power, b6 * power, b7 * power
        )  # fmt: skip
    else:
        b0, b1, b2, b3, b4, b5, b6, b7 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, t, u;
            and.b32 p, $8, 0x81C081C0;
            mul.bf16x2 p, p, $9;
            mov.b32 {$0, $1}, p;
            shl.b32 p, $8, 3;
            and.b32 p, p, 0x81C081C0;
            mul.bf16x2 p, p, $9;
            mov.b32 {$2, $3}, p;
            shl.b32 p, $8, 6;
            and.b32 p, p, 0x81C081C0;
            mul.bf16x2 p, p, $9;
            mov.b32 {$4, $5}, p;
            shl.b32 p, $8, 1;
            and.b32 p, p, 0x80008000;
            shr.u32 t, $8, 3;
            and.b32 t, t, 0x01800180;
            shr.u32 u, $8, 7;
            and.b32 u, u, 0x00400040;
            or.b32 p, p, t;
            or.b32 p, p, u;
            mul.bf16x2 p, p, $9;
            mov.b32 {$6, $7}, p;
            }
            """,
            "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r", [words, factor], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    rows: tl.constexpr = words.shape[0]
    first = tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [rows, 64])
    return first, tl.reshape(tl.join(tl.join(b4, b6), tl.join(b5, b7)), [rows, 64])


@triton.jit
def exact(bits):
    """The number whose upper half of fp32 `bits` holds."""
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def factors(scale, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Scale bytes of the four blocks of each row, [BLOCK, 4] or int32 [BLOCK] -> what `numbers` multiplies with.

    2^126 of the bits' places, 2^(byte - 127) and 2^-32: bf16 holds it for bytes up to 160, beyond is infinity.
    """
    if WIDE == 8:
        byte = scale.to(tl.int32)
    else:
        byte = scale[:, None] >> (8 * tl.arange(0, 4))[None, :] & 255
    factor = tl.minimum(byte + 94, 255) << 7
    factor = tl.broadcast_to((factor | factor << 16)[:, :, None], [BLOCK, 4, 4])
    return tl.reshape(factor, [BLOCK, 16])


@triton.jit
def operand(values, BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr):
    """[BLOCK, 64] in the order of `load_rows` and of memory -> rows of the matrix, columns in `columns`' order.

    Nothing moves between threads: what changes is which row and column a register stands for.
    """
    values = tl.reshape(values, [BLOCK // (16 * WARPS), 2, WARPS, 8, 4, 8 // WIDE, 2, WIDE])
    return tl.reshape(tl.permute(values, [0, 2, 1, 3, 5, 6, 4, 7]), [BLOCK, 64])
