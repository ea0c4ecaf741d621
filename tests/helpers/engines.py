"""The engines that train one model in several processes, as their libraries set them up.

Each takes a model and gives an ``Engine``; ``ENGINES`` names them. Processes of a gloo group on the
CPU, or of an NCCL group with a GPU each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine_models import saved
from gloo_group import compile_no_collectives
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

RATE = 0.1  # of learning
ACCUMULATED = 2  # forward passes in a step


class Engine:
    """A wrapped model with plain SGD.

    Attributes:
        module: that is called.
        model: the Transformers model within, or PEFT's around it.
        ranks_per_batch: how many ranks in a row are given the same batch.
        loss_scale: the factor on the loss of each forward pass.
        accelerator: accelerate's, where that has made it.
        teacher: the engine of a model to distil from, or None.
    """

    def __init__(self, module: nn.Module, model: nn.Module, ranks_per_batch: int = 1) -> None:
        self.module, self.model, self.ranks_per_batch = module, model, ranks_per_batch
        trained = [each for each in model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, RATE, foreach=False)
        self.loss_scale = 1.0
        self.accelerator: Any = None
        self.teacher: Any = None

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def synchronize(self, enabled: bool) -> None:
        """Say whether the next backward passes reduce the gradients over the ranks."""
        module: Any = self.module
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = enabled  # no_sync(), for longer than a block
        else:
            module.set_requires_gradient_sync(enabled)

    def end_batch(self) -> None:
        """End a forward and backward pass which is not the last of its step."""

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Those of a step, whole, on every rank."""
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        return {name: whole(each).cpu() for name, each in gradients.items() if each is not None}

    def weights(self) -> dict[str, Tensor]:
        """All that are trained, whole, on every rank."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            return {name: whole(p).cpu() for name, p in trained.items()}


def whole(parameter: Any) -> Tensor:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().clone()


def ddp(**options: Any) -> Callable[[PreTrainedModel], Engine]:
    return lambda model: Engine(DistributedDataParallel(model, **options), model)


def base_of(model: Any) -> Any:
    """The Transformers model in a wrapper of PEFT, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(base: Any) -> Any:
    """The decoder layers of a model without an encoder."""
    return getattr(base.model, "layers", ())


def fsdp2(
    *last: str, replicas: int | None = None, every: dict[str, Any] | None = None, **root: Any
) -> Callable[[PreTrainedModel], Engine]:
    """Each layer a unit of ``fully_shard``, the rest with the root.

    Args:
        last: the modules that make one more unit, which frees its weights after its forward.
        replicas: of the whole model (HSDP); None for a mesh without them.
        every, root: options of all units, and of the root.
    """

    def make(model: PreTrainedModel) -> Engine:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = mesh_of_all()
        if replicas is not None:
            shape = replicas, dist.get_world_size() // replicas
            mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicas", "shards"))
        options: dict[str, Any] = {"mesh": mesh, **(every or {})}
        base = base_of(model)
        for layer in layers_of(base):
            fully_shard(layer, **options)
        if last:
            units = [base.get_submodule(name) for name in last]
            of_one = units if len(units) > 1 else units[0]
            fully_shard(of_one, reshard_after_forward=True, **options)
        fully_shard(model, **options, **root)
        return Engine(model, model)

    return make


def fsdp1(*more: type[nn.Module] | str) -> Callable[[PreTrainedModel], Engine]:
    """PyTorch's older ``FullyShardedDataParallel``: each layer a unit, and modules of these types,
    or of the types that modules of these names have; the rest with the root.
    """

    def make(model: PreTrainedModel) -> Engine:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        base = base_of(model)
        types = (type(base.get_submodule(e)) if isinstance(e, str) else e for e in more)
        units = {*map(type, layers_of(base)), *types}
        module = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(units),
            use_orig_params=True,
            device_id=model.device,
        )
        return FSDP1(module, model)

    return make


