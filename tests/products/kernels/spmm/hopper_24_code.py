"""Compiles hopper_24.cu by NVRTC where no GPU is, and reads the machine code."""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import triton

from sparsek.engine.launch import nvrtc
from sparsek.engine.launch.nvrtc import OPTIONS
from sparsek.products.kernels.spmm.hopper_24 import PROGRAM, Config
from tests.engine.launch import sass
from tests.engine.launch.kept import kept
from tests.engine.launch.sass import Instruction, Program

VERBOSE = ("--ptxas-options=-v", "--ptxas-options=--warn-on-spills")
SPARSE = ("HGMMA.SP", "QGMMA.SP")  # of 16 bits, of 8
REGISTER = re.compile(r"R(\d+)(?:\.\w+)?")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class Code(NamedTuple):
    """Facts of one compiled kernel. `wgmma` and `copies` are the distinct instructions, `log` what the compiler said.

    `overwritten`: see the function. `unwritten` and `mixed` are what `sass` finds.
    """

    wgmma: set[str]
    copies: set[str]
    stack: tuple[int, ...]
    local: int
    overwritten: list[str]
    unwritten: list[str]
    mixed: list[str]
    log: str


def disassembled(source: str, name: str, options: Sequence[str]) -> tuple[str, str]:
    """nvdisasm's text of what NVRTC compiles, and NVRTC's messages."""
    options = [*options, *VERBOSE]

    def make() -> bytes:
        cubin, log = nvrtc.compile_cuda(source, name, options)
        return json.dumps([sass.disassembled(cubin), log]).encode()

    text, log = json.loads(kept(make, source, name, options, nvrtc.version(), triton.__version__))
    return text, log


def compiled(c: Config, source: str = "") -> Code:
    """The kernel of `c`, of `source` in the place of hopper_24.cu if given."""
    given = source or PROGRAM.source
    text, log = disassembled(given, PROGRAM.path.name, [*OPTIONS, *c.defines])
    program = sass.parsed(text)
    opcodes = [each.opcode for each in program.code]
    spills = SPILLS.search(log)
    assert spills is not None, log
    return Code(
        {each for each in opcodes if "MMA" in each},
        {each.split(".")[0] for each in opcodes if each.startswith(("UTMA", "UBLKCP"))},
        tuple(map(int, spills.groups())),
        sum(each.startswith(("LDL", "STL")) for each in opcodes),
        overwritten(program),
        sass.unwritten(program),
        sass.mixed_descriptors(program),
        log,
    )


def overwritten(program: Program) -> list[str]:
    """Writes of a register while a wgmma.sp that takes its nibbles from it may still run.

    A wgmma is done when a wait leaves fewer groups than were committed since, its own among them.
    """
    found = set()
    for at, i in enumerate(program.code):
        if not i.opcode.startswith(SPARSE):
            continue
        nibbles = _registers(i)[-1]
        waiting = [(place, _commits(i)) for place in program.successors[at]]
        seen = set(waiting)
        while waiting:
            place, groups = waiting.pop()
            here = program.code[place]
            if here.opcode == "WARPGROUP.DEPBAR.LE" and groups > int(here.operands[1], 16):
                continue
            if nibbles in _written(here):
                found.add(f"{here} while {i} may run")
            for then in program.successors[place]:
                state = then, min(groups + _commits(here), 4)
                if state not in seen:
                    seen.add(state)
                    waiting.append(state)
    return sorted(found)


def _commits(i: Instruction) -> int:
    return int(i.opcode.startswith(SPARSE) and i.operands[-1] == "gsb0")


def _registers(i: Instruction) -> list[int]:
    return [int(found[1]) for each in i.operands if (found := REGISTER.fullmatch(each))]


def _written(i: Instruction) -> range:
    """The registers that an instruction writes: from its first operand on, predicates aside."""
    for operand in i.operands:
        if re.fullmatch(r"U?P(\d|T)", operand):
            continue
        first = REGISTER.fullmatch(operand)
        if first is None:
            break
        shape = re.search(r"GMMA\.SP\.64x(\d+)", i.opcode)
        width = int(shape[1]) // 2 if shape else 4 if ".128" in i.opcode else 2 if _is_wide(i.opcode) else 1
        return range(int(first[1]), int(first[1]) + width)
    return range(0)


def _is_wide(opcode: str) -> bool:
    return ".64" in opcode or ".WIDE" in opcode
