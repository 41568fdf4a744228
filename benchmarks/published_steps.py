"""Steps of trainings whose memory others published, for ``benchmarks.published_memory``.

Each function trains a few steps as the published code does, on the CUDA device of this process. The
settings are those of the row in ``published/memory.json``, and its sources name the code. Networks
come from litgpt, transformers and torchvision, or have the same shapes. Values have no meaning.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.networks.published import MILABENCH_TEXT, Gpt, GptSettings

STEPS = 3

TrainingSteps = Callable[..., None]


def litgpt(
    *,
    model: str,
    method: str,
    samples: int,
    tokens: int,
    rank: int = 0,
    dropout: float = 0.0,
    all_layers: bool = False,
) -> None:
    """Fine-tune as ``litgpt finetune``: the head in chunks, except where all weights train.

    Fabric converts the logits to float32. The first batch has the longest sequence, and an
    evaluation comes before it, in which an adapter fills its cache.
    """
    import litgpt as of_litgpt
    import litgpt.adapter
    import litgpt.adapter_v2
    import litgpt.lora
    from lightning.fabric import Fabric
    from litgpt.utils import chunked_cross_entropy

    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-true")
    with fabric.init_module(empty_init=False):
        if method == "full":
            network = of_litgpt.GPT(of_litgpt.Config.from_name(model))
        elif method == "lora":
            names = ("lora_key", "lora_projection", "lora_mlp", "lora_head")
            config = of_litgpt.lora.Config.from_name(
                model,
                lora_r=rank,
                lora_alpha=16,
                lora_dropout=dropout,
                lora_query=True,
                lora_value=True,
                **dict.fromkeys(names, all_layers),
            )
            network = of_litgpt.lora.GPT(config)
            of_litgpt.lora.mark_only_lora_as_trainable(network)
        else:
            adapter = getattr(of_litgpt, method)
            network = adapter.GPT(adapter.Config.from_name(model))
            getattr(adapter, f"mark_only_{method}_as_trainable")(network)
    network.max_seq_length = tokens
    network = fabric.setup_module(network)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    made = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.02)
    optimizer: Any = fabric.setup_optimizers(made)
    network.eval()
    with torch.no_grad():
        ids = fabric.to_device(torch.randint(0, 30000, (samples, tokens)))
        logits = network(ids)
        chunked_cross_entropy(logits[..., :-1, :], ids[..., 1:], chunk_size=0)
    del logits
    network.train()
    for step in range(STEPS):
        ids = fabric.to_device(torch.randint(0, 30000, (samples, tokens)))
        if method == "full":
            logits = network(ids)
            loss = chunked_cross_entropy(logits[..., :-1, :], ids[..., 1:])
        else:
            logits = network(ids, lm_head_chunk_size=128)
            logits[-1] = logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(logits, ids[..., 1:])
        fabric.backward(loss / 2)
        # They accumulate, so that the gradients of some steps meet those of earlier ones.
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()


def gpt(*, samples: int = 8, fused: bool = False, bfloat16: bool = False, **parts: bool) -> None:
    """Train GPT-2 small from the start, evaluate, and generate."""
    settings = GptSettings(**parts)
    network = Gpt(settings).to("cuda")
    if bfloat16:
        network.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-4, weight_decay=0.1, fused=fused)
    network.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        _loss_of_tokens(network, settings, samples).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        network.eval()
        with torch.no_grad():
            for _ in range(2):
                _loss_of_tokens(network, settings, samples)
        network.train()
    network.eval()
    with torch.no_grad():
        for length in range(4, 54):
            network(torch.zeros(1, length, dtype=torch.long, device="cuda"))


def _loss_of_tokens(network: nn.Module, settings: GptSettings, samples: int) -> Tensor:
    shape = (samples, settings.tokens)
    ids = torch.randint(0, settings.vocabulary, shape).to("cuda")
    targets = torch.randint(0, settings.vocabulary, shape).to("cuda")
    logits = network(ids)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def vit(
    *,
    precision: Any,
    samples: int,
    accumulation: int = 1,
    optimizer: str = "Adam",
    adam_of_june_2023: bool = False,
) -> None:
    """Fine-tune torchvision's ViT-L/16 with Fabric, or without it where no precision is given."""
    from lightning.fabric import Fabric
    from torchvision.models import vit_l_16

    if adam_of_june_2023:
        torch._foreach_add_ = foreach_add_with_a_copy  # type: ignore[assignment]
    network = vit_l_16()
    network.heads.head = nn.Linear(1024, 10)
    fabric = Fabric(accelerator="cuda", devices=1, precision=precision or "32-true")
    if precision:
        kind = getattr(torch.optim, optimizer)
        network, optimizers = fabric.setup(network, kind(network.parameters(), lr=5e-5))
    else:
        network.to("cuda")
        optimizers = torch.optim.Adam(network.parameters(), lr=5e-5)
    backward = fabric.backward if precision else Tensor.backward
    for step in range(STEPS * accumulation):
        network.train()
        features, targets = (each.to("cuda") for each in _images(samples))
        logits = network(features)
        loss = functional.cross_entropy(logits, targets) / accumulation
        if accumulation == 1:
            optimizers.zero_grad()
        backward(loss)
        if step % accumulation == 0:
            optimizers.step()
            if accumulation > 1:
                optimizers.zero_grad()
        network.eval()
    with torch.no_grad():
        for _ in range(2):
            features = _images(samples)[0].to("cuda")
            network(features)


