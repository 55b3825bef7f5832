"""Reads the machine code of a compiled kernel, as nvdisasm prints it, for faults that only ptxas can make.

Uniform registers (UR) hold what a whole warp shares: addresses, and the descriptors of shared memory that wgmma and TMA
read. ptxas of CUDA 12.8 was seen to leave one unwritten on the path around a loop (2026-11-21): the kernel then
multiplied other shared memory, on some inputs only. `unwritten` and `mixed_descriptors` find such code. What they know
of instructions is what sm_90 has.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
LABEL = re.compile(r"\s*(\.L_x_\d+):")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\w*(?:\.\w+)*)\s*(.*?)\s*;")
UNIFORM = re.compile(r"\bUR(\d+)\b")
ENTRY = -1  # stands for the write of a register that has had none
BEFORE_ALL = frozenset((ENTRY,))
# Instructions outside the uniform datapath that write a uniform register, and inside it that write none.
WRITES_UNIFORM = ("R2UR", "S2UR", "ELECT", "REDUX")
WRITES_NONE = ("UISETP", "UPLOP3", "USETMAXREG", "UTMA", "UBLK", "UCGABAR", "UCCTL")
WGMMA = ("HGMMA", "QGMMA")  # of 16 bits, of 8
SHARED = ("LDS", "STS", "LDSM", "STSM", "ATOMS")  # what threads themselves do to shared memory
ARRIVAL, WHOLE = "SYNCS.ARRIVE.TRANS64.A1T0", "BAR.SYNC"
UNKNOWN_JUMPS = ("BRXU", "JMP", "JMX", "JMXU", "CALL", "RET", "BPT", "RPCMOV")


class Instruction(NamedTuple):
    """One line of code. `guard` is the predicate under which it runs, "" where it always does."""

    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{self.address:#06x}: {guard}{self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True, eq=False)
class Program:
    """The instructions of one kernel in order, and for each the places that may follow it."""

    code: list[Instruction]
    successors: list[list[int]]

    @cached_property
    def predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.code]
        for at, following in enumerate(self.successors):
            for place in following:
                found[place].append(at)
        return found

    @cached_property
    def reads(self) -> list[set[int]]:
        """The uniform registers that each instruction reads."""
        return [uniform_reads(i) for i in self.code]

    @cached_property
    def reaching(self) -> list[dict[int, frozenset[int]] | None]:
        """For each instruction and uniform register: the places of the writes that may have been the last before it.

        Registers that nothing wrote are left out. None for code that no path reaches.
        """
        return _reaching(self)


class Loop(NamedTuple):
    """An innermost loop that multiplies by wgmma.

    `loads` counts its loads from global memory, `local` its loads and stores of spilled registers, `exponentials` its
    exp2, and `beside` those of them that run while wgmma does: after a wait that leaves some under way. `predicates`:
    its R2P, each of which makes several of a register's bits.
    """

    loads: int
    local: int
    exponentials: int
    beside: int
    predicates: int = 0


def disassembled(cubin: bytes) -> str:
    """nvdisasm's text of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([NVDISASM, "-c", path], capture_output=True, text=True, check=True).stdout


