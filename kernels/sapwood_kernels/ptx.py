"""Reads PTX, the text that Triton gives ptxas: a kernel's instructions, and how each loop's exponentials come about.

A row's bits must not depend on the loop that a tile falls in. What a compiler does to one loop and not to the other,
such as contracting a product and a difference, shows here and nowhere in the source (PTX ISA, "Instruction Set").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

_LABEL = re.compile(r"^\s*(\$\w+):")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?:\s+(.*?))?;?\s*$")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_REGISTER = re.compile(r"%\w+")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_LOAD_WIDTH = re.compile(r"(?:\.v(\d))?\.[bfsu](\d+)$")

_EXPONENTIAL = "ex2.approx"
# Floating arithmetic, the only kind that is followed and counted. A maximum rounds nothing, and its operands come from
# other lanes: it ends a formula, like a load or a matrix product.
_ARITHMETIC = ("add", "sub", "mul", "fma", "div", "rcp", "neg", "ex2", "tanh")
_FLOAT = re.compile(r"\.(?:f16|f16x2|bf16|bf16x2|f32|f32x2|f64)$")
# Operations that are followed: enough for a softcap between product and exponential. A bound, as a float32 product is a
# chain of as many as the head has dimensions.
_MAX_DEPTH = 16


@dataclass(frozen=True)
class Loop:
    """An innermost loop that takes exponentials."""

    exponents: tuple[str, ...]
    """The distinct formulas whose values are exponentiated, sorted: `sub.rn.f32(mul.rn.f32(x, x), x)`. Masks are left
    out: where one operand of a selection is a constant, the other one stands for it."""
    arithmetic: tuple[tuple[str, int], ...]
    """How many of each floating instruction, sorted by name."""


@dataclass(frozen=True)
class _Instruction:
    line: int
    opcode: str
    operands: tuple[str, ...]

    @property
    def written(self) -> list[str]:
        """The registers that it sets; a store or a branch sets none."""
        if not self.operands or self.opcode.startswith(("st.", "bra", "red.", "cp.", "bar", "ret", "prefetch")):
            return []
        return _REGISTER.findall(self.operands[0]) if not self.operands[0].startswith("[") else []


def count_instructions(ptx: str, *prefixes: str) -> int:
    """How many instructions start with one of the prefixes, such as `mma.sync` or `cp.async.cg`."""
    return sum(instruction.opcode.startswith(prefixes) for instruction in _instructions(ptx))


def global_load_widths(ptx: str) -> Mapping[int, int]:
    """Bytes that a thread loads by one instruction from global memory, to the number of such instructions.

    Copies that bypass the registers (`cp.async`) are not among them.
    """
    widths: Counter[int] = Counter()
    for instruction in _instructions(ptx):
        if instruction.opcode.startswith("ld.global"):
            width = _LOAD_WIDTH.search(instruction.opcode)
            if width is None:
                raise ValueError(f"{instruction.opcode} on line {instruction.line + 1} has no width that we know")
            widths[int(width[1] or 1) * int(width[2]) // 8] += 1
    return widths


def exponential_loops(ptx: str) -> tuple[Loop, ...]:
    """The innermost loops that take exponentials, in the order of the text."""
    instructions = _instructions(ptx)
    definitions: dict[str, list[_Instruction]] = {}
    for instruction in instructions:
        for register in instruction.written:
            definitions.setdefault(register, []).append(instruction)
    spans = _loop_spans(ptx)
    members: dict[tuple[int, int], list[_Instruction]] = {}
    for instruction in instructions:
        around = [span for span in spans if span[0] <= instruction.line <= span[1]]
        if around:
            innermost = min(around, key=lambda span: span[1] - span[0])
            members.setdefault(innermost, []).append(instruction)
    loops = []
    for span in sorted(members):
        exponentials = [i for i in members[span] if i.opcode.startswith(_EXPONENTIAL)]
        if exponentials:
            formulas = {_formula(exponential.operands[1], definitions, _MAX_DEPTH) for exponential in exponentials}
            counts = Counter(i.opcode for i in members[span] if _is_arithmetic(i))
            loops.append(Loop(tuple(sorted(formulas)), tuple(sorted(counts.items()))))
    return tuple(loops)


def _instructions(ptx: str) -> list[_Instruction]:
    found = []
    for number, line in enumerate(ptx.splitlines()):
        match = _INSTRUCTION.match(line.partition("//")[0])
        if match:
            found.append(_Instruction(number, match[1], tuple(_OPERAND.findall(match[2] or ""))))
    return found


def _loop_spans(ptx: str) -> list[tuple[int, int]]:
    """First and last line of each loop: from a label to the last branch back to it."""
    lines = [line.partition("//")[0] for line in ptx.splitlines()]
    labels = {match[1]: number for number, line in enumerate(lines) if (match := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for number, line in enumerate(lines):
        branch = _BRANCH.search(line)
        if branch and labels.get(branch[1], number) < number:
            ends[labels[branch[1]]] = number
    return list(ends.items())


def _is_arithmetic(instruction: _Instruction) -> bool:
    return instruction.opcode.partition(".")[0] in _ARITHMETIC and _FLOAT.search(instruction.opcode) is not None


def _formula(operand: str, definitions: Mapping[str, list[_Instruction]], depth: int) -> str:
    """How a value comes about: constants as they are, `x` for what other instructions, or another turn, made."""
    if not operand.startswith("%"):
        return operand
    written_by = definitions.get(operand, [])
    if len(written_by) != 1 or depth == 0:
        return "x"
    instruction = written_by[0]
    kind = instruction.opcode.partition(".")[0]
    sources = instruction.operands[1:]
    if kind == "mov" and len(sources) == 1 and not sources[0].startswith("{"):
        return _formula(sources[0], definitions, depth)
    if kind == "selp":
        chosen = [source for source in sources[:2] if source.startswith("%")]
        formulas = [formula for source in chosen if not _is_constant(formula := _formula(source, definitions, depth))]
        return formulas[0] if len(formulas) == 1 else "x"
    if _is_arithmetic(instruction):
        return f"{instruction.opcode}({', '.join(_formula(source, definitions, depth - 1) for source in sources)})"
    return "x"


def _is_constant(formula: str) -> bool:
    return formula != "x" and "(" not in formula
