"""FSDP2: shard a module over all ranks, and get whole tensors back."""

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headwater.diffusion.families import Family
from headwater_trainer.ranks import Ranks


def shard(module: nn.Module, family: Family, ranks: Ranks) -> None:
    """Shard each block, then what is left, over all ranks; one rank keeps everything as it is, which is faster."""
    module.to(ranks.device)
    if ranks.world_size == 1:
        return
    for block in family.blocks(module):
        fully_shard(block, mesh=ranks.mesh)
    # Said explicitly: a root would otherwise keep its gathered weights after a forward pass without a backward, and
    # the next pass would use them although others had been swapped in (see `Ema.applied`).
    fully_shard(module, mesh=ranks.mesh, reshard_after_forward=True)


def full(parameter: Tensor) -> Tensor:
    """The whole value on this device, never a view of the parameter."""
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()
