"""Steps of trainings on several devices whose memory others published, as one rank takes them.

Each function trains a few steps as the published code does. The process is a rank of a launcher: it
has the variables of torchrun, and nothing here knows whether the other ranks are there. The
settings are those of the row in ``published/devices.json``, whose sources name the code. Values
have no meaning. A function returns what torch's counters do not hold.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn import functional

from benchmarks.networks.published import LLAMA_SHAPES, Llama, LlamaShape
from benchmarks.published_steps import foreach_add_with_a_copy

STEPS = 4

Result = dict[str, float] | None

LLAMA_7B = LlamaShape(4096, 32, 32, 32, 11008, 32000, 2048)


def guide(
    *, api: str, strategy: str, offload: bool = False, adam_of_june_2023: bool = False
) -> None:
    """Train the Transformer of Lightning's guides to FSDP, with Fabric or with Trainer."""
    if adam_of_june_2023:
        torch._foreach_add_ = foreach_add_with_a_copy  # type: ignore[assignment]
    train = _guide_to_fabric if api == "fabric" else _guide_to_trainer
    train(strategy, offload=offload)


GUIDE_WORDS = 33278
GUIDE_TOKENS = 35


def _guide_network() -> nn.Module:
    """The network on the host, whose values are not made."""
    from lightning.pytorch.demos import Transformer

    with torch.device("meta"):
        network = Transformer(vocab_size=GUIDE_WORDS, nlayers=32, nhid=4096, ninp=1024, nhead=64)
    return network.to_empty(device="cpu")


def _guide_options(strategy: str, *, offload: bool) -> dict[str, Any]:
    return {
        "auto_wrap_policy": {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer},
        "sharding_strategy": strategy,
        "cpu_offload": offload,
    }


def _guide_to_fabric(strategy: str, *, offload: bool) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.fsdp import FSDPStrategy

    chosen: Any = "ddp"
    if strategy != "DDP":
        chosen = FSDPStrategy(**_guide_options(strategy, offload=offload))
    fabric = Fabric(accelerator="cuda", devices=2, strategy=chosen)
    fabric.launch()
    network = fabric.setup(_guide_network())
    optimizer: Any = fabric.setup_optimizers(torch.optim.Adam(network.parameters(), lr=0.1))
    for _ in range(STEPS):
        ids = torch.zeros(GUIDE_TOKENS, dtype=torch.long)
        inputs, targets = fabric.to_device((ids, ids.clone()))
        output = network(inputs.unsqueeze(0), targets.unsqueeze(0))
        loss = functional.nll_loss(output, targets.view(-1))
        fabric.backward(loss)
        # With offload it would train a billion parameters on this host.
        if not offload:
            optimizer.step()
        optimizer.zero_grad()


def _guide_to_trainer(strategy: str, *, offload: bool) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.utils.data import DataLoader

    class LanguageModel(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _guide_network()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            inputs, targets = batch
            loss = functional.nll_loss(self.model(inputs, targets), targets.view(-1))
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

        def optimizer_step(
            self, epoch: int, batch: int, optimizer: Any, closure: Any = None
        ) -> None:
            if not offload:
                super().optimizer_step(epoch, batch, optimizer, closure)
                return
            # As in Fabric, the step on the host is left out.
            closure()
            optimizer.zero_grad()

    chosen: Any = "ddp"
    if strategy != "DDP":
        chosen = FSDPStrategy(**_guide_options(strategy, offload=offload))
    ids = torch.zeros(GUIDE_TOKENS, dtype=torch.long)
    samples: Any = [(ids, ids)] * 100
    trainer = Trainer(
        accelerator="cuda",
        devices=2,
        strategy=chosen,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), DataLoader(samples))


def titan(
    *,
    model: str,
    samples: int,
    checkpointing: str,
    written_norms: bool = False,
    root_stays: bool = False,
) -> None:
    """Train a Llama with FSDP2 as torchtitan at the end of 2024."""
    shape = LLAMA_SHAPES[model]
    _start()
    with torch.device("meta"):
        network = Llama(shape, checkpointing)
    if written_norms:
        _write_norms(network)
    _shard_fully(network, root_resharded=not root_stays)
    angles = _angles(shape)
    optimizer = _adamw(network)
    for _ in range(STEPS):
        ids = torch.zeros(samples, shape.tokens, dtype=torch.long).to("cuda")
        optimizer.zero_grad()
        prediction = network(ids, angles)
        loss = functional.cross_entropy(prediction.flatten(0, 1).float(), ids.flatten())
        del prediction
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=True)
        optimizer.step()


