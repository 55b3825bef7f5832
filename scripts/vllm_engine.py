"""Serves tiny random models in vLLM's engine on a CPU with SparseK's backend, and checks their tokens and logprobs.

  vllm_engine.py run      every case; the log goes to benchmarks/evidence/vllm.json
  vllm_engine.py status   whether that log is of today's sources, those modules that the engines' workers had loaded;
                          exit status 0 if it is and every case passed

Runs in .venv-vllm, which `make test-vllm` makes. Right are the tokens of vLLM's own attention, and those of
transformers in float32: each token must have the largest logit after the ones before it, up to NEAR, and the logprob
that both find, up to CLOSE. In every case the engine's worker reports its calls of SparseK's attention.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from importlib import import_module, metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib import request

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LOG = ROOT / "benchmarks" / "evidence" / "vllm.json"
NEAR = 2e-3  # two logits this close may change places with the order of sums
CLOSE = 1e-3
SCRIPT = "scripts/vllm_engine.py"
WORDS, NEW = 1000, 12  # tokens of the vocabulary, and new ones of a request
SIZES = {
    "vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 4096,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral, window 96": ("Mistral", {"sliding_window": 96, "head_dim": 64}),
    "gemma2, softcap, windows": (
        "Gemma2", {"sliding_window": 96, "head_dim": 64, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 64},
    ),
    "bloom, ALiBi": ("Bloom", {"n_layer": 1, "n_head": 4}),
}  # fmt: skip
SPARSE = {"policy": "MaskPolicy", "options": {"window": 48, "sinks": 8}, "min_tokens": 0}
WHOLE = {
    "policy": "XAttention",
    "options": {"threshold": 1.0, "block": 64, "precision": "full"},
    "min_tokens": 256,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
# A cache of so few pages that forty requests do not fit.
FEW = 24


class Case(NamedTuple):
    """An engine and what it serves.

    `own`: whether vLLM's own attention must give the same tokens, else others. `place`: where the engine is: "here",
    in "processes" of its own, which are spawned, or in those of a "server". `refused`: the engine must not start, with
    an error of these words.
    """

    name: str
    model: str
    workload: str
    options: Mapping[str, Any] = MappingProxyType({})
    sparsek: Mapping[str, Any] = MappingProxyType({})
    own: bool = True
    place: str = "here"
    refused: str = ""

    @property
    def folder(self) -> str:
        """The folder of the model."""
        return self.model.split(",")[0]


CASES = [
    Case("chunks of prompts", "llama", "mixed"),
    Case("prefix caching", "llama", "prefix"),
    Case("forty requests", "llama", "forty"),
    Case("chunks, window", "mistral, window 96", "mixed"),
    Case("prefix caching, window", "mistral, window 96", "prefix"),
    Case("forty requests, window", "mistral, window 96", "forty"),
    Case("chunks, softcap and windows", "gemma2, softcap, windows", "mixed"),
    Case("preemption", "llama", "forty", {"num_gpu_blocks_override": FEW}),
    Case("window and sinks in prompts", "llama", "mixed", sparsek=SPARSE, own=False),
    Case("XAttention that keeps all", "llama", "mixed", sparsek=WHOLE),
    Case("a cache in e5m2", "llama", "", {"kv_cache_dtype": "fp8_e5m2"}, own=False, refused="fp8_e5m2"),
    Case("ALiBi", "bloom, ALiBi", "", own=False, refused="ALiBi slopes"),
    Case("an unknown policy", "llama", "", sparsek={"policy": "Best"}, own=False, refused="policy is 'Best'"),
    Case(
        "options at the wrong place", "llama", "", {"additional_config": {"policy": "XAttention"}}, own=False,
        refused="below the key 'sparsek'",
    ),
    # After it no engine starts in the same process: vLLM 0.32 raises AttributeError.
    Case("speculation", "llama", "mixed", {"speculative_config": NGRAM}),
    # First of its process: no engine has loaded plugins when LLM() reads the dict.
    Case(
        "named in attention_config", "mistral, window 96", "mixed", {"attention_config": {"backend": "SPARSEK"}},
        place="processes",
    ),
    Case(
        "named, compiled", "llama", "mixed", {"enforce_eager": False, "attention_backend": "SPARSEK"}, place="processes"
    ),
    Case("a server with the backend named", "llama", "mixed", sparsek=WHOLE, place="server"),
]  # fmt: skip


def prompts_of(workload: str) -> list[list[list[int]]]:
    """Lists of prompts, each of which is served at once."""
    torch: Any = import_module("torch")
    random = torch.Generator().manual_seed(1)

    def words(n: int) -> list[int]:
        return torch.randint(WORDS, (n,), generator=random).tolist()

    if workload == "mixed":
        return [[words(n) for n in (7, 700, 1300, 130)]]
    if workload == "prefix":
        common = words(600)
        return [[common + words(70)], [common + words(70), common + words(200), words(300)]]
    return [[words(int(n)) for n in torch.randint(1, 400, (40,), generator=random)]]


CALLS: Counter[str] = Counter()


class Counting:
    """What vLLM adds to the class of an engine's workers."""

    def sparsek_report(self) -> dict[str, Any]:
        """The calls of SparseK's attention since the last report, by the class of their mask; none are counted before
        the first one. And the modules of sparsek that this process has.
        """
        layer: Any = import_module("sparsek.integrations.vllm_layer")
        attention = layer.attention_paged

        def counting(
            q: Any, cache: Any, table: Any, lengths: Any, edges: Any, mask: Any, **options: Any
        ) -> Any:
            CALLS["None" if mask is None else type(mask).__name__] += 1
            return attention(q, cache, table, lengths, edges, mask, **options)

        if attention.__name__ != counting.__name__:
            layer.attention_paged = counting
        found = dict(CALLS)
        CALLS.clear()
        return {
            "calls": found,
            "modules": sorted(name for name in sys.modules if name.split(".")[0] == "sparsek"),
        }


