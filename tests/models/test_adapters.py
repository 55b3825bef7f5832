"""Models with adapters, as those of peft, made sparse."""

import torch
from torch import Tensor, nn

import sparsek as sk

HALF = sk.BlockSparse(block=32, keep=0.5)


class Adapted(nn.Module):
    """As peft's layers are, which are not installed everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(128, 128)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(128, 128, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_A["default"](x)


def test_an_adapter_stays_dense_beside_its_layer_unless_a_rule_names_it() -> None:
    model = nn.ModuleDict({"q": Adapted()})
    report = sk.sparsify_(model, HALF)
    assert [row.name for row in report.replaced] == ["q.base_layer"]
    assert "belongs to an adapter" in {row.name: row.why_not for row in report.rows}["q.lora_A.default"]
    assert [row.name for row in sk.sparsify_(model, {"*lora_A.default": HALF}).replaced] == [
        "q.lora_A.default"
    ]
    pruned = nn.Sequential(Adapted())
    sk.prune(pruned, HALF, calibration=[torch.randn(16, 128)], method="wanda")
    assert [type(each).__name__ for each in pruned[0].children()] == ["BlockSparseLinear", "ModuleDict"]
    assert isinstance(pruned[0].lora_A["default"], nn.Linear)  # type: ignore[index, union-attr]
