"""What the members of a LoRA ensemble are compared in: the down-projections of each adapted layer."""

from jaxtyping import Float
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor


def down_projections(model: PeftModel) -> list[list[Float[Tensor, "_ _"]]]:
    """For each adapted layer, A of every adapter; only that of the adapter in use has a gradient.

    The others are what they were after their own last step, so that members that are trained in turn each climb the same
    joint quantity.
    """
    used = model.active_adapter
    return [
        [
            matrix.weight if name == used else matrix.weight.detach()  # type: ignore[union-attr,operator]
            for name, matrix in module.lora_A.items()  # type: ignore[operator,union-attr]
        ]
        for module in model.modules()
        if isinstance(module, BaseTunerLayer) and len(getattr(module, "lora_A", {}))
    ]