COUNTING = "scripts.vllm_engine.Counting"


def serve(cases: list[Case], folder: Path, out: Path) -> None:
    """Serves cases in this process, and writes tokens, seconds and counts of each. Cases with one engine share it."""
    vllm: Any = import_module("vllm")
    inputs: Any = import_module("vllm.inputs")
    distributed: Any = import_module("vllm.distributed")
    sampling = vllm.SamplingParams(
        max_tokens=NEW, temperature=0, detokenize=False, ignore_eos=True, logprobs=0
    )
    llm, held, found = None, None, {}
    for case in cases:
        began = time.time()
        wanted = (case.model, json.dumps([dict(case.options), dict(case.sparsek)]))
        if wanted != held:
            if llm is not None:
                del llm
                distributed.cleanup_dist_env_and_memory()
            llm, held = None, wanted
            try:
                llm = engine(vllm, case, folder)
            except Exception as error:
                if not case.refused:
                    raise
                found[case.name] = {"error": str(error), "start_s": round(time.time() - began, 1)}
                distributed.cleanup_dist_env_and_memory()
        if llm is None:
            continue
        llm.collective_rpc("sparsek_report")
        up, tokens, logprobs, cached = time.time(), [], [], 0
        for prompts in prompts_of(case.workload):
            given = [inputs.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
            served = llm.generate(given, sampling, use_tqdm=False)
            for each in (every.outputs[0] for every in served):
                tokens.append(list(each.token_ids))
                pairs = zip(each.token_ids, each.logprobs, strict=True)
                logprobs.append([likely[token].logprob for token, likely in pairs])
            cached += sum(each.num_cached_tokens or 0 for each in served)
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
        (report,) = llm.collective_rpc("sparsek_report")
        found[case.name] = {
            "tokens": tokens, "logprobs": logprobs, "cached": cached, "preempted": preempted, **report,
            "start_s": round(up - began, 1), "serve_s": round(time.time() - up, 1),
        }  # fmt: skip
    if all(case.place == "here" for case in cases):
        found["settings"] = refusals()
    out.write_text(json.dumps(found))


def refusals() -> dict[str, list[str]]:
    """Why vLLM would refuse the backend on an H100, for settings that it must refuse, and for "none" changed."""
    torch: Any = import_module("torch")
    capability = import_module("vllm.platforms.interface").DeviceCapability(9, 0)
    members: Any = import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    plain = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 256, "has_sink": True,
        "has_sliding_window": True, "attn_type": "decoder", "device_capability": capability, "use_mla": False,
        "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "use_dcp": True,
    }  # fmt: skip
    changed: list[dict[str, Any]] = [
        {"head_size": 100}, {"dtype": torch.float32}, {"kv_cache_dtype": "fp8_e5m2"}, {"block_size": 48},
        {"attn_type": "encoder_only"}, {"attn_type": "encoder_decoder"}, {"use_mla": True}, {"use_sparse": True},
        {"use_mm_prefix": True}, {"use_per_head_quant_scales": True}, {"use_non_causal": True},
        {"use_pcp": True}, {"use_rswa": True}, {"device_capability": capability._replace(major=7, minor=5)},
    ]  # fmt: skip
    validate = members["SPARSEK"].get_class().validate_configuration
    found = {
        ", ".join(f"{name}={value}" for name, value in each.items()): validate(**plain | each)
        for each in changed
    }
    return {"none": validate(**plain), **found}


