"""Policies and settings as configurations of engines name them: JSON in an environment variable, a number in a name."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from sparsek import policies
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.policies.policy import Policy


def policy_named(name: Any, options: Any, causal: bool = False) -> Policy:
    """The policy of a class of `sparsek.policies`, by its name and arguments.

    `causal`: classes with a field of this name get True for it, where `options` has none.
    """
    if not isinstance(options, Mapping):
        raise InvalidInput(f"options is {arguments.shown(options)}; it must be a dict by name")
    return _policy(arguments.text("policy", name), _as_json(options), causal)


@functools.lru_cache(maxsize=64)
def _policy(name: str, options: str, causal: bool) -> Policy:
    classes = {each: getattr(policies, each) for each in policies.__all__}
    names = [
        each
        for each, found in classes.items()
        if isinstance(found, type) and issubclass(found, Policy) and found is not Policy
    ]
    made = classes[arguments.one_of("policy", name, names)]
    given = read(options)
    if causal and is_dataclass(made) and any(field.name == "causal" for field in fields(made)):
        given = {"causal": True, **given}
    return built(name, made, given)


def built(name: str, made: Any, given: Mapping[str, Any]) -> Any:
    """An object of a class by its arguments as JSON has them: lists are tuples."""
    try:
        return made(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        )
    except TypeError as error:
        raise InvalidInput(f"options of {name}: {error}") from error


def _as_json(options: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(options), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"options is {arguments.shown(options)}; it must hold numbers, texts and lists"
        ) from error


def read(text: str, variable: str = "options") -> dict[str, Any]:
    """The JSON object in a text, which an environment variable holds; {} for ""."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidInput(f"{variable} is {arguments.shown(text)}; it must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{variable} is {arguments.shown(text)}; it must be a JSON object")
    return found


def number_in(prefix: str) -> int | None:
    """The number of the layer in a module's name: 3 of "model.layers.3.self_attn.attn"."""
    return next((int(part) for part in prefix.split(".") if part.isdecimal()), None)