def torchtrain(*, wrapper: str, checkpointing: str) -> Result:
    """Train the Llama of 7B as torchtitan in March 2024, with FSDP1 or FSDP2.

    Its network returns float32, which lives until the next step has its own.
    """
    _start()
    with torch.device("meta"):
        network = Llama(LLAMA_7B, "none" if wrapper == "FSDP1" else checkpointing)
    _write_norms(network)
    if wrapper == "FSDP1":
        trained: Any = _wrap_layers(network, checkpointing)
        clip: Callable[[], Any] = lambda: trained.clip_grad_norm_(1.0)  # noqa: E731
    else:
        trained = network
        _shard_fully(network, root_resharded=False)
        clip = lambda: nn.utils.clip_grad_norm_(network.parameters(), 1.0)  # noqa: E731
    angles = _angles(LLAMA_7B)
    optimizer = _adamw(trained)
    for _ in range(STEPS):
        ids = torch.zeros(8, LLAMA_7B.tokens, dtype=torch.long).to("cuda")
        optimizer.zero_grad()
        prediction = trained(ids, angles).float()
        loss = functional.cross_entropy(prediction.flatten(0, 1), ids.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        clip()
        optimizer.step()
    return {"active": torch.cuda.memory_stats()["active_bytes.all.peak"]}


def _angles(shape: LlamaShape) -> Tensor:
    return torch.ones(shape.tokens, shape.head_width // 2, dtype=torch.complex64, device="cuda")


def _adamw(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        network.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )


def _start() -> None:
    """Start the process group on the device of this rank, as a script of torchrun."""
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))


def _make_on_device(module: nn.Module) -> None:
    """Give the parameters of a module memory, for FSDP1."""
    module.to_empty(device="cuda", recurse=False)


class _WrittenNorm(nn.Module):
    """RMSNorm of several kernels, as torchtitan and torch had it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normal.type_as(x) * self.weight


def _write_norms(network: Llama) -> None:
    width = network.token.weight.shape[1]
    with torch.device("meta"):
        network.norm = _WrittenNorm(width)  # type: ignore[assignment]
        for layer in network.layers:
            layer.norm1 = _WrittenNorm(width)
            layer.norm2 = _WrittenNorm(width)


def _shard_fully(network: Llama, *, root_resharded: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    last = len(network.layers) - 1
    for number, layer in enumerate(network.layers):
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=number < last)
    fully_shard(network, mesh=mesh, mp_policy=mixed, reshard_after_forward=root_resharded)
    network.to_empty(device="cuda")


def _wrap_layers(network: Llama, checkpointing: str) -> nn.Module:
    """FSDP1 around each layer and the rest, outside of what checkpoints."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecision
    from torch.utils.checkpoint import checkpoint

    from benchmarks.networks.published import selective_contexts

    wrap = functools.partial(
        FullyShardedDataParallel,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
        use_orig_params=True,
        device_id=torch.cuda.current_device(),
        param_init_fn=_make_on_device,
    )
    chosen: dict[str, Any] = {}
    if checkpointing == "selective":
        chosen = {
            "checkpoint_fn": checkpoint,
            "context_fn": selective_contexts,
            "use_reentrant": False,
        }
    for number, layer in enumerate(network.layers):
        inner = checkpoint_wrapper(layer, preserve_rng_state=False, **chosen)
        network.layers[number] = wrap(inner)
    return wrap(network)


