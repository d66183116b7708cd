"""Run PTX of inline assembly on the CPU: a substitute of ``tl.inline_asm_elementwise`` for Triton's interpreter.

It knows the instructions of `kernels/frozen/code_rows.py`, and asserts what a GPU demands of addresses and branches.
"""

import ctypes
import re

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

LANES = 32
LANE = np.arange(LANES, dtype=np.uint64)
COMPARISONS = {"gt": np.greater, "le": np.less_equal, "ne": np.not_equal, "eq": np.equal}


def floats(bits):
    return bits.astype(np.uint32).view(np.float32)


def halves(bits):
    """The two numbers of pairs of bfloat16, in fp64."""
    return [floats(part).astype(np.float64) for part in ((bits & 0xFFFF) << np.uint64(16), bits & 0xFFFF0000)]


def paired(low, high):
    """Pairs of bfloat16, each rounded once to the nearest number, or to the even one of two."""
    bits = []
    for number in (low, high):
        mantissa, exponent = np.frexp(np.asarray(number, np.float64))
        rounded = np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8).astype(np.float32)
        bits.append(rounded.view(np.uint32) >> 16)
    return bits[0] | (bits[1] << 16)


def fragments(registers, rows, columns):
    """A matrix of pairs of bfloat16 as the matrix units take it: registers of lanes -> [rows, columns]."""
    matrix = np.zeros((rows, columns))
    for i, register in enumerate(registers):
        for half, numbers in enumerate(halves(register)):
            for lane, number in enumerate(numbers):
                outer, inner = lane // 4, 2 * (lane % 4) + half
                if rows == columns:  # A, whose registers go down first
                    matrix[outer + 8 * (i % 2), inner + 8 * (i // 2)] = number
                else:  # B, which has columns of lanes
                    matrix[inner + 8 * i, outer] = number
    return matrix


class Warp:
    """The registers of a warp: 64 bits for each lane, by name. Global addresses are those of this process."""

    def __init__(self, registers, shared, first_thread):
        self.registers, self.shared = registers, shared
        self.registers |= {"%laneid": LANE, "%tid.x": LANE + np.uint64(first_thread), "pairs": np.zeros_like(LANE)}

    def get(self, operand):
        if operand in self.registers:
            return self.registers[operand]
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(LANES, number % 2**64, np.uint64)

    def put(self, name, bits, mask):
        bits = np.asarray(bits).astype(np.uint64)
        self.registers[name] = bits if mask.all() else np.where(mask, bits, self.get(name))

    def addresses(self, operand):
        base, _, offset = operand.strip("[]").partition("+")
        return self.get(base) + np.uint64(int(offset or 0))

    def load(self, addresses, size, mask, shared):
        read = (lambda at: self.shared[at : at + size].tobytes()) if shared else lambda at: ctypes.string_at(at, size)
        return [
            int.from_bytes(read(int(at)), "little") if some else 0 for at, some in zip(addresses, mask, strict=True)
        ]

    def run(self, ptx):
        label = None
        for statement in ptx.strip()[1:-1].split(";"):
            while found := re.match(r"\s*(\w+):\s*", statement):
                label = None if label == found[1] else label
                statement = statement[found.end() :]
            guard, operation, rest = re.match(r"\s*(?:@(\w+) )?(\S*)\s*(.*)", statement, re.S).groups()
            if operation and not operation.startswith((".reg", ".shared", "bar.")) and label is None:
                mask = self.registers[guard].astype(bool) if guard else np.ones(LANES, bool)
                operands = [
                    re.findall(r"[^{},\s]+", operand) if operand[0] == "{" else operand
                    for operand in re.findall(r"\{[^}]*\}|[^,\s]+", rest)
                ]
                if operation == "bra.uni":
                    assert mask.all() or not mask.any()
                    label = operands[0] if mask.all() else None
                else:
                    self.execute(operation.split("."), operands, mask)

    def execute(self, operation, operands, mask):
        to, *sources = operands
        if operation[0] in ("ld", "st"):
            at = self.addresses(to if operation[0] == "st" else sources[0])
            registers = [self.get(name) for name in sources[0]] if operation[0] == "st" else to
            registers = [registers] if isinstance(registers, str) else registers
            size = 2 if operation[-1] == "b16" else 4
            assert not (at[mask] % (size * len(registers))).any()
            for i, register in enumerate(registers):
                place = at + np.uint64(size * i)
                if operation[0] == "st":
                    for lane in range(LANES):
                        self.shared[int(place[lane]) : int(place[lane]) + 4].view(np.uint32)[:] = register[lane]
                else:
                    self.put(register, self.load(place, size, mask, operation[1] == "shared"), mask)
        elif operation[0] == "mma":
            a, b = fragments(map(self.get, sources[0]), 16, 16), fragments(map(self.get, sources[1]), 16, 8)
            product = a @ b
            for i, (register, old) in enumerate(zip(to, sources[2], strict=True)):
                rows, columns = LANE // 4 + 8 * (i // 2), 2 * (LANE % 4) + i % 2
                total = product[rows.astype(int), columns.astype(int)] + floats(self.get(old))
                self.put(register, total.astype(np.float32).view(np.uint32), mask)
        elif operation[0] == "setp":
            x, y = (self.get(source).astype(np.uint32).view(np.int32) for source in sources)
            self.registers[to] = COMPARISONS[operation[1]](x, y)
        elif operation[0] == "mov" and isinstance(sources[0], list):
            low, high = map(self.get, sources[0])
            self.put(to, low | (high << np.uint64(16)), mask)
        else:
            self.put(to, self.compute(operation, *map(self.get, sources)), mask)

    def compute(self, operation, x, y=None, z=None, *_):
        kind = operation[-1]
        match operation[0]:
            case "mov":
                return x
            case "and":
                return x & y
            case "shr":
                return x >> y
            case "mad":
                return x * y + z
            case "dp4a":
                return z + sum(
                    (x >> np.uint64(8 * i) & np.uint64(255)) * (y >> np.uint64(8 * i) & np.uint64(255))
                    for i in range(4)
                )
            case "selp":
                return np.where(z.astype(bool), x, y)
            case "shfl":
                return x[(LANE ^ y).astype(int)]
            case "cvt":
                return paired(floats(y), floats(x))
            case "fma" if kind == "bf16x2":
                return paired(*(p * q + r for p, q, r in zip(halves(x), halves(y), halves(z), strict=True)))
            case "mul" if kind == "f32":
                return (floats(x) * floats(y)).view(np.uint32)
            case "add" if kind == "f32":
                return (floats(x) + floats(y)).view(np.uint32)
            case "add":
                return x + y
        raise NotImplementedError(".".join(operation))


class Assembly:
    """In place of ``tl.inline_asm_elementwise``, for tensors with one element per thread, and one block of memory."""

    def __init__(self):
        self.shared = np.zeros(2**15, np.uint8)

    def __call__(self, ptx, constraints, args, dtype, is_pure, pack, _semantic=None):
        ptx, dtype = getattr(ptx, "value", ptx), getattr(dtype, "value", dtype)
        dtypes = list(dtype) if isinstance(dtype, tuple | list) else [dtype]
        arrays = [np.atleast_1d(arg.handle.data) for arg in args]
        threads = max(128, *map(len, arrays))
        arrays = [np.broadcast_to(array, (threads,)) for array in arrays]
        results = [np.zeros(threads, np.uint32) for _ in dtypes]
        for first in range(0, threads, LANES):
            parts = [np.ascontiguousarray(array[first : first + LANES]) for array in arrays]
            bits = [part.view(f"u{part.itemsize}").astype(np.uint64) for part in parts]
            warp = Warp({f"${len(dtypes) + i}": part for i, part in enumerate(bits)}, self.shared, first)
            warp.run(ptx)
            for i, result in enumerate(results):
                result[first : first + LANES] = warp.get(f"${i}").astype(np.uint32)
        tensors = []
        for result, to in zip(results, dtypes, strict=True):
            data = result.view(np.float32 if to == tl.float32 else np.int32)
            tensors.append(tl.tensor(TensorHandle(data, to), tl.block_type(to, [threads])))
        return tuple(tensors) if len(tensors) > 1 else tensors[0]
