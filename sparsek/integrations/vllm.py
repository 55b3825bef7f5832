"""The plugin of vLLM (0.32 and 0.33): an attention backend, SPARSEK, for decoders with paged keys and values.

With sparsek installed, vLLM calls `platform` and `register` in each of its processes, and

    vllm serve MODEL --attention-backend SPARSEK

attends by SparseK: decodes and short prompts densely, prompts by the policy in this variable, if any:

    SPARSEK_VLLM='{"policy": "XAttention", "options": {"threshold": 0.9}, "min_tokens": 4096, "skip_layers": [0, 1]}'

vLLM on a CPU ignores the name of a backend: there SPARSEK_VLLM_CPU=1 puts SparseK in the place of its own.

The options may also stand in vLLM's `additional_config`, under "sparsek". A process that does not attend by SparseK
imports little of it: policies come with the first `configured`, and vLLM with `register`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsek import __version__
from sparsek.core import arguments, env
from sparsek.core.errors import InvalidInput

if TYPE_CHECKING:
    from sparsek.attn.mask.rule import MaskRule

NAME = "SPARSEK"
CLASSES = "sparsek.integrations.vllm_backend"
REGISTRY = "vllm.v1.attention.backends.registry"
OWN = "sparsek"  # the key of additional_config
KEYS = ("policy", "options", "min_tokens", "skip_layers")
VARIABLE = "SPARSEK_VLLM"
LOGGER = logging.getLogger("vllm.sparsek")  # vLLM prints the records of its own loggers


class Options(NamedTuple):
    """How prompts are attended: those of `min_tokens` keys or more by `policy`, except in the layers `skip_layers`."""

    policy: MaskRule | None = None
    min_tokens: int = 4096
    skip_layers: frozenset[int] = frozenset()


def configured(additional: Mapping[str, Any] | None = None) -> Options:
    """Return the options in SPARSEK_VLLM and in vLLM's additional_config, whose values come first.

    Args:
        additional: vLLM's additional_config. Only its "sparsek" is read; without that, keys that can only be meant for
            SparseK are refused: those below, and misspelt forms of "sparsek".

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
    from sparsek.integrations.config import ints, read

    found = {**read(env.vllm_options(), VARIABLE), **_given(additional)}
    for key in found:
        arguments.one_of(f"a key of {VARIABLE} or additional_config['{OWN}']", key, KEYS)
    return Options(
        _policy(found.get("policy"), found.get("options", {})),
        arguments.integer("min_tokens", found.get("min_tokens", Options().min_tokens)),
        frozenset(ints("skip_layers", found.get("skip_layers", ()))),
    )


def _given(additional: Any) -> Mapping[str, Any]:
    """What additional_config has for SparseK."""
    # vLLM also takes objects of a platform's own, which it hashes.
    if additional is None or hasattr(additional, "compute_hash"):
        return {}
    if not isinstance(additional, Mapping):
        raise InvalidInput(f"additional_config is {arguments.shown(additional)}; it must be a dict")
    beside = [key for key in additional if key in KEYS]
    if OWN in additional:
        if beside:
            _warn(f"{NAME} reads additional_config['{OWN}'] only, not {', '.join(beside)} beside it")
        found = additional[OWN]
        if not isinstance(found, Mapping):
            raise InvalidInput(
                f"additional_config['{OWN}'] is {arguments.shown(found)}; it must be a dict of {', '.join(KEYS)}"
            )
        return found
    meant = [
        key for key in additional if isinstance(key, str) and get_close_matches(_plain(key), [OWN], 1, 0.9)
    ]
    if beside or meant:
        example = f'{{"{OWN}": {{"policy": "XAttention"}}}}'
        raise InvalidInput(
            f"additional_config has the key {arguments.shown((meant + beside)[0])}; {NAME} reads its options below the "
            f"key '{OWN}', as in {example}"
        )
    return {}


def _plain(key: str) -> str:
    """A key without what its spelling may differ in."""
    return key.lower().replace("_", "").replace("-", "").removesuffix("vllm")


def _policy(name: Any, options: Any) -> MaskRule | None:
    from sparsek.attn.mask.rule import MaskPolicy
    from sparsek.integrations.config import built, policy_named, require_fit

    if name is None:
        if options:
            raise InvalidInput('options without a policy; name one, as in "policy": "XAttention"')
        return None
    if isinstance(name, str) and name == MaskPolicy.__name__ and isinstance(options, Mapping):
        policy = built(MaskPolicy.__name__, MaskPolicy, options)
        if policy.topk is not None or policy.stride is not None:
            raise InvalidInput("a MaskPolicy over pages has a window and sinks, neither topk nor stride")
    else:
        policy = policy_named(name, options, causal=True, others=(MaskPolicy.__name__,))
    require_fit(policy, True, "a decoder")
    return policy


def register() -> None:
    """Register the backend SPARSEK, and on request in the place of vLLM's own for CPUs. vLLM calls this, repeatedly.

    It raises nothing, since vLLM would stop, and also an engine that does not use SparseK. A vLLM of another interface
    is left as it is, and wrong options in SPARSEK_VLLM stop an engine that uses the backend: both are logged once, as
    a warning.
    """
    try:
        _register()
    except Exception as error:
        _warn(
            f"SparseK {__version__} cannot register its attention backend {NAME} with {_vllm()}, and leaves it as it "
            f"is. The backend was made for vLLM 0.32 and 0.33. {type(error).__name__}: {error}"
        )
        return
    if env.vllm_options():
        try:
            configured()
        except Exception as error:
            _warn(f"an engine with the attention backend {NAME} will not start: {error}")


def platform() -> None:
    """Register before vLLM reads an engine's options: it loads platform plugins first. This one names none."""
    with suppress(Exception):  # `register` warns of it
        _register()


def _register() -> None:
    registry: Any = import_module(REGISTRY)
    if NAME not in registry.AttentionBackendEnum.__members__:
        registry.register_backend(NAME, f"{CLASSES}.SparseKBackend")
    members = registry.AttentionBackendEnum
    # By value, as members are pickled, an engine's process could not read its config: it has no plugins yet.
    members.__members__[NAME].__reduce_ex__ = _reduced
    if env.vllm_on_cpu():
        registry.register_backend(members.CPU_ATTN, f"{CLASSES}.SparseKBackend")


def _reduced(protocol: Any) -> tuple[Any, tuple[()]]:
    return member, ()


def member() -> Any:
    """SPARSEK of vLLM's enum of backends, registered where it is not yet: what a pickled member is read by."""
    register()
    return import_module(REGISTRY).AttentionBackendEnum[NAME]


@cache
def _warn(text: str) -> None:
    """Logs a text once."""
    LOGGER.warning(text)


def _vllm() -> str:
    """The vLLM of this process, with its version."""
    try:
        return f"vLLM {import_module('vllm').__version__}"
    except Exception as error:
        return f"a vLLM of unknown version ({type(error).__name__}: {error})"