def engine(vllm: Any, case: Case, folder: Path) -> Any:
    options = {
        "dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 64,
        "enforce_eager": True, "enable_chunked_prefill": True, "enable_prefix_caching": True,
        "skip_tokenizer_init": True, "disable_log_stats": False, "worker_extension_cls": COUNTING,
        "additional_config": {"sparsek": dict(case.sparsek)} if case.sparsek else {},
    }  # fmt: skip
    return vllm.LLM(model=str(folder / case.folder), **{**options, **case.options})


class ProcessReport(NamedTuple):
    """What a process served: facts of each case by name, and its log's end where it failed."""

    facts: dict[str, Any]
    failed: str


def process(cases: list[Case], folder: Path, sparsek: bool) -> ProcessReport:
    """Serves cases in a process of its own, by SparseK or by vLLM's own attention."""
    out, log = folder / "served.json", folder / "log.txt"
    out.unlink(missing_ok=True)
    several = any(case.place == "processes" for case in cases)
    names = [str(CASES.index(case)) for case in cases]
    command = [sys.executable, __file__, "serve", str(folder), str(out), *names]
    settings = environment(sparsek, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(several)))
    with log.open("w") as file:
        done = subprocess.run(command, env=settings, stdout=file, stderr=file, cwd=folder)
    if done.returncode or not out.exists():
        return ProcessReport({}, log.read_text()[-4000:])
    return ProcessReport(json.loads(out.read_text()), "")


