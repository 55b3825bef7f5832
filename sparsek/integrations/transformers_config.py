"""`config.sparsek` of transformers' configs: a dict that config.json can hold, and the policy that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.integrations.named import CLASSES, as_json
from sparsek.mask.lists import mask_block
from sparsek.mask.rule import MaskPolicy
from sparsek.policies.policy import Composed, Policy

ATTRIBUTE = "sparsek"
OPTIONS = [each.name for each in fields(MaskPolicy) if each.name != "causal"]
EITHER, BOTH = "|", "&"  # "policy" of composed ones
HEADS = ("attention_heads", "num_heads", "n_heads", "n_head")  # how names of the number of heads end
FORMS = (
    f"it must be None, a policy of sk.policies, a dict of {', '.join(OPTIONS)}, or a dict of a policy's name and "
    'options: {"policy": "XAttention", "threshold": 0.9}'
)


class OwnPolicy(dict[str, Any]):
    """The dict of a policy whose class is not in sk.policies: only a description, and with it the object itself.

    config.json gets the description; the object is for this process.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy=policy.label)
        self.object = policy

    def __reduce__(self) -> Any:
        return OwnPolicy, (self.object,)


class Setting:
    """The attribute `sparsek` of a config: None, or a dict. A policy that is assigned is stored as its dict.

    transformers writes a config to JSON as it is, and opens the file before: an object would leave an empty one.
    """

    def __get__(self, config: Any, kind: Any = None) -> Any:
        return self if config is None else config.__dict__.get(ATTRIBUTE)

    def __set__(self, config: Any, value: Any) -> None:
        config.__dict__[ATTRIBUTE] = _stored(config, value)

    def __delete__(self, config: Any) -> None:
        config.__dict__.pop(ATTRIBUTE, None)


def install() -> None:
    """Give all configs of transformers the attribute."""
    setting: Any = Setting()
    PreTrainedConfig.sparsek = setting  # type: ignore[attr-defined]


def _stored(config: Any, value: Any) -> Any:
    if value is None:
        return None
    parts = list(getattr(type(config), "sub_configs", None) or ())
    names = {*dir(type(config)), *config.attribute_map, *config.__dict__}
    if parts and not any(name.endswith(HEADS) for name in names):
        shown = " or ".join(f"config.{name}.{ATTRIBUTE}" for name in parts)
        raise InvalidInput(
            f"config.{ATTRIBUTE} is set on a {type(config).__name__}, which no attention layer reads: it joins several "
            f"models, and layers read the config of theirs; set {shown}"
        )
    if isinstance(value, Policy):
        return form_of(value)
    if not isinstance(value, Mapping):
        raise InvalidInput(f"config.{ATTRIBUTE} is {arguments.shown(value)}; {FORMS}")
    as_json(f"config.{ATTRIBUTE}", value)
    return value


def form_of(policy: Policy) -> dict[str, Any]:
    """The dict of a policy, which `policy_of_options` reads. It holds what JSON has."""
    own = _form(policy)
    return OwnPolicy(policy) if own is None else own


def _form(policy: Policy) -> dict[str, Any] | None:
    """None where a class is not in sk.policies."""
    if isinstance(policy, Composed):
        parts = _form(policy.first), _form(policy.second)
        return None if None in parts else {"policy": EITHER if policy.union else BOTH, "of": list(parts)}
    made = type(policy)
    if CLASSES.get(made.__name__) is not made:
        return None
    found = {"policy": made.__name__}
    for each in fields(policy):  # type: ignore[arg-type]
        value, default = getattr(policy, each.name), each.default
        if each.name == "block":
            value, default = (
                side if side[0] != side[1] else side[0] for side in map(mask_block, (value, default))
            )
        if value != default:
            found[each.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def policy_of(config: Any) -> MaskPolicy | Policy | None:
    """The policy of `config.sparsek`: one of sk.policies, or that of a dict of options of MaskPolicy, without
    causality, which is the model's.
    """
    return policy_of_options(getattr(config, ATTRIBUTE, None))


def chooses(options: Any) -> bool:
    """Whether these options are of a policy that chooses blocks in each layer."""
    return options is not None and (isinstance(options, Policy) or "policy" in options)


def policy_of_options(options: Any) -> MaskPolicy | Policy | None:
    """The policy of these options; None for None."""
    if options is None or isinstance(options, Policy):
        return options
    if isinstance(options, OwnPolicy):
        return options.object
    if isinstance(options, Mapping) and "policy" in options:
        return _chooser(options)
    if not isinstance(options, Mapping) or not set(options) <= set(OPTIONS):
        raise InvalidInput(f"config.{ATTRIBUTE} is {arguments.shown(options)}; {FORMS}")
    return MaskPolicy(**{name: _tuples(value) for name, value in options.items()}, causal=False)


def _chooser(options: Mapping[str, Any]) -> Policy:
    name, given = options["policy"], {key: each for key, each in options.items() if key != "policy"}
    if name in (EITHER, BOTH):
        parts = given.pop("of", None)
        if given or not isinstance(parts, (list, tuple)) or len(parts) != 2 or not all(map(chooses, parts)):
            raise InvalidInput(
                f"config.{ATTRIBUTE} is {arguments.shown(options)}; two policies are joined by "
                f'{{"policy": "{name}", "of": [{{"policy": "XAttention"}}, {{"policy": "Streaming"}}]}}'
            )
        first, second = map(_chooser, parts)
        return Composed(first, second, name == EITHER)
    made = CLASSES[arguments.one_of(f"config.{ATTRIBUTE}['policy']", name, sorted(CLASSES))]
    try:
        return made(**{key: _tuples(value) for key, value in given.items()})
    except TypeError as error:
        raise InvalidInput(f"config.{ATTRIBUTE} is {arguments.shown(options)}: {error}") from error


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