class FSDP1(Engine):
    def synchronize(self, enabled: bool) -> None:
        modules: Any = self.module.modules()
        for module in (module for module in modules if hasattr(module, "_sync_gradients")):
            module._sync_gradients = enabled  # no_sync(), for longer than a block

    def gradients(self) -> dict[str, Tensor]:
        return self._whole(super().gradients, with_grads=True)

    def weights(self) -> dict[str, Tensor]:
        return self._whole(super().weights)

    def _whole(self, read: Callable[[], dict[str, Tensor]], **how: bool) -> dict[str, Tensor]:
        """With the names that they have without the wrappers."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        module: Any = self.module
        with FullyShardedDataParallel.summon_full_params(module, **how):
            return {name.replace("_fsdp_wrapped_module.", ""): t for name, t in read().items()}


def fsdp2_mixed(model: PreTrainedModel) -> Engine:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2("lm_head", every={"mp_policy": policy})(model)


def fsdp2_offload(model: PreTrainedModel) -> Engine:
    from torch.distributed.fsdp import CPUOffloadPolicy

    policy = CPUOffloadPolicy(pin_memory=dist.get_backend() == "nccl")
    return fsdp2("lm_head", every={"offload_policy": policy})(model)


def accelerate_fsdp2(*units: str, **options: Any) -> Callable[[PreTrainedModel], Engine]:
    """``Accelerator.prepare``: each layer is a unit, and modules of these types are."""

    def make(model: PreTrainedModel) -> Engine:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(base_of(model).model.layers[0]).__name__, *units],
            state_dict_type="SHARDED_STATE_DICT",
        )
        on_cpu = dist.get_backend() != "nccl"
        if on_cpu:
            shard_on_cpus()
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, **options)
        engine = Engine(model, model)
        prepared, optimizer = accelerator.prepare(model, engine.optimizer)
        engine.module = engine.model = prepared
        engine.optimizer, engine.accelerator = optimizer, accelerator
        return engine

    return make


def shard_on_cpus() -> None:
    """Make accelerate shard models over the CPUs of this process group too: it takes them for a
    kind of accelerator. Everything else is its own code.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    init = PartialState.__init__
    if hasattr(init, "shards"):
        return

    def shards(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    vars(shards)["shards"] = True
    PartialState.__init__ = shards


def device_map(model: PreTrainedModel) -> Engine:
    """The decoder, and the head on another GPU where there is one. Each rank trains alone."""
    from accelerate import dispatch_model

    first: Any = "cpu" if model.device.type == "cpu" else model.device.index
    second = "cpu" if first == "cpu" else (first + 1) % torch.cuda.device_count()
    before = "base_model.model." if hasattr(model, "peft_config") else ""
    devices = {f"{before}model": first, f"{before}lm_head": second}
    whole_model: Any = model
    dispatched = dispatch_model(whole_model, devices, main_device=first, force_hooks=True)
    return Engine(dispatched, dispatched, ranks_per_batch=dist.get_world_size())


def transformers_own(*, tp_size: int = 1) -> Callable[[PreTrainedModel], Engine]:
    """Transformers' ``DistributedConfig``, which loads a checkpoint.

    Args:
        tp_size: how many ranks split the rows of each weight; FSDP shards over the others.
    """

    def make(model: PreTrainedModel) -> Engine:
        from transformers.distributed import DistributedConfig

        from liger_patch import apply_patch
        from liger_patch.patch.forward import record_of

        record = record_of(model)
        config = DistributedConfig(fsdp_size=dist.get_world_size() // tp_size, tp_size=tp_size)
        loaded = type(model).from_pretrained(saved(model), distributed_config=config)
        loaded.train()
        if record is not None:
            apply_patch(loaded, layers=record.layers)
        weight: Any = loaded.lm_head.weight
        assert weight.device_mesh.ndim == (1 if tp_size == 1 else 2)
        return Engine(loaded, loaded, ranks_per_batch=tp_size)

    return make


def tensor_parallel(model: PreTrainedModel, head: Any = None, **more: Any) -> Engine:
    """Projections and the head on shards, a batch for all ranks; ``more``: of the plan."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = dict.fromkeys(("q_proj", "k_proj", "v_proj"), columns) | {"o_proj": rows}
    plan = {f"model.layers.*.self_attn.{name}": style for name, style in plan.items()}
    plan |= dict.fromkeys(("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"), columns)
    plan |= {"model.layers.*.mlp.down_proj": rows}
    plan |= {"lm_head": head or ColwiseParallel(output_layouts=Replicate()), **more}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    if tied:
        plan |= {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh_of_all(), plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return Engine(model, model, ranks_per_batch=dist.get_world_size())


def deepspeed(stage: int, **zero: Any) -> Callable[[PreTrainedModel], Engine]:
    def make(model: PreTrainedModel) -> Engine:
        compile_no_collectives()
        return DeepSpeed(model, {"stage": stage, **zero})

    return make


class DeepSpeed(Engine):
    def __init__(self, model: PreTrainedModel, zero: dict[str, Any]) -> None:
        import deepspeed

        super().__init__(model, model)
        if zero["stage"] == 3:
            zero = {"stage3_param_persistence_threshold": 0, **zero}  # else none is partitioned
        self.loss_scale = 1 / ACCUMULATED
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": ACCUMULATED,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.module, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=config, dist_init_required=False
        )

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss)

    def end_batch(self) -> None:
        self.module.step()  # which counts them

    def step(self) -> None:
        self.module.step()

    def gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        gradients = {name: safe_get_full_grad(p) for name, p in trained.items()}
        return {n: each.detach().cpu().clone() for n, each in gradients.items() if each is not None}

    def weights(self) -> dict[str, Tensor]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return super().weights()


ON_CPU = {"device": "cpu", "pin_memory": False}


def mesh_of_all() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("all",))


ENGINES: dict[str, Callable[[PreTrainedModel], Engine]] = {
    "ddp": ddp(),
    "ddp_unused": ddp(find_unused_parameters=True),
    "ddp_static": ddp(static_graph=True),
    "fsdp1": fsdp1(),
    "fsdp1_head": fsdp1(nn.Linear),
    "fsdp1_lm_head": fsdp1("lm_head"),
    "fsdp2": fsdp2(),
    "fsdp2_resharded": fsdp2(reshard_after_forward=True),
    "fsdp2_head": fsdp2("lm_head"),
    "fsdp2_norm_head": fsdp2("model.norm", "lm_head"),
    "fsdp2_tied_head": fsdp2("model.embed_tokens", "model.norm", "lm_head"),
    "fsdp2_mixed": fsdp2_mixed,
    "fsdp2_offload": fsdp2_offload,
    "hsdp_head": fsdp2("lm_head", replicas=1),
    "hsdp_replicated_head": fsdp2("lm_head", replicas=2),
    "accelerate_fsdp2": accelerate_fsdp2(),
    "accelerate_fsdp2_linear": accelerate_fsdp2("Linear"),  # the head, too, frees its weight
    "accelerate_fsdp2_mixed": accelerate_fsdp2(mixed_precision="bf16"),  # with its autocast
    "transformers_fsdp": transformers_own(),
    "transformers_fsdp_tp": transformers_own(tp_size=2),
    "tensor_parallel": tensor_parallel,
    "device_map": device_map,
    "zero1": deepspeed(1),
    "zero2": deepspeed(2),
    "zero3": deepspeed(3),
    "zero3_plain": deepspeed(3, memory_efficient_linear=False),
    "zero3_regathered": deepspeed(3, stage3_max_reuse_distance=0),
    "zero3_offload": deepspeed(3, offload_param=ON_CPU, offload_optimizer=ON_CPU),
}