def environment(sparsek: bool, **more: str) -> dict[str, str]:
    """The variables of an engine's process."""
    settings = {
        "SPARSEK_VLLM": "", "SPARSEK_VLLM_CPU": str(int(sparsek)), "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return {**os.environ, **settings, **more}


class Server:
    """vLLM's API server on a free port of loopback, with the backend named and its options in the environment.

    It is stopped at the end of a `with` block, with all its processes.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.opener = request.build_opener(request.ProxyHandler({}))
        self.at, self.log = f"http://127.0.0.1:{port}", folder / "server.txt"
        options = {
            "--model": str(folder / case.folder), "--host": "127.0.0.1", "--port": str(port), "--dtype": "float32",
            "--max-model-len": "2048", "--max-num-batched-tokens": "512", "--attention-backend": "SPARSEK",
            "--worker-extension-cls": COUNTING,
        }  # fmt: skip
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        settings = environment(
            True,
            SPARSEK_VLLM=json.dumps(dict(case.sparsek)),
            VLLM_SERVER_DEV_MODE="1",
            VLLM_LOGGING_LEVEL="INFO",
        )
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *itertools.chain(*options.items())],
                env=settings, stdout=file, stderr=file, cwd=folder, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float) -> None:
        """Returns when it serves."""
        until = time.time() + seconds
        while self.process.poll() is None and time.time() < until:
            with suppress(OSError), self.opener.open(f"{self.at}/health", timeout=10):
                return
            time.sleep(1)
        raise TimeoutError(f"the server's exit status is {self.process.poll()} after {seconds} s at most")

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a request."""
        header = {"Content-Type": "application/json"}
        asked = request.Request(f"{self.at}/{path}", json.dumps(body).encode(), header)
        with self.opener.open(asked, timeout=600) as answer:
            return json.loads(answer.read())

    def complete(self, prompt: list[int]) -> dict[str, Any]:
        """The new tokens and their logprobs."""
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        (choice,) = self.post("v1/completions", {**body, "return_token_ids": True})["choices"]
        return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def ask_server(case: Case, folder: Path) -> ProcessReport:
    """Serves a case by a server, by one request for each prompt, all at once."""
    began = time.time()
    with Server(case, folder) as server:
        try:
            server.wait(900)
            up, report = time.time(), {"method": "sparsek_report"}
            server.post("collective_rpc", report)
            with ThreadPoolExecutor() as pool:
                answers = [
                    each
                    for prompts in prompts_of(case.workload)
                    for each in pool.map(server.complete, prompts)
                ]
            (found,) = server.post("collective_rpc", report)["results"]
        except (OSError, KeyError, ValueError) as error:
            return ProcessReport({}, f"{type(error).__name__}: {error}\n{server.log.read_text()[-4000:]}")
    lines = [line for line in server.log.read_text().splitlines() if "SPARSEK: " in line]
    facts = {
        **{key: [each[key] for each in answers] for key in ("tokens", "logprobs")}, **found,
        "line": [line[line.index("SPARSEK: ") :] for line in lines],
        "start_s": round(up - began, 1), "serve_s": round(time.time() - up, 1),
    }  # fmt: skip
    return ProcessReport({case.name: facts}, "")


def make_models(folder: Path) -> None:
    transformers: Any = import_module("transformers")
    torch: Any = import_module("torch")
    for name, (kind, options) in MODELS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        if (
            kind == "Gemma2"
        ):  # its head is its embedding, so as drawn it repeats the last token, whatever attention gives
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(0.1)
                model.model.norm.weight.fill_(7)
        model.float().save_pretrained(folder / name.split(",")[0])
    tokenizers: Any = import_module("tokenizers")
    words = tokenizers.models.WordLevel({f"w{n}": n for n in range(WORDS)}, "w0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    tokenizer.save_pretrained(folder / "llama")  # for the server


class Choice(NamedTuple):
    """Of each token, by transformers: the largest logit less its own, and its logprob."""

    lost: Any
    logprobs: Any


class Reference:
    """transformers in float32. Keeps its answers for equal questions."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, {}

    def choice(self, case: Case, tokens: list[list[int]]) -> Choice:
        """Of all tokens that a case served, one after another."""
        question = json.dumps([case.model, case.workload, case.sparsek == SPARSE, tokens])
        if question not in self.known:
            self.known[question] = self.found(case, tokens)
        return self.known[question]

    def found(self, case: Case, tokens: list[list[int]]) -> Choice:
        transformers: Any = import_module("transformers")
        torch: Any = import_module("torch")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder / case.folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        lost, logprobs = [], []
        for prompt, new in zip(itertools.chain(*prompts_of(case.workload)), tokens, strict=True):
            whole, mask = torch.tensor([prompt + new[:-1]]), {}
            if case.sparsek == SPARSE:
                mask = {"attention_mask": sparse_mask(case, len(prompt), whole.shape[1])}
            with torch.no_grad():
                logits = model(whole, use_cache=False, **mask).logits[0, len(prompt) - 1 :]
            at = torch.tensor(new)[:, None]
            lost.append(logits.max(1).values - logits.gather(1, at)[:, 0])
            logprobs.append(logits.log_softmax(1).gather(1, at)[:, 0])
        return Choice(torch.cat(lost), torch.cat(logprobs))


def sparse_mask(case: Case, prompt: int, length: int) -> Any:
    """The mask of a window and sinks in a prompt, with dense decoding, as transformers adds it: [1, 1, S, S]."""
    torch: Any = import_module("torch")
    window, sinks = (case.sparsek["options"][name] for name in ("window", "sinks"))
    p, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (j <= p) & ((j > p - window) | (j < sinks) | (p >= prompt))
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)


def judged(
    case: Case, ours: dict[str, Any], like: dict[str, Any] | None, reference: Reference
) -> dict[str, Any]:
    """A case's line of the log. `like`: the same model and prompts, served by vLLM's own attention."""
    line = {"case": case.name, "model": case.model}
    if case.refused:
        error = ours.get("error", "the engine started")
        return {**line, "passed": case.refused in error, "error": error, "start_s": ours["start_s"]}
    torch: Any = import_module("torch")
    lost, logprobs = reference.choice(case, ours["tokens"])
    wrong, near = int((lost > NEAR).sum()), int(((lost > 0) & (lost <= NEAR)).sum())
    apart = float((torch.tensor(list(itertools.chain(*ours["logprobs"]))) - logprobs).abs().max())
    right: dict[str, bool] = {"transformers": wrong == 0, "logprobs": apart <= CLOSE}
    right["no copy"] = bool((logprobs < -0.1).any())  # of the last token, which needs no attention
    if like is not None:
        # Sequences that part at two near logits go on apart, each right after its own tokens.
        other = sum(one != other for one, other in zip(ours["tokens"], like["tokens"], strict=True))
        right["vllm" if case.own else "unlike dense"] = (other <= near) == case.own and not like["calls"]
        if case.own:
            same = [n for n, each in enumerate(ours["tokens"]) if each == like["tokens"][n]]
            one, two = (torch.tensor([each["logprobs"][n] for n in same]) for each in (ours, like))
            right["logprobs of vllm"] = bool(((one - two).abs() <= CLOSE).all())
        if case.workload == "prefix":
            right["cached"] = ours["cached"] == like["cached"] and (
                ours["cached"] > 0 or case.model != "llama"
            )
    mask = case.sparsek.get("policy", "MaskPolicy" if "window" in case.model else "None")
    right["calls"] = mask in ours["calls"]
    if case.place == "server":
        right["line"] = len(ours["line"]) == 1 and f"in 2 by {mask}(" in ours["line"][0]
    if "num_gpu_blocks_override" in case.options:
        right["preempted"] = ours["preempted"] > 0
    facts = {key: value for key, value in ours.items() if key not in ("tokens", "logprobs", "modules")}
    counts = {
        "requests": len(ours["tokens"]),
        "tokens": sum(map(len, ours["tokens"])),
        "wrong": wrong,
        "near": near,
        "logprob_error": round(apart, 7),
    }
    return {**line, "passed": all(right.values()), "right": right, **counts, **facts}


def run() -> int:
    began, of = time.time(), sources()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        plain = [case for case in CASES if case.own and not (case.options or case.sparsek)]
        own = process(plain, folder, sparsek=False)
        ours = [
            process([case for case in CASES if case.place == place], folder, sparsek=True)
            for place in ("here", "processes")
        ]
        ours += [ask_server(case, folder) for case in CASES if case.place == "server"]
        facts: dict[str, Any] = {name: each for served in ours for name, each in served.facts.items()}
        failed = [each.failed for each in (own, *ours) if each.failed]
        alike = {(case.model, case.workload): own.facts.get(case.name) for case in plain}
        reference = Reference(folder)
        lines = [
            judged(case, facts[case.name], alike.get((case.model, case.workload)), reference)
            for case in CASES
            if case.name in facts
        ]
    loaded = {name for name, each in facts.items() if name != "settings" for name in each.get("modules", ())}
    ran = [name for name in of if name == SCRIPT or module_of(name) in loaded]
    settings = facts.get("settings", {"none": ["not reached"]})
    refused = not settings["none"] and all(why for name, why in settings.items() if name != "none")
    lines.append({"case": "settings on a GPU", "passed": refused, "reasons": settings})
    passed = not failed and len(lines) == len(CASES) + 1 and all(line["passed"] for line in lines)
    log = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "seconds": round(time.time() - began),
        "passed": passed, "versions": versions(), "sources": {name: of[name] for name in ran}, "cases": lines,
        "failed": failed,
    }  # fmt: skip
    LOG.write_text(json.dumps(log, indent=1) + "\n")
    for line in lines:
        print("passed" if line["passed"] else "FAILED", json.dumps(line))
    print(
        *failed, f"{LOG.relative_to(ROOT)}: {'passed' if passed else 'FAILED'}, {log['seconds']} s", sep="\n"
    )
    return 0 if passed else 1


def versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}
    return {"python": sys.version.split()[0], **found}


def sources() -> dict[str, str]:
    """The hash of this script and of each module of sparsek, without comments, docstrings and layout."""
    hashed: Any = import_module("sparsek_bench.engine.sources").files_hash
    files = [Path(__file__).resolve(), *sorted((ROOT / "sparsek").rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): hashed([file], ROOT) for file in files}


def module_of(path: str) -> str:
    """sparsek.attn.mask.rule of sparsek/attn/mask/rule.py."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def status() -> int:
    """Prints what the log is worth."""
    if not LOG.exists():
        print(f"{LOG.relative_to(ROOT)}: missing; make test-vllm writes it")
        return 1
    log = json.loads(LOG.read_text())
    today = sources()
    changed = sorted(name for name, digest in log["sources"].items() if today.get(name) != digest)
    word = "red" if not log["passed"] else "stale" if changed else "fresh"
    print(
        f"{LOG.relative_to(ROOT)}: {word}, {log['date']}",
        *([f"changed: {', '.join(changed)}"] if changed else []),
    )
    return 0 if word == "fresh" else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "status", "serve"])
    parser.add_argument(
        "rest", nargs="*", help="of serve, which run calls: the models, the result, numbers of cases"
    )
    given = parser.parse_args()
    if given.command == "serve":
        folder, out, *cases = given.rest
        serve([CASES[int(case)] for case in cases], Path(folder), Path(out))
        return 0
    return run() if given.command == "run" else status()


if __name__ == "__main__":  # vLLM starts its processes by importing this file
    sys.exit(main())
