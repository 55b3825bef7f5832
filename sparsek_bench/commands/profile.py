"""`sparsek profile KERNEL|OPERATION`: a command for each operation, and for each kernel of the table."""

from functools import partial
from importlib import import_module
from typing import Any

import typer

from sparsek.core.terminal import Deferred, group

OPERATIONS = {
    "spmm": "BSR and dense.",
    "linear": "act(x @ W.T + bias) + residual.",
    "semi24": "2:4 matrices, whole or in stored blocks.",
    "fp8": "FP8 matrices in blocks or in 2:4.",
    "sddmm": "X @ Y at the stored blocks of a pattern.",
    "spgemm": "BSR x BSR.",
    "attention": "Attention over the blocks of a mask.",
    "attention-fp8": "Attention of q, k and v in FP8.",
    "attention-backward": "The gradients of attention.",
    "serving": "Attention over paged keys and values.",
}


def loaded(name: str) -> Any:
    """The function of a command, which brings torch with it."""
    return import_module("sparsek_bench.commands.profile_run").command(name)


class Profiles(group(OPERATIONS, loaded)):
    """The operations, which help lists, and the kernels, which it does not."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if "." in cmd_name and not cmd_name.startswith("-"):
            return Deferred(cmd_name, "", self.rich_markup_mode, partial(loaded, cmd_name))
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=Profiles,
    callback=lambda: None,
    subcommand_metavar="KERNEL|OPERATION [OPTIONS]",
    help="Shows what bounds a kernel: the plan's prediction; on a GPU also times, a trace, and ncu's counters.\n\n"
    "Name an operation, or a kernel as `sparsek doctor --verbose` lists them: sparsek profile hopper.spmm --block 64.",
    no_args_is_help=True,
)
