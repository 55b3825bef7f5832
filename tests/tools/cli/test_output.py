"""The command line on any output: narrow, ASCII, closed, full. Nothing is cut, and no traceback is printed."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.text import Text
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from sparsek.core import env, terminal
from sparsek.core.device import CARDS
from sparsek.core.terminal import NARROWEST, PIPE_WIDTH, console, table
from sparsek.tools.cli import doctor
from sparsek.tools.cli.__main__ import COMMANDS as COMMAND_HELP
from sparsek.tools.cli.__main__ import app
from sparsek_bench.benches import HELP
from sparsek_bench.commands.bench import ALL
from tests.sampling import half, sampled

WIDTHS = [0, 1, 20, 40, 80, 200]
BENCHES = (
    "attention",
    "attention-backward",
    "fp8",
    "linear",
    "mlp",
    "pack",
    "planner",
    "sddmm",
    "semi24",
    "spmm",
)
PAGES = [
    [], ["doctor"], ["demo"], ["advise"], ["prune"], ["tune"], ["bench"], ["profile"], ["profile", "hopper.spmm"],
    *(["bench", name] for name in BENCHES),
]  # fmt: skip
SMALL_BENCH = ["bench", "spmm", "--m", "64", "--k", "64", "--n", "16", "--block", "16", "--dtype", "fp32",
               "--rounds", "1", "--device", "cpu"]  # fmt: skip


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs a command at a width, in an encoding: doctor with one operation's kernels, advise with a small file."""
    monkeypatch.setenv("TERM", "dumb")
    every = doctor.names_for
    monkeypatch.setattr(
        doctor, "names_for", lambda op, storage=None: every(op, storage) if storage == "bsr" else ()
    )
    save_file({"layer.weight": torch.randn(64, 64)}, tmp_path / "m.safetensors")

    def run(arguments: list[str], width: int, charset: str = "utf-8") -> Result:
        filled = [word.format(folder=tmp_path) for word in arguments]
        return CliRunner(charset=charset).invoke(app, filled, env={"COLUMNS": str(width)})

    return run


COMMANDS = {
    "doctor": ["doctor", "--verbose"],
    "advise": ["advise", "{folder}/m.safetensors", "--block", "16", "--tokens", "8", "--device", "h200"],
    "bench": SMALL_BENCH,
    "tune": ["tune", "64x64", "--tokens", "8", "--block", "32", "--format", "bsr", *SMALL_BENCH[-4:]],
    "profile": ["profile", "hopper.spmm", "--m", "512", "--k", "512", "--n", "64", "--device", "h200"],
    "version": ["--version"],
}


def figures(text: str) -> set[str]:
    """The numbers with a point that a table shows, but for times and what follows from them."""
    return set(re.findall(r"\d+\.\d+", text))


@pytest.mark.parametrize(("name", "charset"), half(product(COMMANDS, ("utf-8", "ascii"))))
def test_every_command_prints_all_of_its_text_at_any_width(call, name: str, charset: str) -> None:
    shown = {}
    widths = [0, 40] if name in ("doctor", "bench", "tune", "profile") else WIDTHS
    for width in widths:
        result = call(COMMANDS[name], width, charset)
        assert result.exit_code == 0, result.output
        shown[width] = result.stdout
        assert result.stdout.isascii() or charset == "utf-8"
        assert not {"…", "~"} & set(result.stdout)
        longest = max(map(len, result.stdout.splitlines()))
        assert longest <= (max(width, NARROWEST) if width else PIPE_WIDTH)
    if name == "advise":  # the others measure
        wide = figures(shown[200]) - figures(torch.__version__)
        joined = "".join(shown[40].split())
        assert wide
        assert [each for each in wide if each not in joined] == []


@pytest.mark.parametrize(("width", "charset"), half(product(WIDTHS, ("utf-8", "ascii"))))
def test_help_is_printed_at_any_width(call, width: int, charset: str) -> None:
    for page in PAGES:
        result = call([*page, "--help"], width, charset)
        assert result.exit_code == 0, result.output
        assert "Usage:" in result.stdout
        assert "--help" in result.stdout
        if width < 60 and width:
            assert "…" not in result.stdout
        if width >= 40:
            assert max(map(len, result.stdout.splitlines())) <= width
        if page in ([], ["bench"]):
            texts = COMMAND_HELP if not page else {**HELP, "all": ALL}
            words = re.sub(r"[│|\s]", "", result.stdout)
            assert [text for text in texts.values() if re.sub(r"\s", "", text) not in words] == []


