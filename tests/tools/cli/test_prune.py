"""`sparsek prune`: a checkpoint becomes sparse and loads, its report, a run that was ended, and what is refused."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.models import quality, stream
from sparsek.tools.cli import prune as command
from tests.house.tools import need

WORDS = [f"word{at}" for at in range(60)]
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def text(count: int, seed: int) -> str:
    draw = torch.randint(60, (count, 12), generator=torch.Generator("cpu").manual_seed(seed))
    return "\n\n".join(" ".join(WORDS[at] for at in line) for line in draw.tolist())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a causal model and of an encoder with a tokenizer, and files of texts."""
    need("transformers")
    lib: Any = importlib.import_module("transformers")
    tokens: Any = importlib.import_module("tokenizers")
    folder = tmp_path_factory.mktemp("models")
    names = {"[PAD]": 0, "[UNK]": 1, "</s>": 2} | {word: at + 3 for at, word in enumerate(WORDS)}
    inner = tokens.Tokenizer(tokens.models.WordLevel(names, unk_token="[UNK]"))
    inner.pre_tokenizer = tokens.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "</s>"}
    tokenizer = lib.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=32, **special)
    torch.manual_seed(0)
    llama = lib.LlamaConfig(vocab_size=64, max_position_embeddings=32, **SMALL)
    bert = lib.BertConfig(vocab_size=64, max_position_embeddings=32, **SMALL)
    experts = {"num_local_experts": 3, "num_key_value_heads": 1}
    mixtral = lib.MixtralConfig(vocab_size=64, max_position_embeddings=32, **SMALL, **experts)
    sides = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    t5 = lib.T5Config(vocab_size=64, decoder_start_token_id=0, **sides)
    for name, model in (
        ("llama", lib.LlamaForCausalLM(llama)),
        ("bert", lib.BertModel(bert)),
        ("mixtral", lib.MixtralForCausalLM(mixtral)),
        ("t5", lib.T5ForConditionalGeneration(t5)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "texts.txt").write_text(text(20, 1))
    (folder / "other.jsonl").write_text("\n".join(json.dumps({"text": text(1, at)}) for at in range(5)))
    pairs = [{"text": text(1, at), "target": text(1, at + 99)} for at in range(11)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return {each.stem: each for each in folder.iterdir()}


def test_a_causal_model_becomes_a_sparse_checkpoint_with_a_report(run, made: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rules = [
        "--rule",
        "*.layers.0.mlp.*=semi24",
        "--rule",
        "*.q_proj=dense",
        "--rule",
        "*.k_proj=bsr_fp8:32:0.25",
    ]
    result = run(
        "prune", made["llama"], "-o", out, "--calib", made["texts"], "--block", "32", "--length", "16", *rules
    )
    assert result.exit_code == 0, result.output
    assert "12 of 15 layers are sparse" in result.stdout
    assert "Perplexity" in result.stdout
    names = {each.name for each in out.iterdir()}
    assert names >= {"config.json", "model.safetensors", "report.html", "report.json", "tokenizer.json"}
    assert command.UNFINISHED not in names
    lib: Any = importlib.import_module("transformers")
    model = lib.AutoModelForCausalLM.from_pretrained(out)
    layer = model.model.layers[0]
    assert type(layer.mlp.up_proj.weight) is sk.Semi24
    assert layer.self_attn.k_proj.weight.matrix.block == (32, 32)
    assert type(layer.self_attn.q_proj) is torch.nn.Linear
    assert layer.self_attn.v_proj.weight.block == (32, 32)
    report = json.loads((out / "report.json").read_text())
    found = report["quality"]
    assert (found["measure"], report["card"], report["tokens"]) == ("perplexity", "NVIDIA H200", 4096)
    tokenizer = lib.AutoTokenizer.from_pretrained(out)
    _, held_out = command._split(command._texts(made["texts"]), made["texts"])
    pieces = command._Data(tokenizer, command.CAUSAL, 16, 1).batches(held_out, 256, 1)
    assert len(pieces) == found["texts"]
    after = quality.perplexity(model, pieces)
    assert after == pytest.approx(found["after"], rel=1e-3)
    page = (out / "report.html").read_text()
    assert page.count("<figure>") == 12
    assert "Perplexity" in page
    assert "texts.txt" in page


def test_an_encoder_is_compared_by_its_hidden_states(run, made: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--eval", made["other"], "--config", "semi24", "--rule", "*.key=auto", "--max-error", "0.4"]
    more += ["--card", "h100", "--method", "wanda"]
    result = run(
        "prune", made["bert"], "-o", out, "--calib", made["texts"], "--tokens", "65536", *more, "--json"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((out / "report.json").read_text())
    assert report["quality"]["measure"] == "cosine"
    assert report["quality"]["before"] == 1
    assert 0.5 < report["quality"]["after"] < 1
    assert report["quality"]["texts"] == 5
    assert "H100" in report["card"]
    keys = [row for row in report["rows"] if row["name"].endswith("key")]
    assert {row["why_not"] for row in keys} == {f"no form is predicted to be faster on {report['card']}"}
    lib: Any = importlib.import_module("transformers")
    model, dense = (lib.AutoModel.from_pretrained(each) for each in (out, made["bert"]))
    batch = {"input_ids": torch.tensor([[3, 4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    states = quality.hidden_means(model, [batch])
    torch.testing.assert_close(states, model(**batch)[0][:, :3].mean(1).detach())
    assert torch.cosine_similarity(states, quality.hidden_means(dense, [batch])) > 0.5


def test_packed_experts_become_sparse_by_name(run, made: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rules = ["--config", "dense", "--rule", "*.experts.gate_up_proj=bsr:32", "--rule", "*.down_proj=semi24"]
    result = run("prune", made["mixtral"], "-o", out, "--calib", made["texts"], "--length", "16", *rules)
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "report.json").read_text())["rows"]
    shapes = {tuple(row["shape"]) for row in rows if row["format"]}
    assert shapes == {(3, 256, 64), (3, 64, 128)}
    assert all(0 < row["error_after"] < row["error"] and row["speed"] for row in rows if row["format"])
    model = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(out)
    assert type(model.model.layers[0].mlp.experts.down_proj.weight) is sk.Semi24


def test_an_encoder_with_a_decoder_takes_texts_with_targets(run, made: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("prune", made["t5"], "-o", out, "--calib", made["pairs"], "--block", "32", "--batch", "4")
    assert result.exit_code == 0, result.output
    report = json.loads((out / "report.json").read_text())
    assert sum(bool(row["format"]) for row in report["rows"]) == 2 * 6 + 2 * 10
    lib: Any = importlib.import_module("transformers")
    model, tokenizer = (
        lib.T5ForConditionalGeneration.from_pretrained(out),
        lib.AutoTokenizer.from_pretrained(out),
    )
    _, held_out = command._split(command._texts(made["pairs"]), made["pairs"])
    data = command._Data(tokenizer, command.PAIRS, 32, 4)
    (batch,) = data.batches(held_out, 9, 1)
    assert batch["labels"].shape != batch["input_ids"].shape
    found = report["quality"]
    assert (found["measure"], found["texts"]) == ("perplexity", 1)
    assert found["after"] == pytest.approx(float(model.eval()(**batch).loss.detach().exp()), rel=1e-3)
    assert min(len(each["labels"]) for each in data.batches(command._texts(made["pairs"]), 9)) == 1
    refused = run("prune", made["t5"], "-o", tmp_path / "other", "--calib", made["texts"])
    said = "T5ForConditionalGeneration is an encoder with a decoder; each line of a .jsonl file must be an object with"
    assert said in " ".join(refused.stderr.split())


def test_a_run_that_was_ended_goes_on_to_the_same_bytes(
    run, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--calib", made["texts"], "--block", "32", "--length", "16"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run("prune", made["llama"], "-o", whole, *given).exit_code == 0
    replace = Path.replace

    def dying(self: Path, target: Path) -> Path:
        if target.name.startswith("finished-00001"):
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying)
        assert run("prune", made["llama"], "-o", out, *given).exit_code == 130
    assert [each.name for each in out.iterdir()] == [command.UNFINISHED]
    again = run("prune", made["llama"], "-o", out, *given)
    assert (again.exit_code, again.stdout) == (2, "")
    assert "--resume continues it" in " ".join(again.stderr.split())
    other = run("prune", made["llama"], "-o", out, *given, "--method", "wanda", "--resume")
    assert "another model, config, method or calibration" in " ".join(other.stderr.split())
    assert run("prune", made["llama"], "-o", out, *given, "--resume").exit_code == 0
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    figures = [json.loads((each / "report.json").read_text()) for each in (out, whole)]
    assert figures[0]["quality"] == figures[1]["quality"]
    files = {each: each.stat().st_mtime_ns for each in out.iterdir()}
    (out / command.UNFINISHED).mkdir()  # of a kill while it was removed
    (out / command.UNFINISHED / stream.STATE).touch()
    done = run("prune", made["llama"], "-o", out, *given, "--resume")
    assert (done.exit_code, done.stderr) == (0, "")
    said = " ".join(done.stdout.split())
    assert f"{out}: the run is finished; its report is {out / 'report.html'}" in said
    assert {each: each.stat().st_mtime_ns for each in out.iterdir()} == files
    as_json = run("prune", made["llama"], "-o", out, *given, "--resume", "--json")
    assert json.loads(as_json.stdout) == json.loads((out / "report.json").read_text())
    other = run("prune", made["llama"], "-o", out, *given, "--resume", "--keep", "0.25")
    assert (other.exit_code, other.stdout) == (2, "")
    said = (
        "has a finished run whose config is bsr (block 32, keep 0.5 where not given), and not bsr (block 32"
    )
    assert said in " ".join(other.stderr.split())
    again = run("prune", made["llama"], "-o", out, *given)
    assert "is not empty; -o names the folder of a new checkpoint" in " ".join(again.stderr.split())
    for more in (["--samples", "3"], ["--tokens", "8"], ["--eval", made["texts"]]):
        other = run("prune", made["llama"], "-o", out, *given, "--resume", *more)
        assert other.exit_code == 2
        assert "a finished run of another model, calibration or option" in " ".join(other.stderr.split())
    config = (out / "config.json").read_text()
    for name, text in (
        ("config.json", json.dumps(json.loads(config) | {"quantization_config": None})),
        ("config.json", None),
        ("model.safetensors", None),
    ):
        (out / "config.json").write_text(config)
        (out / name).unlink() if text is None else (out / name).write_text(text)
        gone = run("prune", made["llama"], "-o", out, *given, "--resume")
        assert gone.exit_code == 2
        assert "the report of a finished run, but not its checkpoint" in " ".join(gone.stderr.split())


@pytest.mark.parametrize("place", ["model.embed_tokens", "model.norm", "lm_head"])
def test_nan_outside_of_the_blocks_is_refused(run, made: Any, tmp_path: Path, place: str) -> None:
    lib: Any = importlib.import_module("transformers")
    model = lib.AutoModelForCausalLM.from_pretrained(made["llama"])
    with_nan = tmp_path / "nan"
    model.get_submodule(place).weight.data[...] = torch.nan
    model.save_pretrained(with_nan)
    lib.AutoTokenizer.from_pretrained(made["llama"]).save_pretrained(with_nan)
    result = run("prune", with_nan, "-o", tmp_path / "out", "--calib", made["texts"], "--block", "32")
    assert result.exit_code == 2
    tied = place == "lm_head" and model.config.tie_word_embeddings
    owner = "model.embed_tokens" if tied else place
    assert f"{owner}: its weight has NaN or Inf" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_what_is_refused_leaves_no_folder(run, made: Any, tmp_path: Path) -> None:
    lib: Any = importlib.import_module("transformers")
    with_nan, texts = tmp_path / "nan", ["--calib", made["texts"], "--block", "32"]
    model = lib.AutoModelForCausalLM.from_pretrained(made["llama"])
    model.model.layers[0].mlp.up_proj.weight.data[3] = torch.nan
    model.save_pretrained(with_nan)
    lib.AutoTokenizer.from_pretrained(made["llama"]).save_pretrained(with_nan)
    (tmp_path / "has").mkdir()
    for out in (tmp_path / "out", tmp_path / "over" / "out", tmp_path / "has"):
        for folder, more, said in (
            (made["llama"], ["--device", "tpu"], "device"),
            (made["llama"], ["--rule", "*.nothing=bsr"], "matches no layer"),
            (made["llama"], ["--config", "auto", "--speedup", "99"], "speed"),
            (tmp_path / "nothing", [], "is no folder of transformers"),
            (with_nan, [], "up_proj: its weight has NaN or Inf"),
        ):
            result = run("prune", folder, "-o", out, *texts, *more)
            assert said in " ".join(result.stderr.split())
            assert result.exit_code == 2
            assert not [*out.iterdir()] if out.name == "has" else not out.exists()
            assert not (tmp_path / "over").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--config", "csr"], "no config is called 'csr'"),
        (["--config", "bsr:48:x"], "x is no share of blocks"),
        (["--config", "bsr:64:0.5:3"], "write FORMAT:BLOCK:SHARE"),
        (["--config", "semi24:64"], "semi24 has no blocks"),
        (["--config", "auto:64"], "auto has neither block nor share"),
        (["--config", "dense"], "add a --rule"),
        (["--config", "auto"], "give max_error"),
        (["--rule", "*.mlp.*"], "write GLOB=CONFIG"),
        (["--rule", "*.up=bsr", "--rule", "*.up=dense"], "there is a rule for '*.up' already"),
        (
            ["--rule", "*.nothing=bsr"],
            "matches no layer; layers are model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj",
        ),
        (["--method", "best"], "--method is 'best'"),
        (["--reconstruct", "all"], "--reconstruct is 'all'"),
        (["--samples", "0"], "--samples is 0; it must be an int of at least 1"),
        (["--device", "tpu"], "device"),
        (["--calib", "{folder}/none.txt"], "none.txt"),
        (["--calib", "{folder}/empty.txt"], "has no text"),
        (["--calib", "{folder}/one.txt"], "has one text only"),
        (["--calib", "{folder}/bytes.txt"], "is no text in UTF-8"),
        (["--calib", "{folder}/odd.jsonl"], 'an object with a "text"'),
        (["--calib", "{folder}/broken.jsonl"], "line 1: not JSON"),
        (["-o", "{folder}"], "is not empty"),
        (["-o", "{folder}/one.txt"], "one.txt"),
    ],
)
def test_odd_options_are_refused(run, made: Any, tmp_path: Path, more: list[str], said: str) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "one.txt").write_text("one text\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "odd.jsonl").write_text('{"words": 3}\n[]\n')
    (tmp_path / "broken.jsonl").write_text("{")
    given = [each.format(folder=tmp_path) for each in more]
    result = run("prune", made["llama"], "-o", tmp_path / "out", "--calib", made["texts"], *given)
    assert said in " ".join(result.stderr.split())
    assert (result.exit_code, result.stdout) == (2, "")


def test_folders_that_are_no_dense_checkpoint_are_refused(run, made: Any, tmp_path: Path) -> None:
    for name, content, said in (
        ("nothing", None, "is no folder of transformers with a config.json"),
        (
            "whisper",
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            "takes input_features, no texts; prune it from Python",
        ),
        (
            "quantized",
            {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
            "is quantized or sparse",
        ),
        ("odd", {"model_type": "none"}, "transformers cannot load it"),
        ("bare", {"model_type": "llama", "architectures": ["os"]}, "transformers cannot load it"),
    ):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(content))
        result = run("prune", tmp_path / name, "-o", tmp_path / "out", "--calib", made["texts"])
        assert said in " ".join(result.stderr.split()), result.stderr
        assert result.exit_code == 2


def test_a_folder_without_a_tokenizer_is_refused(run, made: Any, tmp_path: Path) -> None:
    for name in ("llama", "bert", "t5"):
        for each in ("config.json", "model.safetensors"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / each).symlink_to(made[name] / each)
        result = run("prune", tmp_path / name, "-o", tmp_path / f"{name}-out", "--calib", made["pairs"])
        said = " ".join(result.stderr.split())
        assert "needs the files of the tokenizer" in said or "transformers cannot load it" in said
        assert result.exit_code == 2


def test_blocks_run_elsewhere_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a block is moved there with its arguments and back with what it returns, and so is a head."""
    from tests.models.test_prune import Model, batches

    model, moves = Model(), []
    want = model.eval()(**batches(1)[0]).detach()
    monkeypatch.setattr(
        torch.nn.Module, "to", lambda self, to: moves.append((type(self).__name__, str(to))) or self
    )
    monkeypatch.setattr(stream, "moved", lambda value, to: value)
    with quality._running(model, torch.device("cuda")):
        torch.testing.assert_close(model(**batches(1)[0]), want)
        assert not any(each.requires_grad for each in [model(**batches(1)[0])])
    there = [name for name, to in moves if to == "cuda"]
    assert there[:5] == ["Block", "Block", "Block", "Linear", "Linear"]
    assert not any(layer._forward_hooks for layer in model.modules())


def test_configs_are_texts() -> None:
    for written, config in {
        "bsr": sk.BlockSparse(64, 0.5),
        "bsr24:128": sk.BlockSemiSparse(128, 0.5),
        "bsr:64x128:0.25": sk.BlockSparse((64, 128), 0.25),
        "semi24_fp8": sk.Float8(sk.SemiSparse()),
        "bsr_fp8:32:0.1": sk.Float8(sk.BlockSparse(32, 0.1)),
        "dense_fp8": sk.Float8(),
        "auto": "auto",
        "dense": None,
    }.items():
        assert command.config_of(written, 0.5, "64") == config
    with pytest.raises(InvalidInput, match=r"keep is 1\.5"):
        command.config_of("bsr:64:1.5", 0.5, "64")
