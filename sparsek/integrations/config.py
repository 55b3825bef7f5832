"""Policies and settings as configurations of engines name them: JSON in an environment variable, a number in a name."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from sparsek.attn import policies
from sparsek.attn.mask.rule import MaskPolicy, MaskRule
from sparsek.attn.policies.policy import Composed, Policy
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput

CLASSES: dict[str, type[Policy]] = {
    name: each
    for name in policies.__all__
    if isinstance(each := getattr(policies, name), type) and issubclass(each, Policy) and each is not Policy
}


def policy_named(name: Any, options: Any, causal: bool, others: tuple[str, ...] = ()) -> Policy:
    """The policy of a class of `sparsek.policies` for layers of one kind, by its name and arguments.

    Classes with a field `causal` get that of the layers, where `options` has none. `others`: further names that the
    message of an unknown one offers.
    """
    if not isinstance(options, Mapping):
        raise InvalidInput(f"options is {arguments.shown(options)}; it must be a dict by name")
    name = arguments.text("policy", name)
    if name not in CLASSES:
        fit = [each for each, made in CLASSES.items() if _chooses_causality(made) or made.causal is causal]
        arguments.one_of("policy", name, sorted([*fit, *others]))
    policy = _policy(name, as_json("options", options), causal)
    require_fit(policy, causal, "a decoder" if causal else "a diffusion model")
    return policy


@functools.lru_cache(maxsize=64)
def _policy(name: str, options: str, causal: bool) -> Policy:
    made, given = CLASSES[name], read(options)
    if _chooses_causality(made):
        given = {"causal": causal, **given}
    return built(name, made, given)


def require_fit(policy: MaskRule, causal: bool, layer: str) -> None:
    """InvalidInput for a policy that does not go with layers of this kind."""
    found = misfit(policy, causal, layer)
    if found is not None:
        raise InvalidInput(found)


def misfit(policy: MaskRule, causal: bool, layer: str = "this layer") -> str | None:
    """Why a policy does not go with a layer that is causal, or is not, and what would; None for one that does.

    The one rule of all integrations: the policy is causal if, and only if, the layer is.
    """
    own = bool(getattr(policy, "causal", False))
    if own is causal:
        return None
    label = policy.label
    if isinstance(policy, MaskPolicy):
        label = f"{type(policy).__name__}({'' if label == 'causal' else label})"
    sees = "no token after its own" if causal else "every token"
    if _may_be(policy):
        cure = f"give it causal={causal}"
    else:
        cure = f"it has no other form: use another policy, for instance XAttention({'' if causal else 'causal=False'})"
    return f"{layer} sees {sees}, and the policy {label} is {'causal' if own else 'not causal'}; {cure}"


def _may_be(policy: Any) -> bool:
    """Whether a policy has an option `causal`; for composed ones, whether all their parts have it."""
    if isinstance(policy, Composed):
        return _may_be(policy.first) and _may_be(policy.second)
    return _chooses_causality(type(policy))


def _chooses_causality(made: Any) -> bool:
    return is_dataclass(made) and any(field.name == "causal" for field in fields(made))


def built(name: str, made: Any, given: Mapping[str, Any]) -> Any:
    """An object of a class by its arguments as JSON has them."""
    try:
        return made(**tuples(given))
    except TypeError as error:
        raise InvalidInput(f"options of {name}: {error}") from error


def tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON has them, with tuples for lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def ints(name: str, value: Any, least: int = 0) -> tuple[int, ...]:
    """The ints of a list."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidInput(f"{name} is {arguments.shown(value)}; it must be a list of ints")
    return tuple(arguments.integer(name, each, least) for each in value)


def as_json(name: str, options: Mapping[str, Any]) -> str:
    """The text of a dict, which must hold what JSON has."""
    try:
        return json.dumps(dict(options), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{name} is {arguments.shown(options)}; it must hold numbers, texts and lists"
        ) from error


def read(text: str, variable: str = "options") -> dict[str, Any]:
    """The JSON object in a text, which an environment variable holds; {} for ""."""
    try:
        found = json.loads(text or "{}")
    except RecursionError as error:
        raise InvalidInput(f"{variable} is {arguments.shown(text)}; it is nested too deep") from error
    except ValueError as error:
        raise InvalidInput(f"{variable} is {arguments.shown(text)}; it must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{variable} is {arguments.shown(text)}; it must be a JSON object")
    return found


def number_in(prefix: str) -> int | None:
    """The number of the layer in a module's name: 3 of "model.layers.3.self_attn.attn"."""
    return next((int(part) for part in prefix.split(".") if part.isdecimal()), None)
