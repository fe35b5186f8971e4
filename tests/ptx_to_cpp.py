"""PTX as C++ for tests/on_cpu/: each instruction a statement, by the PTX ISA; so what a compiler made of a kernel, assembly included, runs on the CPU.

It knows the instructions that kernels for mma.sync use, and refuses others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

# C++'s types for PTX's; the members of ptx.h's registers have PTX's names.
TYPES = {
    **{f"{kind}{bits}": f"{'int' if kind == 's' else 'uint'}{bits}_t" for kind in "bus" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    "f16x2": "uint32_t",
    "bf16x2": "uint32_t",
    "pred": "bool",
}
SPECIAL = {"%tid.x": "threadIdx.x", "%ctaid.x": "blockIdx.x", "%nctaid.x": "gridDim.x", "%ntid.x": "blockDim.x"}
SPECIAL |= {"%clusterid.x": "cluster_index()", "%cluster_ctarank": "cluster_rank()", "%cluster_nctarank": "cluster_size()"}
COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
COMBINED = {"and": "&&", "or": "||"}
ROUNDED = {"rni": "std::nearbyint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
PAIRS = {"f16x2": "__half2", "bf16x2": "__nv_bfloat162"}
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
# Others are named by more than their first word.
FUNCTIONS = {
    "fma": "std::fma",
    "rem": "remainder",
    "neg": "std::negate<>()",
    "abs": "std::abs",
    "sqrt": "sage::ptx::sqrt",
    "ex2": "sage::ptx::ex2",
    "lg2": "sage::ptx::lg2",
    "popc": "__popc",
    "brev": "reversed",
    "movmatrix": "sage::ptx::movmatrix_trans",
    "shf": "__funnelshift_l",
    "prmt": "permute",
    "bfi": "insert",
    "dp4a": "__dp4a",
}
NAME = r"[A-Za-z_$][\w$]*"


class UnknownPtxError(Exception):
    """PTX that this module has no C++ for."""


def width(kind: str) -> int:
    """A type's bits."""
    return 32 if kind in PAIRS else 8 if kind == "pred" else int(re.sub(r"\D+", "", kind))


def parts(text: str) -> list[str]:
    """What commas part, but for those within brackets."""
    return [one.strip() for one in re.findall(r"(?:[^,{\[(]|\{[^}]*\}|\[[^\]]*\]|\([^)]*\))+", text) if one.strip()]


def local(name: str) -> str:
    """A C++ name for PTX's."""
    return "x_" + name.replace("$", "_")