def lora(*, strategy: str, samples: int, tokens: int) -> None:
    """Train adapters of Llama 2 7B with FSDP1, as fsdp_qlora."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    from benchmarks.networks.adapters import AdaptedLayer, AdaptedLlama

    _start()
    with torch.device("meta"):
        network = AdaptedLlama(LLAMA_7B).to(torch.bfloat16)
    wrapped = FullyShardedDataParallel(
        network,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=_of_adapters,
        use_orig_params=False,
        limit_all_gathers=True,
        device_id=torch.cuda.current_device(),
        sync_module_states=True,
        param_init_fn=_make_on_device,
    )
    apply_activation_checkpointing(
        wrapped,
        checkpoint_wrapper_fn=functools.partial(
            checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT
        ),
        check_fn=lambda module: isinstance(module, AdaptedLayer),
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-5, betas=(0.9, 0.95), eps=1e-5)
    width = LLAMA_7B.head_width
    cosines = torch.ones(tokens, width, dtype=torch.bfloat16, device="cuda")
    sines = torch.ones_like(cosines)
    torch.cuda.reset_peak_memory_stats()
    wrapped.train()
    for _ in range(STEPS):
        ids = torch.zeros(samples, tokens, dtype=torch.long).to("cuda")
        # The logits live until the step has ended, as in the program.
        loss, logits = wrapped(ids, cosines, sines)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss, logits


def _of_adapters(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Each layer is a unit of FSDP, and each small weight that trains."""
    from benchmarks.networks.adapters import AdaptedLayer

    del nonwrapped_numel
    weight = getattr(module, "weight", None)
    is_trained = weight is not None and weight.requires_grad and not list(module.children())
    return recurse or is_trained or isinstance(module, AdaptedLayer)


GPT2_SHAPES = {"large": (1280, 36, 20), "xl": (1600, 48, 25)}
"""Width, layers and heads."""

GPT2_TOKENS = 128


def gpt2(*, network: str, strategy: str, least_parameters: int, samples: int) -> None:
    """Train a GPT-2 of transformers in float32, as accelerate did with torch 1.12."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers, heads = GPT2_SHAPES[network]
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, attn_implementation="eager", use_cache=False
    )
    _start()
    with torch.device("meta"):
        made = GPT2LMHeadModel(config)
    made.to_empty(device="cuda")
    if strategy == "DDP":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(made, device_ids=[0])
    else:
        wrapped = FullyShardedDataParallel(
            made,
            sharding_strategy=ShardingStrategy[strategy],
            device_id=0,
            auto_wrap_policy=functools.partial(
                size_based_auto_wrap_policy, min_num_params=least_parameters
            ),
        )
    optimizer = torch.optim.AdamW(wrapped.parameters(), 5e-5, foreach=False)
    wrapped.train()
    for _ in range(STEPS):
        ids = torch.zeros(samples, GPT2_TOKENS, dtype=torch.long).to("cuda")
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def litgpt_trainer(*, model: str, strategy: str, samples: int) -> None:
    """Fine-tune all weights of a network of litgpt with Lightning's Trainer, as llm-chi."""
    import litgpt
    from lightning.pytorch import LightningModule, Trainer
    from litgpt.utils import chunked_cross_entropy
    from torch.utils.data import DataLoader

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.model = litgpt.GPT(litgpt.Config.from_name(model))
            self.model.to(torch.bfloat16).to_empty(device="cuda")
            self.model.max_seq_length = 512

        def training_step(self, ids: Tensor, _: int) -> Tensor:
            logits = self.model(ids)
            loss: Tensor = chunked_cross_entropy(logits[..., :-1, :], ids[..., 1:])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(
                self.model.parameters(), lr=2e-4, weight_decay=0.0, betas=(0.9, 0.95)
            )

    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    chosen: Any = DDPStrategy()
    if ranks == 1:
        chosen = "auto"
    elif strategy != "DDP":
        chosen = FSDPStrategy(sharding_strategy=ShardingStrategy[strategy])
    texts: Any = [torch.zeros(512, dtype=torch.long)] * 1000
    trainer = Trainer(
        accelerator="gpu",
        devices=ranks,
        strategy=chosen,
        precision="bf16-true",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Training(), DataLoader(texts, batch_size=samples))


KINDS: dict[str, Callable[..., Result]] = {
    "guide": guide,
    "titan": titan,
    "torchtrain": torchtrain,
    "lora": lora,
    "gpt2": gpt2,
    "litgpt_trainer": litgpt_trainer,
}
