"""What every command answers to bad input: exit code 2, an error in words, and nothing on standard output."""

import shlex
from pathlib import Path

import pytest

SPMM = "bench spmm --m 64 --k 96 --n 32 --block 32 --density 0.5 --dtype fp32 --rounds 2 --device cpu"
ATTENTION = "bench attention --seq 128 --block 64 --heads 2:1 --dim 32 --dtype fp32 --mask full --device cpu"
BACKWARD = "bench attention-backward --device cpu"
A_CPU = "are a GPU's; a CPU would take hours. Give sizes by hand: "
PRODUCT = "--m 512 --k 512 --n 64"
HEADS = "--seq 1K --heads 2 --dim 64 --dtype fp32"
SIZES = {
    **dict.fromkeys(("spmm", "sddmm", "spgemm", "semi24", "fp8"), PRODUCT),
    "linear": "--tokens 64 --k 512 --n 512",
    "mlp": "--tokens 64 --width 512 --hidden 512",
    "planner": "--layers few --dtype fp32",
    "attention": HEADS,
    "attention-backward": HEADS,
}
# {model} has the matrices layer.0.weight, layer.1.weight and head.weight, and a bias.
REFUSED = (
    ("advise {model} --tensor layer.0.weigh", "layer.0.weight"),
    ("advise {model} --tensor bias", "2-D float matrix"),
    ("advise {model} --block 100", "multiple"),
    ("advise {model} --block big", "a block is written as"),
    ("advise {model} --block 512", "none of its 3 float matrices is at least 512x512"),
    ("advise {model} --device tpu", "no facts about a card named 'tpu'"),
    ("advise {model} --device b300", "no facts about a card named 'b300'"),
    ("advise {model} --device cuda:x", "device"),
    ("advise {model} --keep 1.5", "keep is 1.5; it must be a finite number from 0 to 1"),
    ("advise {model} --keep 25%", "'--keep': 25% is no number; write a fraction such as 0.25"),
    ("advise {model} --dtype int4", "unknown dtype"),
    ("advise {model} --dtype int8", "use one of bf16, fp16, fp32, fp64"),
    ("advise {model} --tokens 100000000000 --device h200", "tokens must be from 1 to"),
    ("advise {model} --tensor layer.0.weight --tokens 2000000000 --device cpu", "use fewer tokens"),
    ("advise {model} --break-even even.png", "even.png'; pictures are SVG, so its name must end in .svg"),
    ("advise {model} --picture even.png", "even.png'; pictures are SVG, so its name must end in .svg"),
    ("advise {folder}/w.npy --picture {folder}/none/p.svg", "--picture"),
    ("advise {folder}/w.npy --picture {folder}", "--picture"),
    ("demo --keep 25%", "'--keep': 25% is no number; write a fraction such as 0.25"),
    ("demo --device tpu", "tpu"),
    ("tune --kernel hopper.nothing", "is called 'hopper.nothing'; known: hopper.spmm,"),
    ("tune --kernel hopper.spmm,hopper.sddmm", "no kernel of these formats is called 'hopper.sddmm'"),
    ("tune --format dense", "--format dense: the vendor's library multiplies it"),
    ("tune --format bsr,dense_fp8 --device cpu", "--format dense_fp8: the vendor's library"),
    ("tune --format csr", "'csr'; did you mean 'bsr'? Known: semi24, bsr, bsr24, semi24_fp8, bsr_fp8, bsr24_fp8"),
    ("tune --keep 0 --device cpu", "a fraction of blocks"),
    ("tune none.npz --device cpu", "neither a file nor a shape"),
    ("profile hopper.spm", "no kernel is called 'hopper.spm'; did you mean 'hopper.spmm'"),
    ("profile spmm --block 64,128", "profile takes one case, and these options give 2"),
    ("profile spmm --device h2000", "h2000"),
    ("profile attention-backward --measure train --seq 128 --heads 1 --dim 64", "several kernels"),
    (f"profile hopper.semi24_skinny {PRODUCT}1 --device h200", "semi24_skinny cannot"),
    ("bench all --device cpu", "suites need a GPU; a CPU would take hours"),
    ("bench all --device cpu --only gemm", "no benchmark is called 'gemm'; did you mean 'spgemm'"),
    (f"{SPMM} --m 64,a", "--m '64,a'"),
    (f"{SPMM} --kernel fast", "is called 'fast'; known: hopper.spmm"),
    (f"{SPMM} --kernel hopper.spm --json", "is called 'hopper.spm'; did you mean 'hopper.spmm'"),
    (f"{SPMM} --peers mkl", "no peer is called 'mkl'"),
    (f"{SPMM} --pattern stripes", "got 'stripes'"),
    (f"{SPMM} --form A@A", "form is one of A@B"),
    (f"{SPMM} --device cuda:99", "device cuda:99 is not on this machine"),
    (f"{SPMM} --suite blocks", "leave out --m, --k, --n, --block, --density, --dtype, or"),
    ("bench spmm --device cpu --suite issue9", "no suite is called 'issue9'"),
    ("bench spmm --device cpu --suite blocks --pattern uniform", "leave out --pattern, or"),
    ("bench spmm --device cpu --suite blocks --kernel auto", "leave out --kernel, or"),
    ("bench spmm --device cpu --suite forms --form B@A", "leave out --form, or leave out --suite"),
    ("bench sddmm --device cpu --kernel cpu.spmm --m 64", "no kernel of sddmm is called 'cpu.spmm'"),
    ("bench spgemm --device cpu --block 16:16:16", "for A and B, got '16:16:16'"),
    ("bench spgemm --device cpu --suite blocks", "no suite is called 'blocks'; known: published"),
    ("bench linear --device cpu --epilogue tanh", "an epilogue is bias, one of relu, gelu, gelu_tanh, silu"),
    ("bench linear --device cpu --suite published --epilogue bias", "leave out --epilogue, or leave out --suite"),
    ("bench semi24 --device cpu --suite forms", "no suite is called 'forms'; known: published, story"),
    ("bench fp8 --device cpu --dtype bf16", "dtype is one of e4m3, e5m2, got 'bf16'"),
    ("bench pack --device cpu --to coo", "to is one of semi24, bsr, got 'coo'"),
    ("bench mlp --device cpu --measure serve", "measure is one of train, compiled, decode, got 'serve'"),
    ("bench mlp --device cpu --peers cublas", "'cublas'; known: torch_dense, torch_dense_compiled"),
    ("bench mlp --device cpu --suite published --measure train", "leave out --measure, or leave out --suite"),
    (f"{ATTENTION} --mask diagonal", "no mask is written 'diagonal'; known"),
    (f"{ATTENTION} --mask window", "window:W+sinks:S"),
    (f"{ATTENTION} --seq 8M", "a length is written as 8192"),
    (f"{ATTENTION} --heads 2:3", "2 query heads do not divide among 3"),
    (f"{ATTENTION} --heads 1:2:3", "heads and head sizes are written"),
    (f"{ATTENTION} --block 32", "a mask's block sides are 64 or 128, got 32"),
    (f"{ATTENTION} --peers cublas", "no peer is called 'cublas'; known: cudnn, fa4, flex"),
    (f"{ATTENTION} --suite published", "leave out --heads, --seq, --dim, --mask, --block, --dtype, or"),
    ("bench attention --device cpu --suite blocks", "'blocks'; known: published, length, density"),
    *((f"bench attention --device cpu --suite {x}", f"suite {x} needs a GPU") for x in ("published", "length")),
    (f"{BACKWARD} --measure forward", "measure is one of backward, train, got 'forward'"),
    (f"{BACKWARD} --mask diagonal", "no mask is written 'diagonal'"),
    (f"{BACKWARD} --seq 128 --kernel cpu.attention", "no kernel of attention_backward is called 'cpu.attention'"),
    (f"{BACKWARD} --seq 128 --kernel cpu.attention_paged", "was removed: name one of hopper.attention_bwd, "),
    (f"{BACKWARD} --peers fa5", "no peer is called 'fa5'; did you mean 'fa4' or 'fa3'? Known: cudnn, fa4"),
    (f"{BACKWARD} --suite sweep", "no suite is called 'sweep'; known: published, train"),
    (f"{BACKWARD} --suite published --any-order", "leave out --deterministic, or leave out --suite"),
    (f"{BACKWARD} --suite published", "published needs a GPU; a CPU would take hours. Give sizes by hand: --seq"),
    (f"{BACKWARD} --suite train", "suite train needs a GPU"),
    ("bench host --device cpu", "suite host needs a GPU"),
    ("bench host --device cpu --rounds 1", "suite host needs a GPU"),
    ("bench host --device cpu --call 'A - B'", "call is one of A @ B"),
    ("bench host --device cpu --sides 64-64", "sides are written as 64x1024x1024"),
    ("bench host --device cpu --suite host --call linear", "leave out --call, or leave out --suite"),
    *(
        (f"bench {name} --device cpu {more}", f"{A_CPU}{sizes}")
        for name, sizes in SIZES.items()
        for more in ("", f"--dtype {'e4m3' if name == 'fp8' else 'fp32'}", "--rounds 1")
    ),
)  # fmt: skip


@pytest.mark.parametrize(("command", "said"), REFUSED)
def test_bad_input_is_answered_in_words_with_exit_code_2(
    run, model: Path, tmp_path: Path, command: str, said: str
) -> None:
    (tmp_path / "w.npy").write_bytes(b"not read")
    result = run(*shlex.split(command.format(model=model, folder=tmp_path)))
    words = " ".join(result.stderr.split())
    assert said in words
    assert "error: " in words or "Usage:" in words
    assert "Traceback" not in words
    assert (result.exit_code, result.stdout) == (2, "")