class Function:
    """The statements of one. symbols: what names stand for that are variables outside of it."""

    def __init__(self, symbols: dict[str, str]) -> None:
        self.symbols = symbols
        self.classes: dict[str, int] = {}  # registers' bits by their prefix
        self.scopes: list[dict[str, int]] = [{}]  # and of those with a name of their own
        self.lines: list[str] = []

    # Operands.

    def place(self, name: str) -> tuple[str, int]:
        """A register in C++, and its bits; 1: a predicate."""
        for scope in reversed(self.scopes):
            if name in scope:
                return local(name.removeprefix("%")), scope[name]
        found = re.fullmatch(r"%([a-z]+)(\d+)", name)
        if found is None or found[1] not in self.classes:
            raise UnknownPtxError(name)
        return f"{found[1]}[{found[2]}]", self.classes[found[1]]

    def value(self, text: str, kind: str) -> str:
        """An operand that is read as this type."""
        if text.startswith("!"):
            return f"!{self.value(text[1:], kind)}"
        if constant := SPECIAL.get(text) or self.symbols.get(text):
            return f"{TYPES[kind]}({constant})"
        if re.match(r"0[fFdD][0-9A-Fa-f]+$", text):
            return f"same_bits<{TYPES[kind]}>(uint{width(kind)}_t(0x{text[2:]}ull))"
        if re.match(r"-?\d", text):
            number = int(text.rstrip("U"), 0)
            return (
                str(bool(number)).lower() if kind == "pred" else f"{TYPES[kind]}({number}{'ull' if number >= 2**63 else 'll'})"
            )
        name, bits = self.place(text)
        if bits == 1:
            return name
        return f"{TYPES[kind]}({name}.u{bits})" if width(kind) < bits else f"{name}.{kind}"

    def write(self, text: str, kind: str, value: str) -> str:
        """A statement that gives a register a value of this type, extended where the register is wider."""
        name, bits = self.place(text)
        if bits == 1:
            return f"{name} = {value};"
        if width(kind) < bits:
            return f"{name}.{'s' if kind[0] == 's' else 'u'}{bits} = {TYPES[kind]}({value});"
        return f"{name}.{kind} = {value};"

    def address(self, text: str, kind: str = "u64") -> str:
        """The number within brackets."""
        base, _, offset = text.strip("[] ").partition("+")
        return f"{self.value(base.strip(), kind)} + {TYPES[kind]}({int(offset or 0)}ll)"

    # Instructions, by the first word of their names. Each is given all words and the operands, and answers with statements.

    def arithmetic(self, words: Sequence[str], to: str, *operands: str) -> str:
        op, kind = words[0], words[-1]
        if kind in PAIRS:
            return self.pairwise(words, to, *operands)
        wide, high = "wide" in words, "hi" in words
        # In C++ only unsigned sums and products wrap around, as all do in PTX.
        plain = kind if kind[0] == "f" or wide or high else f"u{width(kind)}"
        x, y, *more = (self.value(one, plain) for one in operands)
        if wide:
            double = f"{kind[0]}{2 * width(kind)}"
            product = f"{TYPES[double]}({x}) * {y}"
            return self.write(to, double, f"{product} + {self.value(operands[2], double)}" if op == "mad" else product)
        if op == "mad":
            return self.write(to, kind, f"{f'high_product({x}, {y})' if high else f'{x} * {y}'} + {more[0]}")
        if high:
            return self.write(to, kind, f"high_product({x}, {y})")
        return self.write(to, kind, f"{x} {OPERATORS[op]} {y}")

    def pairwise(self, words: Sequence[str], to: str, *operands: str) -> str:
        """What is done to two numbers in a register each."""
        op, kind = words[0], words[-1]
        function = {"add": "__hadd2", "mul": "__hmul2", "fma": "__hfma2", "abs": "__habs2", "max": "__hmax2_nan"}[op]
        if op == "max" and "NaN" not in words:
            raise UnknownPtxError(".".join(words))
        given = ", ".join(self.value(one, kind) for one in operands)
        return self.write(to, kind, f"pairwise<{PAIRS[kind]}>([](auto... x) {{ return {function}(x...); }}, {given})")

    def function(self, words: Sequence[str], to: str, *operands: str) -> str:
        """What C++ has as a function of operands and result of one type."""
        op, kind = words[0], "b32" if words[0] == "movmatrix" else words[-1]
        if kind in PAIRS:
            return self.pairwise(words, to, *operands)
        if op == "shf" and words[1:3] != ["l", "wrap"]:
            raise UnknownPtxError(".".join(words))
        name = FUNCTIONS.get(op)
        if op in ("min", "max"):
            name = f"sage::ptx::{op}_nan" if "NaN" in words else f"std::f{op}" if kind == "f32" else f"std::{op}"
        elif op == "div":
            name = "divided" if kind[0] != "f" else "__fdividef" if "approx" in words else "std::divides<>()"
        elif op == "rcp":
            name = "sage::ptx::rcp" if "approx" in words else "__frcp_rn"
        elif op == "not":
            name = "std::logical_not<>()" if kind == "pred" else "std::bit_not<>()"
        given = [self.value(one, kind) for one in operands]
        if op == "shf":
            given[-1] = f"int({given[-1]} & 31)"
        return self.write(to, kind, f"{name}({', '.join(given)})")

    def bfind(self, words: Sequence[str], to: str, operand: str) -> str:
        if words[1:] != ["shiftamt", "u32"]:
            raise UnknownPtxError(".".join(words))
        return self.write(to, "u32", f"leading_zeros({self.value(operand, 'u32')})")

    def shift(self, words: Sequence[str], to: str, x: str, by: str) -> str:
        kind = words[-1]
        return self.write(to, kind, f"{words[0]}({self.value(x, kind)}, {self.value(by, 'u32')})")

    def compare(self, words: Sequence[str], to: str, *operands: str) -> str:
        """setp, also with a predicate to combine with, and set."""
        kind = words[-1]
        x, y = (self.value(one, kind) for one in operands[:2])
        if kind in PAIRS:
            if words[:3] != ["set", "le", "u32"]:
                raise UnknownPtxError(".".join(words))
            return self.write(to, "u32", f"__hle2_mask(same_bits<{PAIRS[kind]}>({x}), same_bits<{PAIRS[kind]}>({y}))")
        how = words[1]
        unordered = kind[0] == "f" and how in ("ltu", "leu", "gtu", "geu", "equ", "neu")
        ordered = f"!({x} != {x} || {y} != {y})"
        holds = f"({x} {COMPARED[how[:2]]} {y})"
        if unordered:
            holds = f"({holds} || !{ordered})"
        elif kind[0] == "f" and how == "ne":
            holds = f"({holds} && {ordered})"
        if words[0] == "set":
            yes = "1.0f" if words[2] == "f32" else "~0u"
            return self.write(to, words[2], f"{holds} ? {yes} : 0")
        if len(operands) > 2:
            holds += f" {COMBINED[words[2]]} {self.value(operands[2], 'pred')}"
        return self.write(to, "pred", holds)

    def select(self, words: Sequence[str], to: str, x: str, y: str, condition: str) -> str:
        kind = words[-1]
        return self.write(to, kind, f"{self.value(condition, 'pred')} ? {self.value(x, kind)} : {self.value(y, kind)}")

    def move(self, words: Sequence[str], to: str, x: str) -> str:
        kind = words[-1]
        if not (to + x).count("{"):
            return self.write(to, kind, self.value(x, kind))
        pieces = parts((to if "{" in to else x).strip("{}"))
        piece, whole = f"u{width(kind) // len(pieces)}", f"u{width(kind)}"
        if "{" in x:
            shifted = (f"{TYPES[whole]}({self.value(one, piece)}) << {i * width(piece)}" for i, one in enumerate(pieces))
            return self.write(to, whole, " | ".join(shifted))
        return " ".join(
            self.write(one, piece, f"{TYPES[piece]}({self.value(x, whole)} >> {i * width(piece)})")
            for i, one in enumerate(pieces)
        )

    def convert(self, words: Sequence[str], to: str, *operands: str) -> str:
        into, kind = words[-2:]
        packed = {"e4m3x2": "u16", "e2m1x2": "b8"}
        if len(operands) == 2:  # the first is the upper one
            high, low = (self.value(one, "f32") for one in operands)
            name = {"f16x2": "halves", "bf16x2": "bfloats", "e4m3x2": "to_e4m3x2", "e2m1x2": "to_e2m1x2"}[into]
            return self.write(to, packed.get(into, "u32"), f"{name}({low}, {high})")
        (operand,) = operands
        if kind in packed:
            return self.write(to, "u32", f"from_{kind}({self.value(operand, packed[kind])})")
        if kind == "f16":
            return self.write(to, "f32", f"half({self.value(operand, 'u16')})")
        x = self.value(operand, kind)
        if into in ("f16", "bf16"):
            return self.write(to, "u16", f"uint16_t({'halves' if into == 'f16' else 'bfloats'}({x}, 0.0f))")
        rounded = next((ROUNDED[word] for word in words if word in ROUNDED), None)
        x = x if rounded is None else f"{rounded}({x})"
        if kind[0] == "f" and into[0] != "f":
            return self.write(to, into, f"to_integer<{TYPES[into]}>({x})")
        return self.write(to, into, f"static_cast<{TYPES[into]}>({x})")

    def to_generic(self, words: Sequence[str], to: str, x: str) -> str:
        address = self.value(x, "u64")
        if words[1:3] == ["to", "shared"]:
            raise UnknownPtxError(".".join(words))
        if words[1] == "shared":
            address = f"reinterpret_cast<uint64_t>(shared_at({address}, 1))"
        return self.write(to, "u64", address)

    def memory(self, words: Sequence[str], first: str, second: str) -> str:
        """ld and st."""
        kind, loads = words[-1], words[0] == "ld"
        there, registers = (second, first) if loads else (first, second)
        names = parts(registers.strip("{}"))
        size = width(kind) // 8
        if "shared" in words:
            at = f"shared_at({self.address(there, 'u32')}, {size * len(names)})"
        elif "shared::cluster" in words:
            at = f"gpu::at_cluster({self.address(there, 'u32')}, {size * len(names)}, {size * len(names)})"
        elif "param" in words and (base := re.match(rf"\[({NAME})", there)) and base[1] not in self.symbols:
            at = f"{local(base[1])} + {int(there.strip('[] ').partition('+')[2] or 0)}"
        else:
            at = f"generic_at({self.address(there)}, {size * len(names)})"
        each = (
            self.write(one, kind, f"load<{TYPES[kind]}>(at + {i * size})")
            if loads
            else f"store<{TYPES[kind]}>(at + {i * size}, {self.value(one, kind)});"
            for i, one in enumerate(names)
        )
        return f"{{ uint8_t* at = {at}; {' '.join(each)} }}"

    def barrier(self, words: Sequence[str], *operands: str) -> str:
        if words[1] == "warp":
            return "__syncwarp();"
        if words[:4] == ["bar", "red", "or", "pred"] and operands[1] == "0":
            return self.write(operands[0], "pred", f"__syncthreads_or({self.value(operands[2], 'pred')}) != 0")
        if words[1] == "cluster":  # its wait stands right behind
            relaxed = "_relaxed" if "relaxed" in words else ""
            return f"sage::ptx::cluster_sync{relaxed}();" if words[2] == "arrive" else ""
        if words[1] != "sync" or operands != ("0",):
            raise UnknownPtxError(".".join(words))
        return "__syncthreads();"

    def shuffle(self, words: Sequence[str], to: str, x: str, lane: str, *_: str) -> str:
        name = {"bfly": "__shfl_xor_sync", "idx": "__shfl_sync"}[words[2]]
        number, *within = to.split("|")  # a warp is whole here, so that each lane that is asked is within
        shuffled = self.write(number, "u32", f"{name}(~0u, {self.value(x, 'u32')}, int({self.value(lane, 'u32')}))")
        return " ".join([shuffled, *(self.write(one, "pred", "true") for one in within)])

    def of_cluster(self, _: Sequence[str], to: str, address: str, rank: str) -> str:
        return self.write(to, "u32", f"cluster_address({self.value(address, 'u32')}, {self.value(rank, 'u32')})")

    def vote(self, words: Sequence[str], to: str, condition: str, *_: str) -> str:
        return self.write(to, words[-1], f"__{words[2]}_sync(~0u, {self.value(condition, 'pred')})")

    def reduce(self, words: Sequence[str], to: str, x: str, *_: str) -> str:
        return self.write(to, "u32", f"__reduce_{words[2]}_sync(~0u, {self.value(x, 'u32')})")

    def ldmatrix(self, words: Sequence[str], to: str, address: str) -> str:
        if "x4" not in words:
            raise UnknownPtxError(".".join(words))
        name = "ldmatrix_x4_trans" if "trans" in words else "ldmatrix_x4"
        each = " ".join(self.write(one, "b32", f"words[{i}]") for i, one in enumerate(parts(to.strip("{}"))))
        return f"{{ uint32_t words[4]; sage::ptx::{name}(words, {self.address(address, 'u32')}); {each} }}"

    def copy(self, words: Sequence[str], *operands: str) -> str:
        if words[2] == "commit_group":
            return "sage::ptx::cp_async_commit();"
        if words[2] == "wait_group":
            return f"sage::ptx::cp_async_wait<{operands[0]}>();"
        to, source, count, *given = operands
        pointer = f"reinterpret_cast<const void*>({self.address(source)})"
        return (
            f"sage::ptx::cp_async<{count}>({self.address(to, 'u32')}, {pointer}, {self.value((given or [count])[0], 's32')});"
        )

    def mma(self, words: Sequence[str], *operands: str) -> str:
        d, a, b, c = (parts(one.strip("{}")) for one in operands[:4])
        shape, (of_a, of_b, of_sum) = next(word for word in words if word.startswith("m16")), words[-3:]
        kind = {"f16": "b32"}.get(words[-1], words[-1])
        call = ""
        if words[-1] == "ue4m3":
            # Of the scales' bytes a product of four leaves no choice; of lanes the first.
            if (
                not operands[5] == operands[7] == "{0,0}"
                or words[-5:-1] != ["f32", "e2m1", "e2m1", "f32"]
                or "scale_vec::4X" not in words
            ):
                raise UnknownPtxError(".".join(words))
            kind, call = "f32", "mma_m16n8k64_e2m1"
        elif of_a != of_b:
            raise UnknownPtxError(".".join(words))
        elif (shape, of_a) == ("m16n8k16", of_a) and of_a in ("f16", "bf16"):
            element = {"f16": "__half", "bf16": "__nv_bfloat16"}[of_a]
            call = "mma_m16n8k16_f16" if of_sum == "f16" else f"mma_m16n8k16_f32<{element}>"
        elif (shape, of_a) in (("m16n8k32", "s8"), ("m16n8k32", "e4m3")):
            call = f"mma_m16n8k32_{of_a}"
        else:
            raise UnknownPtxError(".".join(words))
        sums = ", ".join(self.value(one, kind) for one in c)
        left = ", ".join(self.value(one, "b32") for one in a)
        right = ", ".join(self.value(one, "b32") for one in b)
        each = " ".join(self.write(one, kind, f"product[{i}]") for i, one in enumerate(d))
        begin = f"{{ {TYPES[kind]} product[{len(d)}] = {{{sums}}}; const uint32_t left[4] = {{{left}}};"
        if call == "mma_m16n8k64_e2m1":
            scales = ", ".join(self.value(operands[i].strip("{}"), "b32") for i in (4, 6))
            return f"{begin} const float sums[4] = {{{sums}}}; sage::ptx::{call}(product, left, {right}, sums, {scales}); {each} }}"
        return f"{begin} sage::ptx::{call}(product, left, {right}); {each} }}"

    def call(self, _: Sequence[str], *operands: str) -> str:
        results, name, *given = operands if operands[0].startswith("(") else ("()", *operands)
        names = [*parts(results.strip("()")), *parts(given[0].strip("()") if given else "")]
        return f"{local(name)}({', '.join(map(local, names))});"

    def leave(self, words: Sequence[str], *operands: str) -> str:
        to = f"goto {local(operands[0])};" if operands else ""
        return {"bra": to, "ret": "return;", "trap": 'gpu::fail("trap");'}[words[0]]

    def grid(self, words: Sequence[str]) -> str:
        return f"sage::ptx::grid_dependency_{'wait' if words[1] == 'wait' else 'launch'}();"

    INSTRUCTIONS: ClassVar[dict[str, Callable[..., str]]] = {
        **dict.fromkeys(("add", "sub", "mul", "mad", "and", "or", "xor"), arithmetic),
        **dict.fromkeys(("fma", "min", "max", "div", "rem", "neg", "abs", "not", "rcp", "sqrt", "ex2", "lg2"), function),
        **dict.fromkeys(("popc", "brev", "movmatrix", "shf", "prmt", "bfi", "dp4a"), function),
        **dict.fromkeys(("shl", "shr"), shift),
        **dict.fromkeys(("setp", "set"), compare),
        **dict.fromkeys(("bra", "ret", "trap"), leave),
        **dict.fromkeys(("ld", "st"), memory),
        "bfind": bfind,
        "selp": select,
        "mov": move,
        "cvt": convert,
        "cvta": to_generic,
        "shfl": shuffle,
        **dict.fromkeys(("bar", "barrier"), barrier),
        "mapa": of_cluster,
        "vote": vote,
        "redux": reduce,
        "ldmatrix": ldmatrix,
        "cp": copy,
        "mma": mma,
        "call": call,
        "griddepcontrol": grid,
    }

    # A function's text.

    def instruction(self, text: str) -> None:
        found = re.match(r"(?:@(!?%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
        if found is None:
            raise UnknownPtxError(text)
        words = found[2].split(".")
        if "sat" in words:
            raise UnknownPtxError(text)
        try:
            statements = self.INSTRUCTIONS[words[0]](self, words, *parts(re.sub(r"\s+", " ", found[3])))
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise UnknownPtxError(text) from error
        self.lines.append(f"if ({self.value(found[1], 'pred')}) {{ {statements} }}" if found[1] else statements)

    def directive(self, text: str) -> None:
        if found := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S):
            bits = 1 if found[1] == "pred" else 16 if found[1] in ("f16", "bf16") else width(found[1])
            kind = "bool" if bits == 1 else f"Register{bits}"
            for name in parts(found[2]):
                if many := re.fullmatch(r"%([a-z]+)<(\d+)>", name):
                    self.classes[many[1]] = bits
                    self.lines.append(f"{kind} {many[1]}[{many[2]}]; unwritten({many[1]});")
                else:
                    self.scopes[-1][name] = bits
                    self.lines.append(f"{kind} {local(name.removeprefix('%'))};")
        elif found := re.match(r"\.(?:param|local)\s+(?:\.align \d+ )?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", text):
            self.lines.append(f"alignas(16) uint8_t {local(found[2])}[{int(found[3] or 1) * width(found[1]) // 8}];")
            if text.startswith(".local"):
                self.symbols[found[2]] = f"reinterpret_cast<uint64_t>({local(found[2])})"
        elif not text.startswith((".shared", ".pragma")):
            raise UnknownPtxError(text)

    def read(self, text: str) -> None:
        # Blocks, labels, and what a semicolon ends, in which braces hold vectors.
        for found in re.finditer(rf"\s*(?:(?P<brace>[{{}}])|(?P<label>{NAME}):|;|(?P<text>[^\s{{}};][^;]*);)", text):
            if found["brace"] == "{":
                self.scopes.append({})
                self.lines.append("{")
            elif found["brace"] == "}":
                self.scopes.pop()
                self.lines.append("}")
            elif found["label"]:
                self.lines.append(f"{local(found['label'])}:;")
            elif found["text"]:
                (self.directive if found["text"].startswith(".") else self.instruction)(found["text"].strip())


