"""The PTX that turns woven MXFP4 words into bf16 numbers, by pair: the one text of all forms of the expert product.

A mask leaves two codes of a word, each where a bf16 number has its sign, low exponent bits and first fraction bit; a
product with the block's scale makes them numbers. Which turn of which word brings a pair under the mask is `PAIRS`, the
reading of what `tile_layout.py` weaves; `tile_numbers.numbers` does the same in plain operations for the interpreter.
No triton here: kernels take the texts as constants.
"""

from __future__ import annotations

MASK = "0x81C081C0"
# bits of the first word in the word that holds both fourth pairs; the others are the second's
SHARED = "0x60306030"
# (word, bits that it is turned to the right): four pairs of the first word, four of the second
PAIRS = (
    ("one", 0), ("one", 4), ("one", 26), ("shared", 6),
    ("two", 2), ("two", 8), ("two", 30), ("shared", 28),
)  # fmt: skip


def conversion(pairs: tuple[int, ...]) -> str:
    """Text for inline assembly with two outputs for each of these pairs, then the inputs first word, second, factor.

    Above 16 a turn is a shift to the left: what would go round is under no mask.
    """
    one, two, factor = (f"${2 * len(pairs) + n}" for n in range(3))
    words = {"one": one, "two": two, "shared": "s"}
    lines: list[str] = []
    for place, index in enumerate(pairs):
        name, turn = PAIRS[index]
        if name == "shared" and not any("lop3" in line for line in lines):
            lines.append(f"lop3.b32 s, {one}, {two}, {SHARED}, 0xE4;")
        source = words[name]
        if turn:
            how = f"shl.b32 p, {source}, {32 - turn};"
            lines.append(how if turn > 16 else f"shf.r.wrap.b32 p, {source}, {source}, {turn};")
            source = "p"
        lines += [f"and.b32 p, {source}, {MASK};", f"mul.bf16x2 p, p, {factor};"]
        lines.append(f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, p;")
    return "{ .reg .b32 p, s;\n" + "\n".join(lines) + " }"


def registers(num_pairs: int) -> str:
    """Its constraints: outputs are written before the last input is read."""
    return ",".join(["=&h"] * (2 * num_pairs) + ["r"] * 3)


def pair_lines(index: int, one: str, two: str, factor: str, out: str) -> list[str]:
    """The same of one pair, a line each, into a register of 32 bits: out is not among the inputs."""
    name, turn = PAIRS[index]
    source, lines = {"one": one, "two": two, "shared": out}[name], []
    if name == "shared":
        lines.append(f"lop3.b32 {out}, {one}, {two}, {SHARED}, 0xE4;")
    if turn > 16:
        lines.append(f"shl.b32 {out}, {source}, {32 - turn};")
    elif turn:
        lines.append(f"shf.r.wrap.b32 {out}, {source}, {source}, {turn};")
    if turn:
        source = out
    return [*lines, f"and.b32 {out}, {source}, {MASK};", f"mul.bf16x2 {out}, {out}, {factor};"]