def _images(samples: int) -> tuple[Tensor, Tensor]:
    """Images and targets on the host, as a loader gives them."""
    return torch.zeros(samples, 3, 224, 224), torch.zeros(samples, dtype=torch.long)


def foreach_add_with_a_copy(tensors: list[Tensor], other: Any, **options: Any) -> None:
    """Add a number as Adam did before pytorch/pytorch#104780: it made a list of new tensors."""
    if isinstance(other, float):
        torch._foreach_add(tensors, other)
    _foreach_add_(tensors, other, **options)


_foreach_add_ = torch._foreach_add_


class _SoftmaxThatKeepsItsInput(torch.autograd.Function):
    """Softmax as before pytorch/pytorch#65242, which kept its input for the backward pass too."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int) -> Tensor:
        result = torch.softmax(x, dim)
        context.save_for_backward(x, result)
        context.dim = dim
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _, result = context.saved_tensors
        (gradient,) = gradients
        found = torch._softmax_backward_data(gradient, result, context.dim, result.dtype)
        return found, None


def _softmax_of_torch_1_10(x: Tensor, dim: int) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        x = x.float()
    found: Tensor = _SoftmaxThatKeepsItsInput.apply(x, dim)  # type: ignore[no-untyped-call]
    return found


def bert_large(
    *,
    samples: int,
    half: bool = False,
    checkpointing: bool = False,
    optimizer: str = "AdamW",
    softmax_of_torch_1_10: bool = False,
) -> None:
    """Train BERT-large on 512 tokens as Trainer did in 2022, with 4 samples in each step.

    torch 1.10 kept the gradients as zeros, and attention was eager.
    """
    from transformers import Adafactor, BertConfig, BertForSequenceClassification

    if softmax_of_torch_1_10:
        functional.softmax = _softmax_of_torch_1_10  # type: ignore[assignment]
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    network = BertForSequenceClassification(config).to("cuda").train()
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": True})
        network.enable_input_require_grads()
    if optimizer == "Adafactor":
        chosen: torch.optim.Optimizer = Adafactor(network.parameters())
    else:
        chosen = torch.optim.AdamW(network.parameters(), lr=5e-5, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=half)
    for _ in range(STEPS):
        for _ in range(4 // samples):
            ids = torch.randint(100, 30000, (samples, 512)).to("cuda")
            labels = torch.zeros(samples, dtype=torch.long).to("cuda")
            with torch.autocast("cuda", torch.float16, enabled=half):
                loss = network(input_ids=ids, labels=labels).loss
            scaler.scale(loss).backward()
        scaler.unscale_(chosen)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(chosen)
        scaler.update()
        network.zero_grad(set_to_none=False)


def milabench_text(
    *, network: str, precision: str, samples: int, keeps_outputs: bool = False
) -> None:
    """Train a network of transformers as ``benchmarks/huggingface``, which keeps gradients."""
    known = MILABENCH_TEXT[network]
    made = known.module().to("cuda").train()
    # The names of a sample and its target.
    names = ("input_features" if network == "Whisper" else "input_ids", "labels")
    generator = torch.Generator()
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-3)
    is_half = precision == "fp16"
    scaler = torch.amp.GradScaler("cuda", enabled=is_half)

    def step(batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        with torch.autocast("cuda", torch.float16) if is_half else nullcontext():
            outputs = made(**batch)
        loss: Tensor = outputs.loss
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return loss, outputs if keeps_outputs else None

    # What lives in the next step is part of its peak: there the loss does, and the outputs do not.
    kept: tuple[Tensor, Any] | None = None
    for _ in range(STEPS):
        batch = known.collate([known.sample(generator) for _ in range(samples)])
        kept = step({name: part.to("cuda") for name, part in zip(names, batch, strict=True)})
    del kept


def milabench_images(
    *,
    network: str,
    precision: str,
    samples: int,
    channels_last: bool = False,
    synthetic: bool = False,
    optimizer: str = "SGD",
) -> None:
    """Train a network of torchvision as ``benchmarks/torchvision``, or as the Lightning bench.

    The synthetic loader there runs the network once in float32, on images of 244 pixels, to make
    targets; what this needs stays in the cache of the allocator.
    """
    from torchvision import models

    made = getattr(models, network)().to("cuda").train()
    if optimizer == "Adam":
        _lightning_bench(made, samples)
        return
    transform: dict[str, Any] = {"dtype": torch.float16 if precision == "fp16" else torch.float32}
    if channels_last:
        made = made.to(memory_format=torch.channels_last)
        transform["memory_format"] = torch.channels_last
    chosen = torch.optim.SGD(made.parameters(), 0.01)
    is_half = precision == "fp16"
    scaler = torch.amp.GradScaler("cuda", enabled=is_half)
    batches: Iterator[tuple[Tensor, Tensor]] = itertools.repeat(_images(samples))
    if synthetic:
        images = torch.randn(samples, 3, 244, 244, device="cuda")
        batches = itertools.repeat((images, torch.rand_like(made(images))))
    for images, targets in itertools.islice(batches, STEPS):
        features = images.to("cuda", **transform)
        targets = targets.to("cuda")
        chosen.zero_grad()
        with torch.autocast("cuda", torch.float16) if is_half else nullcontext():
            loss = functional.cross_entropy(made(features), targets)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(chosen)
            scaler.update()


def _lightning_bench(network: nn.Module, samples: int) -> None:
    """Steps of Lightning's automatic optimization with bf16-mixed."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(STEPS):
        features, targets = (each.to("cuda") for each in _images(samples))
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(network(features), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def shard(*, model: str, ranks: int, samples: int, checkpointing: str) -> None:
    """Train one rank of FSDP2, where a process group that does nothing stands for the others."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.networks.published import LLAMA_SHAPES, Llama, sharded

    shape = LLAMA_SHAPES[model]
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    with torch.device("meta"):
        network = Llama(shape, checkpointing)
    sharded(network, ranks)
    network.to_empty(device="cuda")
    angles = torch.ones(shape.tokens, shape.head_width // 2, dtype=torch.complex64, device="cuda")
    optimizer = torch.optim.AdamW(
        network.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    for _ in range(STEPS):
        ids = torch.zeros(samples, shape.tokens, dtype=torch.long).to("cuda")
        optimizer.zero_grad()
        prediction = network(ids, angles)
        loss = functional.cross_entropy(prediction.flatten(0, 1).float(), ids.flatten())
        del prediction
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=True)
        optimizer.step()


KINDS: dict[str, TrainingSteps] = {
    "litgpt": litgpt,
    "gpt": gpt,
    "vit": vit,
    "bert_large": bert_large,
    "milabench_text": milabench_text,
    "milabench_images": milabench_images,
    "shard": shard,
}