def test_h_is_short_for_help_everywhere(call) -> None:
    for page in ([], ["bench"], ["bench", "spmm"], ["prune"], ["profile", "hopper.spmm"]):
        assert call([*page, "-h"], 80).stdout == call([*page, "--help"], 80).stdout


def test_help_lists_the_dtypes_and_the_cards_that_errors_list(call) -> None:
    for command in ("advise", "demo"):
        shown = " ".join(call([command, "--help"], 200).stdout.split())
        assert f"a card to predict for ({', '.join(each for each in CARDS if each != 'cpu')})" in shown
    for command in ("advise", "tune"):
        shown = " ".join(call([command, "--help"], 200).stdout.split())
        assert "One of bf16, fp16, fp32, fp64." in shown
    refused = call(["advise", "x.npy", "--dtype", "int8"], 200).stderr
    assert "use one of bf16, fp16, fp32, fp64" in refused


@pytest.mark.parametrize("width", WIDTHS)
def test_wrong_usage_is_told_at_any_width(call, width: int) -> None:
    for arguments in (["bench", "spmm", "--nope"], ["advise"]):
        result = call(arguments, width, "ascii")
        assert result.exit_code == 2
        assert "Usage:" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_long_step_is_told_every_two_seconds(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(terminal, "TICK_SECONDS", 0.04)
    threads = threading.active_count()
    with terminal.progress(3, "one long step"):
        time.sleep(0.3)
    assert 2 <= capsys.readouterr().err.count("0/3 one long step\n") <= 8
    assert threading.active_count() == threads
    with terminal.progress(3, "timed", watch=False):
        assert threading.active_count() == threads
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_the_time_left_is_told_by_the_last_steps(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    now = 0.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    with terminal.progress(30, "blocks", watch=False, left=True) as (say, advance):
        for seconds in (2.5, 0.1, 0.1, 0.1, 10, 10, 40, 60, 60):
            now += seconds
            advance()
        now += 30
        say("a long one")
    assert capsys.readouterr().err.splitlines() == [
        "1/30 blocks",
        *("5/30 blocks, 85 s left", "6/30 blocks, 3 min left", "7/30 blocks, 8 min left"),
        *("8/30 blocks, 13 min left", "9/30 blocks, 19 min left", "9/30 a long one, 18 min left"),
    ]
    with terminal.progress(2, "blocks", watch=False) as (_, advance):
        now += 3
        advance()
    assert capsys.readouterr().err == "1/2 blocks\n"


@pytest.mark.parametrize("text", ["0", "00", "-5", "x", "", "٣"])
def test_a_width_of_nothing_is_unknown(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("COLUMNS", text)
    assert env.columns() is None
    screen = console()
    screen.file = io.StringIO()
    assert screen.width == PIPE_WIDTH
    screen.print("words")
    assert screen.file.getvalue() == "words\n"


def test_a_dumb_terminal_has_the_width_that_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)
    assert console().width == 40


def test_the_closing_notes_of_a_bench_are_wrapped_between_words(call) -> None:
    lines = call([*SMALL_BENCH, "--peers", "cusparse"], 40).stdout.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("cusparse"))
    assert [line.rstrip() for line in lines[at : at + 2]] == [
        "cusparse not measured: runs on cuda, the",
        "case is on cpu (every case)",
    ]


@pytest.mark.parametrize("width", [20, 40])
def test_a_table_without_room_is_a_list_of_its_rows(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = table("Products")
    for title in ("case", "kernel", "min ms", "empty", "max ms"):
        shown.add_column(title, no_wrap=True)
    shown.add_row("8192 block 128", Text("hopper.spmm\nof two lines"), "0.123456", "", "0.234567")
    screen = console()
    screen.file = io.StringIO()
    screen.print(shown)
    text = screen.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    if width == 40:
        assert text.splitlines() == [
            "Products",
            "8192 block 128",
            "  kernel: hopper.spmm of two lines",
            "  min ms: 0.123456",
            "  max ms: 0.234567",
        ]
    assert {"0.123456", "0.234567"} <= set(text.split())


def test_long_first_cells_stand_above_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    shown = table("Matrices")
    for title in ("matrix", "format", "ms", "GB/s"):
        shown.add_column(title, no_wrap=True, justify="left" if title in ("matrix", "format") else "right")
    name = "model.layers.0.self_attn.q_proj.weight of a long model"
    shown.add_row(name, "BSR 64", "0.12345", "1234.567")
    shown.add_row("", "2:4", "0.1", "12.0")
    screen = console()
    screen.file = io.StringIO()
    screen.print(shown)
    assert [line.rstrip() for line in screen.file.getvalue().splitlines()] == [
        "Matrices",
        "matrix",
        "  format      ms     GB/s",
        name,
        "  BSR 64 0.12345 1234.567",
        "  2:4        0.1     12.0",
    ]


def test_a_table_with_room_breaks_words_before_it_cuts_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    shown = table("")
    for title in ("why", "ms", "GB/s"):
        shown.add_column(title)
    shown.add_row("a long and winding reason of many words", "0.12345", "1234.567")
    screen = console()
    screen.file = io.StringIO()
    screen.print(shown)
    assert "0.12345 1234.567" in screen.file.getvalue()


def test_what_an_encoding_lacks_is_drawn_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    screen = console()
    raw = io.BytesIO()
    screen.file = io.TextIOWrapper(raw, encoding="ascii")
    shown = table("8192³")
    shown.add_column("case", no_wrap=True)
    shown.add_row("512²×64")
    screen.print(shown)
    screen.print("│█▒░│ é")
    screen.file.flush()
    assert raw.getvalue().decode().split() == ["8192^3", "case", "512^2x64", "|#+.|", "?"]


# Runs a command once, because what it imports takes seconds, and in a fork for each output; then prints what became
# of those.
FORKS = """
import contextlib, json, os, sys, tempfile
import sparsek.tools.cli.__main__ as program
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.suppress(SystemExit):
    program.main()
found = []
for output in json.loads(os.environ["OUTPUTS"]):
    error = tempfile.TemporaryFile()
    if not (child := os.fork()):
        os.dup2(output, 1)
        os.dup2(error.fileno(), 2)
        program.main()
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    error.seek(0)
    found.append((code, error.read().decode()))
print(json.dumps(found))
"""
ENDINGS = [["--help"], COMMANDS["profile"], ["--version"]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", sampled(ENDINGS, 2), ids=" ".join)
def test_a_closed_pipe_ends_a_command_without_a_word_and_a_full_disk_with_a_line(
    arguments: list[str],
) -> None:
    reader, closed = os.pipe()
    os.close(reader)
    with os.fdopen(closed, "wb", buffering=0), Path("/dev/full").open("w") as full:
        outputs = closed, full.fileno()
        done = subprocess.run(
            [sys.executable, "-c", FORKS, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=Path(__file__).parents[3],
            pass_fds=outputs,
            env={**os.environ, "OUTPUTS": json.dumps(outputs)},
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[141, ""], [2, "error: [Errno 28] No space left on device\n"]]


def test_the_program_is_the_package_of_commands() -> None:
    command = [sys.executable, "-m", "sparsek.tools.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert done.stdout.startswith("sparsek ")


def test_an_interrupt_is_one_line_and_exit_code_130() -> None:
    wait = "print('ready', flush=True), time.sleep(60)"
    program = (
        # A job in the background of a shell ignores SIGINT, and so do its children. The module of the command is a
        # stand-in, because it would import torch.
        "import signal, time, types, sparsek.tools.cli.__main__ as program; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"program.import_module = lambda name: types.SimpleNamespace(doctor=lambda: ({wait})); program.main()"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (130, "interrupted\n")


@pytest.mark.parametrize("page", [[], ["bench"], ["profile"]])
def test_help_imports_no_torch(page: list[str]) -> None:
    program = (
        "import sys; from sparsek.tools.cli.__main__ import app; sys.argv[1:] = "
        + repr([*page, "--help"])
        + "\n"
        "try: app()\nexcept SystemExit: assert 'torch' not in sys.modules, sorted(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_output_is_no_fault() -> None:
    """`sparsek --version >&-`: Python has no standard output then."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.stdout = None; from sparsek.tools.cli.__main__ import main; main()",
            "--version",
        ],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
