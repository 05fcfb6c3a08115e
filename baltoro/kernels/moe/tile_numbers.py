"""Kernel bodies that turn tiled MXFP4 bytes into an operand of a matrix instruction, for `tile_kernels`.

Need triton; imported on first use. The order of the bits: tile_layout.py.
"""

import triton
import triton.language as tl

from baltoro.kernels.moe.weave_text import PAIRS, conversion, registers

CONVERSION = tl.constexpr(conversion(tuple(range(len(PAIRS)))))
REGISTERS = tl.constexpr(registers(len(PAIRS)))


@triton.jit
def turned_right(words, NUM: tl.constexpr):
    """uint32 turned by NUM bits, above 16 what goes round is lost: no mask of `numbers` takes it."""
    if NUM == 0:
        out = words
    elif NUM > 16:
        out = words << (32 - NUM)
    else:
        out = (words >> NUM) | (words << (32 - NUM))
    return out


@triton.jit
def pair(words, power, NUM: tl.constexpr):
    """Both numbers of a pair, as `numbers` under the interpreter."""
    bits = turned_right(words, NUM) & 0x81C081C0
    return exact(bits << 16) * power, exact(bits) * power


@triton.jit
def numbers(words, factor, INTERPRET: tl.constexpr):
    """Woven words int32 [rows, 16], factors [rows, 8] (bits of bf16, in both halves of an int32), one for two words
    -> first and second halves of the blocks, each [rows, 64]: bf16; under the interpreter, which multiplies the bit
    patterns of bf16, fp32. Two words are two elements, whatever order a layout gives the registers.
    """
    rows: tl.constexpr = words.shape[0]
    one, two = tl.split(tl.reshape(words, [rows, 8, 2]))
    if INTERPRET:
        one, two = one.to(tl.uint32, bitcast=True), two.to(tl.uint32, bitcast=True)
        shared = (one & 0x60306030) | (two & 0x9FCF9FCF)
        power = (factor << 16).to(tl.float32, bitcast=True)
        a0, a1 = pair(one, power, 0)
        a2, a3 = pair(one, power, 4)
        a4, a5 = pair(one, power, 26)
        a6, a7 = pair(shared, power, 6)
        b0, b1 = pair(two, power, 2)
        b2, b3 = pair(two, power, 8)
        b4, b5 = pair(two, power, 30)
        b6, b7 = pair(shared, power, 28)
    else:
        a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7 = tl.inline_asm_elementwise(
            CONVERSION, REGISTERS, [one, two, factor],
            dtype=(tl.bfloat16,) * 16, is_pure=True, pack=1,
        )  # fmt: skip
    # [rows, 8, word of two, pair, lane]
    first = tl.join(tl.join(tl.join(a0, b0), tl.join(a2, b2)), tl.join(tl.join(a1, b1), tl.join(a3, b3)))
    second = tl.join(tl.join(tl.join(a4, b4), tl.join(a6, b6)), tl.join(tl.join(a5, b5), tl.join(a7, b7)))
    return tl.reshape(first, [rows, 64]), tl.reshape(second, [rows, 64])


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
    factor = tl.broadcast_to((factor | factor << 16)[:, :, None], [BLOCK, 4, 2])
    return tl.reshape(factor, [BLOCK, 8])


@triton.jit
def operand(values, BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr):
    """[BLOCK, 64] in the order of `load_rows` and of memory -> rows of the matrix, columns in `columns`' order.

    Nothing moves between threads: what changes is which row and column a register stands for.
    """
    values = tl.reshape(values, [BLOCK // (16 * WARPS), 2, WARPS, 8, 4, 8 // WIDE, 2, WIDE])
    return tl.reshape(tl.permute(values, [0, 2, 1, 3, 5, 6, 4, 7]), [BLOCK, 64])
