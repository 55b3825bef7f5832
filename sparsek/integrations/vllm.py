"""The plugin of vLLM (0.32 and 0.33): an attention backend, SPARSEK, for decoders with paged keys and values.

With sparsek installed, vLLM calls `register` in each of its processes, and

    vllm serve MODEL --attention-backend SPARSEK

attends by SparseK: decodes and short prompts densely, prompts by the policy in this variable, if any:

    SPARSEK_VLLM='{"policy": "XAttention", "options": {"threshold": 0.9}, "min_tokens": 4096, "skip_layers": [0, 1]}'

vLLM on a CPU ignores the name of a backend: there SPARSEK_VLLM_CPU=1 puts SparseK in the place of its own.

The options may also stand in vLLM's `additional_config`, under "sparsek". This module imports vLLM in `register` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from sparsek.core import arguments, env
from sparsek.core.errors import InvalidInput
from sparsek.integrations.named import built, policy_named, read, require_fit
from sparsek.mask.rule import MaskPolicy, MaskRule

NAME = "SPARSEK"
CLASSES = "sparsek.integrations.vllm_backend"
KEYS = ("policy", "options", "min_tokens", "skip_layers")
VARIABLE = "SPARSEK_VLLM"


class Options(NamedTuple):
    """How prompts are attended: those of `min_tokens` keys or more by `policy`, except in the layers `skip_layers`."""

    policy: MaskRule | None = None
    min_tokens: int = 4096
    skip_layers: frozenset[int] = frozenset()


def configured(additional: Mapping[str, Any] | None = None) -> Options:
    """Return the options in SPARSEK_VLLM and in vLLM's additional_config, whose values come first.

    Args:
        additional: vLLM's additional_config. Only its "sparsek" is read.

            - policy: the name of a class of `sparsek.policies` that makes causal masks, or "MaskPolicy", for a window
              and sinks. Prompts are dense without it.
            - options: the arguments of the class.
            - min_tokens: A chunk of a prompt is dense where its request has fewer keys, those of the chunk included;
              4096 by default.
            - skip_layers: layers that stay dense, by the number in their name.

    Raises:
        InvalidInput: For a wrong option, and for a policy that lets a query see later keys.

    Example:
        >>> from sparsek.integrations.vllm import configured
        >>> configured({"sparsek": {"policy": "Streaming", "min_tokens": 1024}}).min_tokens
        1024
    """
    found = read(env.vllm_options(), VARIABLE)
    more = {} if additional is None else additional
    more = more.get("sparsek", {}) if isinstance(more, Mapping) else more
    if not isinstance(more, Mapping):
        raise InvalidInput(
            f"additional_config['sparsek'] is {arguments.shown(more)}; it must be a dict of {', '.join(KEYS)}"
        )
    found |= more
    for key in found:
        arguments.one_of(f"a key of {VARIABLE} or additional_config['sparsek']", key, KEYS)
    skipped = found.get("skip_layers", ())
    if not isinstance(skipped, (list, tuple)):
        raise InvalidInput(f"skip_layers is {arguments.shown(skipped)}; it must be a list of ints")
    return Options(
        _policy(found.get("policy"), found.get("options", {})),
        arguments.integer("min_tokens", found.get("min_tokens", Options().min_tokens)),
        frozenset(arguments.integer("skip_layers", layer) for layer in skipped),
    )


def _policy(name: Any, options: Any) -> MaskRule | None:
    if name is None:
        if options:
            raise InvalidInput('options without a policy; name one, as in "policy": "XAttention"')
        return None
    if isinstance(name, str) and name == MaskPolicy.__name__ and isinstance(options, Mapping):
        policy = built(MaskPolicy.__name__, MaskPolicy, options)
        if policy.topk is not None or policy.stride is not None:
            raise InvalidInput("a MaskPolicy over pages has a window and sinks, neither topk nor stride")
    else:
        return policy_named(name, options, causal=True, others=(MaskPolicy.__name__,))
    require_fit(policy, True, "a decoder")
    return policy


def register() -> None:
    """Register the backend SPARSEK, and on request in the place of vLLM's own for CPUs. vLLM calls this, repeatedly.

    Raises:
        InvalidInput: For wrong options in SPARSEK_VLLM.
        ImportError: Without vLLM 0.32 or a later one.
    """
    configured()
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    members = registry.AttentionBackendEnum
    if NAME not in members.__members__:
        registry.register_backend(NAME, f"{CLASSES}.SparseKBackend")
    if env.vllm_on_cpu():
        registry.register_backend(members.CPU_ATTN, f"{CLASSES}.SparseKBackend")
