"""Functions that torch.compile must not trace, and tensors that outlive the torch mode in which they are made."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_get_bdim,
    maybe_get_level,
    unwrap_if_dead,
)
from torch.autograd import forward_ad

from sparsek.core import arguments
from sparsek.core.arguments import UNINITIALIZED, faking, is_fake, wraps
from sparsek.core.errors import InvalidInput

Given = ParamSpec("Given")
Made = TypeVar("Made")
TRACERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")  # modules of torch
TRACED = ("tracing tensor", "convert all Tensors to FakeTensors")  # in the texts of its other errors


def untransformed(build: Callable[[], Made], plain: torch.Tensor | None = None) -> Made:
    """The result of `build()` on plain tensors, also inside torch.func, whose wrapped tensors are useless later.

    `plain`: what it builds from; if this is a plain tensor, then outside of dispatch modes too, such as one that fakes.
    """
    if torch.compiler.is_compiling():
        return build()
    if plain.__class__ in arguments.TENSORS and torch._C._len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return untransformed(build)
    if not torch._C._are_functorch_transforms_active():
        return build()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return build()


def alive(x: Any) -> Any:
    """`x` without the wrappers of transforms of torch.func that have ended.

    The function that torch.func.vjp returns runs backward passes after its transform: what they saved is wrapped so.
    """
    while isinstance(x, torch.Tensor) and is_functorch_wrapped_tensor(x):
        inner = unwrap_if_dead(x)
        if inner is x:
            break
        x = inner
    return x


def bits_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.view(dtype)`, for elements of as many bytes. No gradient passes. torch.vmap of 2.11 has no rule for it."""
    if torch.compiler.is_compiling() or not is_functorch_wrapped_tensor(x):
        return x.view(dtype)
    if is_batchedtensor(x):
        of_all = untransformed(functools.partial(bits_of, get_unwrapped(x), dtype))
        return _add_batch_dim(of_all, maybe_get_bdim(x), maybe_get_level(x))
    return bits_of(get_unwrapped(x), dtype) if is_gradtrackingtensor(x) else x.view(dtype)


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """ctx.saved_tensors, without the wrappers of transforms that have ended: see `alive`."""
    try:
        saved = ctx.saved_tensors
    except RuntimeError:
        if not torch.is_inference_mode_enabled():
            raise
        with torch.inference_mode(False):  # torch 2.11 cannot hand out a saved output in inference mode
            saved = ctx.saved_tensors
    for x in saved:  # a call for each would take longer
        if x is not None and is_functorch_wrapped_tensor(x):
            return tuple(map(alive, saved))
    return saved


def concrete(x: Any, reads: str, instead: str) -> Any:
    """The tensor that grad, vjp and jvp of torch.func have wrapped; anything else as it is.

    InvalidInput under vmap, where one tensor has many values: `reads` names the operation, `instead` the alternative.
    """
    if torch.compiler.is_compiling() or not isinstance(x, torch.Tensor) or not is_functorch_wrapped_tensor(x):
        return x
    while is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    if is_functorch_wrapped_tensor(x):
        raise InvalidInput(f"{reads}, which torch.func.vmap maps over here; {instead}")
    return x


def unmapped(name: str, part: Any) -> Any:
    """A buffer, called `name`, of a pattern, without the wrappers of torch.func. Models that vmap maps over must have
    one pattern.
    """
    while isinstance(part, torch.Tensor) and is_functorch_wrapped_tensor(part):
        dim = maybe_get_bdim(part)
        part = get_unwrapped(part)
        if dim >= 0:
            part = untransformed(functools.partial(_equal_along, name, part, dim))
    return part