def parsed(text: str) -> Program:
    """The one kernel in nvdisasm's text. ValueError for jumps whose targets are not in it."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := LINE.search(line):
            address, guard, opcode, rest = found.groups(default="")
            operands = tuple(part.strip() for part in rest.split(",")) if rest else ()
            code.append(Instruction(int(address, 16), guard, opcode, operands))
    if not code:
        raise ValueError(f"no instructions in {text[:200]!r}")
    following = [list(dict.fromkeys(_following(i, at, labels))) for at, i in enumerate(code)]
    return Program(code, [[place for place in places if place < len(code)] for places in following])


def _following(i: Instruction, at: int, labels: dict[str, int]) -> Iterator[int]:
    operation = i.opcode.split(".")[0]
    if operation in UNKNOWN_JUMPS:
        raise ValueError(f"where does this jump to? {i}")
    if operation in ("BRA", "BRX"):
        targets = re.findall(r"\.L_x_\d+", " ".join(i.operands))
        if not targets:
            raise ValueError(f"where does this jump to? {i}")
        yield from (labels[target] for target in targets)
    # A branch with another operand than its target has a condition there.
    always = not i.guard and (operation in ("EXIT", "BRX") or (operation == "BRA" and len(i.operands) == 1))
    if not always:
        yield at + 1


def uniform_writes(i: Instruction) -> set[int]:
    """Uniform registers that an instruction writes. One under a predicate counts as if it always did.

    What it writes comes first, perhaps after predicates that it writes too.
    """
    if not i.opcode.startswith(("U", *WRITES_UNIFORM)) or i.opcode.startswith(WRITES_NONE):
        return set()
    at = _written_operand(i)
    return set() if at is None else _span(i.operands[at], 2 if _is_wide(i.opcode) else 1)


def uniform_reads(i: Instruction) -> set[int]:
    """Uniform registers whose values an instruction uses."""
    written = None
    if i.opcode.startswith(("U", *WRITES_UNIFORM)) and not i.opcode.startswith(WRITES_NONE):
        written = _written_operand(i)
    found: set[int] = set()
    for at, operand in enumerate(i.operands):
        if at != written:
            found |= _span(operand, _width(i, at), _skipped(i, at))
    return found


def _written_operand(i: Instruction) -> int | None:
    for at, operand in enumerate(i.operands):
        if re.fullmatch(r"U?P(\d|T)", operand):
            continue
        return at if UNIFORM.fullmatch(operand) else None
    return None


def _span(operand: str, width: int, skipped: int = 0) -> set[int]:
    first = UNIFORM.search(operand)
    return set(range(int(first[1]) + skipped, int(first[1]) + width)) if first else set()


def _is_wide(opcode: str) -> bool:
    return ".64" in opcode or ".WIDE" in opcode


def _width(i: Instruction, at: int) -> int:
    """How many registers an operand stands for."""
    operand = i.operands[at]
    if "gdesc[" in operand:
        return 4  # the descriptors of A and of B
    if "desc[" in operand:
        return 2
    if i.opcode.startswith("UTMA") and operand.startswith("["):
        return _tma_width(i.opcode) if at == 0 else 2
    if i.opcode.startswith("UIMAD.WIDE"):
        return 2 if at == len(i.operands) - 1 else 1
    return 2 if i.opcode.startswith(("UIADD3.64", "SYNCS.EXCH.64")) and not operand.startswith("[") else 1


def _tma_width(opcode: str) -> int:
    """Shared address, for a load its barrier, and coordinates."""
    sides = re.search(r"\.(\d)D", opcode)
    return (2 if "LDG" in opcode else 1) + int(sides[1]) if sides else 1


def _skipped(i: Instruction, at: int) -> int:
    """wgmma with A in registers does not look at the descriptor of A."""
    return 2 if "gdesc[" in i.operands[at] and at == 2 else 0


def unwritten(program: Program) -> list[str]:
    """Reads of uniform registers that some path reaches without a write, each as "instruction reads URs".

    A copy is no read: ptxas copies pairs of which one half holds nothing. Who reads the copy is found instead.
    """
    return _readers(program, lambda i, number, writes: ENTRY in writes and not _is_copy(i))


def mixed_descriptors(program: Program) -> list[str]:
    """Reads of wgmma descriptors that different writes reach on different paths, each as "instruction reads URs".

    Where a write is missing on a path, what the register held before comes through. No kernel here lets two writes
    meet in a descriptor (2026-11-21); code that does so may be right, and must be looked at.
    """
    return _readers(program, lambda i, number, writes: i.opcode.startswith(WGMMA) and len(writes) > 1)


def early_arrivals(program: Program) -> list[str]:
    """Arrivals at an mbarrier that a path leads to from an access to shared memory without a barrier in between.

    One thread arrives for its warpgroup, so all of it must be done by then: what the arrival allows another warp to
    read or to write over would else be touched afterwards.
    """
    touched: list[bool | None] = [None] * len(
        program.code
    )  # since the last barrier, on any path; None: not reached
    touched[0] = False
    waiting = [0]
    while waiting:
        at = waiting.pop()
        i = program.code[at]
        after = not i.opcode.startswith(WHOLE) and (touched[at] or i.opcode.split(".")[0] in SHARED)
        for place in program.successors[at]:
            if touched[place] is None or (after and not touched[place]):
                touched[place] = after
                waiting.append(place)
    return [str(i) for i, late in zip(program.code, touched, strict=True) if late and i.opcode == ARRIVAL]


def _is_copy(i: Instruction) -> bool:
    return i.opcode == "UMOV" and not i.guard and len(uniform_reads(i)) == 1


def _readers(program: Program, wrong: Callable[[Instruction, int, frozenset[int]], bool]) -> list[str]:
    found = []
    for i, read, known in zip(program.code, program.reads, program.reaching, strict=True):
        if known is not None:
            bad = [n for n in sorted(read) if wrong(i, n, known.get(n, BEFORE_ALL))]
            if bad:
                found.append(f"{i} reads {', '.join(f'UR{number}' for number in bad)}")
    return found


def _reaching(program: Program) -> list[dict[int, frozenset[int]] | None]:
    """`Program.reaching`."""
    writes, before = [uniform_writes(i) for i in program.code], program.predecessors
    known: list[dict[int, frozenset[int]] | None] = [None] * len(program.code)
    known[0] = {}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        after = known[at] or {}
        if writes[at]:
            i, last = program.code[at], frozenset((at,))
            if _is_copy(i):
                copied = after.get(next(iter(uniform_reads(i))), BEFORE_ALL)
                last = BEFORE_ALL | last if ENTRY in copied else last
            after = {**after, **dict.fromkeys(writes[at], last)}
        for place in program.successors[at]:
            old = known[place]
            new = after if old is None or len(before[place]) == 1 else _joined(old, after)
            if new != old:
                known[place] = new
                waiting.append(place)
    return known


def _joined(one: dict[int, frozenset[int]], other: dict[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    return {n: one.get(n, BEFORE_ALL) | other.get(n, BEFORE_ALL) for n in one.keys() | other.keys()}


def loops(program: Program) -> dict[int, set[int]]:
    """Natural loops: for each head, the places from which a path leads back to it and which only it leads to."""
    before, found = program.predecessors, {}
    for at, following in enumerate(program.successors):
        for head in following:
            if head <= at and (body := _body(before, head, at)):
                found[head] = found.get(head, set()) | body
    return found


def _body(before: list[list[int]], head: int, last: int) -> set[int]:
    """What lies between; nothing if the kernel's entry leads there without passing `head`."""
    body, waiting = {head}, [last]
    while waiting:
        at = waiting.pop()
        if at not in body:
            if at == 0:
                return set()
            body.add(at)
            waiting.extend(before[at])
    return body


def multiplying_loops(program: Program) -> list[Loop]:
    """The loops with wgmma that hold no other such loop, in the order of their heads."""
    every = {
        head: body
        for head, body in sorted(loops(program).items())
        if any(program.code[at].opcode.startswith(WGMMA) for at in body)
    }
    inner = [body for body in every.values() if not any(other < body for other in every.values())]
    return [_summed_up([program.code[at] for at in sorted(body)]) for body in inner]


def _summed_up(code: list[Instruction]) -> Loop:
    """Counts of a loop's code, whose order in memory is that in which it runs."""
    count = [i.opcode.split(".")[0] for i in code].count
    under_way, beside = 0, 0
    for i in code:
        if i.opcode == "WARPGROUP.DEPBAR.LE":
            under_way = int(i.operands[1], 16)
        elif i.opcode == "MUFU.EX2" and under_way:
            beside += 1
    exponentials = sum(i.opcode == "MUFU.EX2" for i in code)
    return Loop(count("LDG"), count("LDL") + count("STL"), exponentials, beside, count("R2P"))
