"""`config.sparsek` of transformers' configs: a dict that config.json can hold, and the policy that it describes."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.policies.policy import Composed, Policy, changed_fields
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.integrations.config import CLASSES, as_json, tuples

P = TypeVar("P")

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
        stored = _stored(config, value)
        if _is_paged(getattr(config, "_attn_implementation_internal", None)):
            _require_pages(config, policy_of_options(stored))
        config.__dict__[ATTRIBUTE] = stored

    def __delete__(self, config: Any) -> None:
        config.__dict__.pop(ATTRIBUTE, None)


def install() -> None:
    """Give all configs of transformers the attribute, and look at it where a model selects its attention."""
    setting: Any = Setting()
    PreTrainedConfig.sparsek = setting  # type: ignore[attr-defined]
    own: Any = PreTrainedModel.get_correct_attn_implementation
    if own.__module__ != __name__:
        PreTrainedModel.get_correct_attn_implementation = _selecting(own)


def _selecting(own: Any) -> Any:
    """The method of models that selects their attention, with a look at config.sparsek."""

    def selected(model: Any, requested_attention: Any, *args: Any, **kwargs: Any) -> Any:
        found, config = own(model, requested_attention, *args, **kwargs), model.config
        if _is_ours(found) and _attends_alone(type(model)):
            raise InvalidInput(
                f"{type(model).__name__} computes attention by itself, as for ALiBi or a bias of its own, and does not "
                f'take attn_implementation="{found}": leave it out. Where this is a part of a model, name the parts '
                'that take it, as attn_implementation={"text_config": "' + found + '"}'
            )
        if requested_attention is None and getattr(config, "_name_or_path", "") and _is_set(config):
            warnings.warn(
                f'config.json has "{ATTRIBUTE}", but the attention implementation is "{found}", which does not read '
                'it: pass attn_implementation="sparsek", or call model.set_attn_implementation("sparsek")',
                stacklevel=2,
            )
        if _is_paged(found):
            _require_pages(config, policy_of(config))
        return found

    functools.update_wrapper(selected, own, ("__name__", "__qualname__", "__doc__"))
    return selected


def _is_set(config: Any) -> bool:
    """Whether a config, or that of a part of the model, has a policy."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
    return any(getattr(each, ATTRIBUTE, None) is not None for each in (config, *parts))


@functools.cache
def _attends_alone(kind: type) -> bool:
    """Whether the module of a class has layers of attention that do not look at the registered functions."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return False
    layers = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return layers is not None and not re.search("ALL_ATTENTION_FUNCTIONS|AttentionInterface", source)


def _is_ours(implementation: Any) -> bool:
    """Whether SparseK's attention is registered under this name."""
    found = AttentionInterface._global_mapping.get(implementation)
    return getattr(found, "__module__", "").startswith("sparsek.")


def _is_paged(implementation: Any) -> bool:
    """Whether this name is for caches of continuous batching, and SparseK's attention is registered under it."""
    return (
        isinstance(implementation, str) and implementation.startswith("paged|") and _is_ours(implementation)
    )


def _require_pages(config: Any, policy: MaskPolicy | Policy | None) -> None:
    """InvalidInput for a policy that a layer refuses with a paged cache: the engine logs errors of layers only."""
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    for kind in sorted(set(kinds)):
        paged_policy(policy, getattr(config, "sliding_window", None) if "sliding" in kind else None)


def paged_policy(policy: MaskPolicy | Policy | None, own: int | None) -> MaskPolicy:
    """What a policy, and the window `own` of a layer, admit of a paged cache.

    Raises:
        InvalidInput: For another policy than a window with sinks, and sinks where a window of the layer drops them.
    """
    if policy is None:
        return MaskPolicy(window=own)
    if not isinstance(policy, MaskPolicy) or policy.topk is not None or policy.stride is not None:
        raise InvalidInput(
            f"config.{ATTRIBUTE} is {policy.label}; with a paged cache it takes a window and sinks only"
        )
    if own is None or (policy.window is not None and policy.window < own and not policy.sinks):
        return MaskPolicy(policy.window, policy.sinks, block=policy.block)
    if policy.window is None or policy.window >= own:
        return MaskPolicy(own, block=policy.block)
    raise InvalidInput(
        f"config.{ATTRIBUTE} has sinks and a window of {policy.window}, and a layer has one of {own}, whose paged "
        "cache drops the sinks; leave them out"
    )


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
    changed = {name: _plain(value) for name, value in changed_fields(policy).items()}
    return {"policy": made.__name__, **changed}


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
    return _made(MaskPolicy, options, {**options, "causal": False})


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
    kind = CLASSES[arguments.one_of(f"config.{ATTRIBUTE}['policy']", name, sorted(CLASSES))]
    return _made(kind, options, given)


def _made(kind: Callable[..., P], options: Mapping[str, Any], given: Mapping[str, Any]) -> P:
    """The policy of these arguments; an error also shows the options that they are from."""
    try:
        return kind(**tuples(given))
    except (InvalidInput, TypeError) as error:
        raise InvalidInput(f"config.{ATTRIBUTE} is {arguments.shown(options)}: {error}") from error
