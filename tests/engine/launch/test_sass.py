"""sass: what it finds in hand-written machine code, and in code from which one write is taken away."""

import pytest

pytest.importorskip("triton")

from tests.engine.launch.sass import (
    Loop,
    early_arrivals,
    loops,
    mixed_descriptors,
    multiplying_loops,
    parsed,
    uniform_reads,
    uniform_writes,
    unwritten,
)


def listing(*lines: str) -> str:
    """As nvdisasm prints it: an address before each instruction, a label on a line of its own."""
    code = ["\t.section\t.text.kernel", ".text.kernel:"]
    address = 0
    for line in lines:
        if line.endswith(":"):
            code.append(line)
        else:
            code.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(code)


AROUND_A_LOOP = (
    "ULDC UR4, c[0x0][0x210]",
    "UISETP.GE.AND UP0, UPT, UR4, 0x2, UPT",
    "UMOV UR6, 0x0",
    "UMOV UR7, 0x40000040",
    "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0",
    "@!P0 BRA `(.L_x_1)",
    "UMOV UR8, UR6",
    ".L_x_0:",
    "UMOV UR9, UR7",
    "UIADD3.64 UR10, UR8, 0x2, URZ",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
    "UIADD3 UR4, UR4, -0x1, URZ",
    "UISETP.NE.AND UP0, UPT, UR4, URZ, UPT",
    "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0",
    "@P0 BRA `(.L_x_0)",
    ".L_x_1:",
    "HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88, gsb0",
    "EXIT",
)


def test_a_descriptor_that_is_written_only_in_the_loop_is_found_after_it():
    (found,) = unwritten(parsed(listing(*AROUND_A_LOOP)))
    assert found == ("0x00e0: HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88, gsb0 reads UR10, UR11")


def test_nothing_is_found_where_the_path_around_the_loop_writes_it_too():
    fixed = (*AROUND_A_LOOP[:2], "UIADD3.64 UR10, UR8, 0x2, URZ", *AROUND_A_LOOP[2:])
    whole = ("UMOV UR8, 0x0", "UMOV UR9, 0x0", *fixed)
    assert unwritten(parsed(listing(*whole))) == []
    for at in range(2):
        assert len(unwritten(parsed(listing(*whole[:at], *whole[at + 1 :])))) == 1


def test_a_copy_of_what_nothing_wrote_is_found_where_it_is_read():
    copied = ("UMOV UR8, 0x0", "UMOV UR9, UR5", "EXIT")
    assert unwritten(parsed(listing(*copied))) == []
    (found,) = unwritten(parsed(listing(*copied[:2], "UIADD3 UR4, UR9, 0x1, URZ", "EXIT")))
    assert found.endswith("UIADD3 UR4, UR9, 0x1, URZ reads UR9")
    overwritten = ("UMOV UR9, 0x1", "UIADD3 UR4, UR9, 0x1, URZ", "EXIT")
    assert unwritten(parsed(listing(*copied[:2], *overwritten))) == []


def test_an_older_value_that_comes_through_on_one_path_is_a_mixed_descriptor():
    stale = parsed(listing("UMOV UR10, 0x7", "UMOV UR11, 0x7", *AROUND_A_LOOP))
    assert unwritten(stale) == []
    (found,) = mixed_descriptors(stale)
    assert found.startswith("0x0100: HGMMA")
    assert found.endswith("reads UR10, UR11")
    assert mixed_descriptors(parsed(listing("UMOV UR10, 0x7", "@!UP0 UMOV UR10, 0x8", *TWO_LOOPS))) == []


def test_an_arrival_before_all_warps_are_done_with_shared_memory_is_found():
    arrives = "@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x34860], RZ"
    whole = ("STS.64 [R4], R152", "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", arrives, "EXIT")
    assert early_arrivals(parsed(listing(*whole))) == []
    (found,) = early_arrivals(parsed(listing(whole[0], *whole[2:])))
    assert found == f"0x0010: {arrives}"
    around = (".L_x_0:", *whole[1:3], "LDS.64 R4, [R3]", "@P0 BRA `(.L_x_0)", arrives, "EXIT")
    assert early_arrivals(parsed(listing(*around))) == [f"0x0040: {arrives}"]