def ended(text: str, start: int) -> int:
    """Where the brace that opens before `start` is closed."""
    depth = 1
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise UnknownPtxError("a function without an end")


def variables(text: str) -> dict[str, str]:
    """Addresses of what lies in shared memory."""
    found = dict.fromkeys(re.findall(r"\.extern \.shared [^;]*?(\w+)\[\];", text), "gpu::own_address(0)")
    end = 0
    for align, name, size in re.findall(r"(?<!extern )\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];", text):
        end = -(-end // int(align)) * int(align)
        found[name] = f"(kStaticBase + {end})"
        end += int(size)
    return found


def translate(text: str, kernel: str) -> str:
    """C++ for a kernel, `sage::KERNEL`, whose parameter is given as bytes.

    Raises:
        UnknownPtxError: an instruction, or form of one, that is not among those known here.
    """
    text = re.sub(r"//[^\n]*|\.pragma [^;]*;|\.loc [^\n]*", "", text)
    shared = variables(text)
    head = re.compile(rf"\.(entry|func)\s*(\([^)]*\))?\s*({NAME})\s*\(([^)]*)\)[^{{;]*([{{;])")
    before, made = [], []
    for found in head.finditer(text):
        results, given = (
            re.findall(rf"\.param [^,]*?({NAME})(?:\[(\d+)\])?\s*(?:,|$)", (one or "").strip("()\n "))
            for one in found.group(2, 4)
        )
        if found[1] == "entry":
            ((name, size),) = given
            symbols = {name: "given.bytes"}
            declared = f"void {kernel}(Params given)"
            before.append(f"struct alignas(8) Params {{ uint8_t bytes[{size}]; }};")
        else:
            symbols = {}
            names = (local(name) for name, _ in [*results, *given])
            declared = f"static void {local(found[3])}({', '.join(f'uint8_t* {name}' for name in names)})"
            before.append(f"{declared};")
        if found[5] == ";":
            continue
        function = Function({**shared, **{name: f"reinterpret_cast<uint64_t>({at})" for name, at in symbols.items()}})
        function.read(text[found.end() : ended(text, found.end())])
        made.append("\n".join([f"{declared} {{", *function.lines, "}"]))
    return "\n".join(
        ['#include "ptx.h"', "namespace sage {", "using namespace ptx_code;", *before, *made, "}  // namespace sage"]
    )