def _equal_along(name: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Entry 0 of `x` along `dim`, for which all others must be equal. Synchronizes."""
    rows = x.movedim(dim, 0)
    if not bool((rows == rows[:1]).all()):
        raise InvalidInput(
            f"torch.func.vmap maps over {name}, and the patterns differ; call layers of different patterns in a loop"
        )
    return rows[0]


def of_values(look: Callable[..., Made], *given: Any, reads: str, instead: str) -> Made:
    """`look(*given)`, for results that depend on values: inside torch.func, on the wrapped values. See `concrete`."""
    plain = [concrete(each, reads, instead) for each in given]
    for each in plain:
        _check_shown(each, reads, instead)
    return untransformed(lambda: look(*plain), plain[0])


def reads_values(
    reads: str, instead: str = "make it outside"
) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """For functions that read values: InvalidInput where tracing by make_fx or with fake tensors has none to read."""

    def decorate(make: Callable[Given, Made]) -> Callable[Given, Made]:
        @functools.wraps(make)
        def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
            if torch.compiler.is_compiling():
                return make(*args, **kwargs)
            try:
                return make(*args, **kwargs)
            except (RuntimeError, AssertionError) as error:
                if type(error).__module__ in TRACERS or any(text in str(error) for text in TRACED):
                    raise InvalidInput(
                        f"{reads}, and traced and fake tensors do not show them; {instead}"
                    ) from error
                raise

        return made

    return decorate


def watched(x: torch.Tensor) -> bool:
    """Whether torch.compile, torch.func or forward-mode differentiation observes operations on `x`."""
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or is_functorch_wrapped_tensor(x)
    )


def check_has_values(reads: str, instead: str, *given: Any) -> None:
    """InvalidInput for a tensor whose values the host cannot read: a fake one, or a subclass that wraps others; and
    for any where tensors made now are fake.

    `reads` and `instead` are as in `concrete`.
    """
    for x in given:
        _check_shown(x, reads, instead)
        if isinstance(x, torch.Tensor) and not torch.compiler.is_compiling() and faking():
            raise InvalidInput(f"{reads}, and a FakeTensorMode does not show them; {instead}")


def _check_shown(x: Any, reads: str, instead: str) -> None:
    if isinstance(x, torch.Tensor) and not torch.compiler.is_compiling() and (is_fake(x) or wraps(x)):
        raise InvalidInput(f"{reads}, and a {type(x).__name__} does not show them; {instead}")


def check_aligned(name: str, x: torch.Tensor, alignment: int) -> None:
    """InvalidInput unless `x` begins at a multiple of `alignment` bytes, if it has an accessible address."""
    if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(x):
        return
    beyond = x.data_ptr() % alignment
    if beyond:
        raise InvalidInput(
            f"{name} start {beyond} bytes past a multiple of {alignment} bytes, as a storage offset can make them; "
            "call .clone()"
        )


def outside_inference(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """For functions that make tensors for later training: in inference mode they run under no_grad instead.

    A backward pass cannot save inference tensors.
    """

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)

    return made


def saveable(x: Any) -> Any:
    """`x`, or a copy of an inference tensor, which a backward pass can save."""
    if torch.compiler.is_compiling() or not isinstance(x, torch.Tensor) or isinstance(x, UNINITIALIZED):
        return x
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def save_for_backward(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """ctx.save_for_backward. InvalidInput for an inference tensor, which torch refuses to save."""
    for x in tensors:
        if (
            x is not None
            and (x.is_inference() or is_functorch_wrapped_tensor(x))
            and any(ctx.needs_input_grad)
        ):
            arguments.kept("an operand, a pattern or a mask", x)
    ctx.save_for_backward(*tensors)


class SecondOrderInput(NamedTuple):
    """An input that only a second derivative reads. For a first one it may change in place, unlike a saved tensor."""

    input: torch.Tensor
    version: int

    @classmethod
    def of(cls, x: torch.Tensor | None) -> "SecondOrderInput | None":
        return None if x is None else cls(x, 0 if x.is_inference() else x._version)

    def read(self, name: str) -> torch.Tensor:
        """The input. InvalidInput if it has changed."""
        if not self.input.is_inference() and self.input._version != self.version:
            raise InvalidInput(
                f"{name} was changed in place after the forward pass, and the second derivative needs its values of "
                "then; change it after the backward pass, or pass a clone of it"
            )
        return self.input


# Not empty while a function decorated with `constant` runs: as Python, although torch reports that it compiles. Ask
# `torch.compiler.is_compiling() and not CONSTANT` in place: a function for it would itself be compiled behind a graph
# break, and return True.
CONSTANT: list[None] = []


def constant(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """For functions that torch.compile runs as Python while it traces: their results are constants of the graph.

    Their arguments must be constants too. `not_traced` functions may run inside them.
    """

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        CONSTANT.append(None)
        try:
            return make(*args, **kwargs)
        finally:
            CONSTANT.pop()

    # The effect of torch.compiler.assume_constant_result, without importing torch._dynamo, which takes seconds.
    made._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return made


def _of_values(what: str, make: Callable[Given, Made]) -> Callable[Given, Made]:
    """`make`, on the wrapped values if inside torch.func."""

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        reads, instead = f"{what} follows values", "make it outside"
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Tensor) and (wraps(each) or (is_fake(each) and not faking())):
                check_has_values(reads, "pass a plain tensor", each)
        if not torch._C._are_functorch_transforms_active():
            return make(*args, **kwargs)
        plain: Any = [concrete(each, reads, instead) for each in args]
        named: Any = {name: concrete(each, reads, instead) for name, each in kwargs.items()}
        return untransformed(functools.partial(make, *plain, **named))

    return made


def untraced(what: str, instead: str) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """For functions that run as Python. Under torch.compile they raise InvalidInput with `what` and `instead`. Under
    fullgraph=True that is torch's error; otherwise the function runs between two graphs.
    """

    def decorate(make: Callable[Given, Made]) -> Callable[Given, Made]:
        disabled: list[Any] = []

        @functools.wraps(make)
        def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
            if CONSTANT:
                return make(*args, **kwargs)
            if torch.compiler.is_compiling():
                raise InvalidInput(f"{what} inside torch.compile; {instead}")
            if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
                return make(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(make))
            return disabled[0](*args, **kwargs)

        return made

    return decorate


def not_traced(what: str) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """For functions whose results are kept, with `what` as the name of the result: as `untraced`, and outside inference
    mode, whose tensors no backward pass can save.
    """

    def decorate(make: Callable[Given, Made]) -> Callable[Given, Made]:
        make = _of_values(what, torch.inference_mode(False)(reads_values(f"{what} follows values")(make)))
        return untraced(f"{what} is made", "make it outside and pass it to the compiled function")(make)

    return decorate


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would expect a gradient for one of these."""
    if torch.is_grad_enabled():
        for x in tensors:  # a loop: any() of a generator takes twice as long, and every call passes here
            if x is not None and x.requires_grad:
                return True
    return False


def check_no_tangent(refusal: str, *operands: Any) -> None:
    """InvalidInput with this text if forward-mode differentiation would expect a tangent."""
    if forward_ad._current_level >= 0 and (
        torch.compiler.is_compiling()  # tangents are invisible while torch.compile traces
        or any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in operands)
    ):
        raise InvalidInput(refusal)


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast is active for the device of `x`."""
    return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