@pytest.mark.parametrize(
    ("line", "writes", "reads"),
    [
        ("UMOV UR60, 0x4", {60}, set()),
        ("ULDC.64 UR6, c[0x0][0x5a0]", {6, 7}, set()),
        ("ULDC UR5, c[0x0][UR4+0x20]", {5}, {4}),
        ("R2UR UR4, R0", {4}, set()),
        ("S2UR UR5, SR_CTAID.X", {5}, set()),
        ("ELECT P0, URZ, PT", set(), set()),
        ("ELECT P0, UR7, PT", {7}, set()),
        ("UISETP.GE.U32.AND UP0, UPT, UR4, UR5, UPT", set(), {4, 5}),
        ("UIADD3 UR16, UP0, UR38, 0xf0, URZ", {16}, {38}),
        ("@!UP1 UIADD3 UR5, -UR5, URZ, URZ", {5}, {5}),
        ("UIADD3.X UR17, URZ, UR39, URZ, UP0, !UPT", {17}, {39}),
        ("UIADD3.64 UR8, UR4, UR12, URZ", {8, 9}, {4, 5, 12, 13}),
        ("UIMAD.WIDE.U32 UR60, UR6, 0x1, UR50", {60, 61}, {6, 50, 51}),
        ("ULOP3.LUT UP0, URZ, UR4, 0x1, URZ, 0xc0, !UPT", set(), {4}),
        ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", set(), set()),
        ("VOTEU.ANY UP2, P0", set(), set()),
        ("IMAD.U32 R0, RZ, RZ, UR7", set(), {7}),
        ("FFMA R2, R4, UR9, -R6.reuse", set(), {9}),
        ("@!P1 LDG.E R4, desc[UR52][R2.64+0x10]", set(), {52, 53}),
        ("LDS.U8 R0, [R0+UR5+0x381cc]", set(), {5}),
        ("STS.64 [UR4+0x38], R2", set(), {4}),
        ("@!UP0 SYNCS.EXCH.64 URZ, [UR4+0x38000], UR6", set(), {4, 6, 7}),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [UR18+0x16130], R3", set(), {18}),
        ("UTMALDG.4D [UR8], [UR16]", set(), {*range(8, 14), 16, 17}),
        ("UTMALDG.2D [UR8], [UR16], desc[UR20]", set(), {*range(8, 12), 16, 17, 20, 21}),
        ("@UP0 UTMASTG.5D [UR8], [UR20]", set(), {*range(8, 14), 20, 21}),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], RZ, !UPT", set(), {44, 45, 46, 47}),
        ("HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88, gsb0", set(), {10, 11}),
    ],
)
def test_what_an_instruction_writes_and_reads(line: str, writes: set[int], reads: set[int]):
    (i,) = parsed(listing(line)).code
    assert uniform_writes(i) == writes
    assert uniform_reads(i) == reads


def test_paths_follow_branches_tables_and_exits():
    program = parsed(
        listing(
            'BRX R2 -0x310 (*"BRANCH_TARGETS .L_x_0,.L_x_2"*)',
            ".L_x_0:",
            "@P0 EXIT",
            "BRA.U UP0, `(.L_x_2)",
            "BRA `(.L_x_0)",
            ".L_x_2:",
            "BSYNC B0",
            "EXIT",
        )
    )
    assert program.successors == [[1, 4], [2], [4, 3], [1], [5], []]


@pytest.mark.parametrize(
    ("line", "error"),
    [("CALL.REL.NOINC `(.L_x_9)", "where does this jump"), ("BRA UR4", "jump"), ("", "no instructions")],
)
def test_code_that_cannot_be_followed_is_refused(line: str, error: str):
    with pytest.raises(ValueError, match=error):
        parsed(listing(line) if line else "")


TWO_LOOPS = (
    "UMOV UR4, 0x0",
    ".L_x_0:",  # tiles
    "LDL R3, [R1]",
    ".L_x_1:",  # steps
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3",
    "@!P0 BRA `(.L_x_3)",
    ".L_x_2:",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    "LDG.E R9, desc[UR4][R2.64]",
    "MUFU.EX2 R8, R8",
    "MUFU.EX2 R9, R9",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "MUFU.EX2 R10, R10",
    "@P1 BRA `(.L_x_1)",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0",
    "@P2 BRA `(.L_x_0)",
    "EXIT",
    ".L_x_3:",  # waits out of the way, and goes back
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3",
    "@!P0 BRA `(.L_x_3)",
    "BRA `(.L_x_2)",
)


def test_loops_are_what_leads_back_to_its_head():
    steps = {*range(2, 12), 15, 16, 17}
    assert loops(parsed(listing(*TWO_LOOPS))) == {1: {1, *steps, 12, 13}, 2: steps, 15: {15, 16}}


def test_only_the_innermost_loop_that_multiplies_is_summed_up():
    assert multiplying_loops(parsed(listing(*TWO_LOOPS))) == [Loop(1, 0, 3, 2)]
    spilled = tuple(line.replace("LDG.E R9, desc[UR4][R2.64]", "STL [R1+0x8], R9") for line in TWO_LOOPS)
    assert multiplying_loops(parsed(listing(*spilled))) == [Loop(0, 1, 3, 2)]
