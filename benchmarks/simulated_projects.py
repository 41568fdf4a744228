"""Small projects whose training step reads values from the device, for ``simulated_values``.

Each is a function of a batch size and a device that returns a :class:`Project`. Their networks are
large enough that workspaces of kernels do not matter, and use operators whose CPU and CUDA kernels
allocate the same: attention is written out, layers have no bias (its gradient is a reduction, for
which CUDA requests a buffer), there is no dropout, and optimizers have ``foreach=False``. Batches
are made on the host and copied to the device in each step.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score


@dataclass(frozen=True)
class Project:
    """A program that trains."""

    step: Callable[[], object]


Maker = Callable[[int, torch.device], Project]
PROJECTS: dict[str, Maker] = {}


def project(maker: Maker) -> Maker:
    PROJECTS[maker.__name__.replace("_", " ")] = maker
    return maker


def trained(module: nn.Module, loss_of: Callable[[], Tensor]) -> Project:
    """A project with one optimizer."""
    optimizer = adam(module)

    def step() -> None:
        loss_of().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Project(step)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    trainable = [weight for weight in module.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trainable, 1e-4, foreach=False)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Attention(nn.Module):
    """A block of a transformer, with attention that is written out."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.feed_forward = mlp(width, 4 * width, width)

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.inputs(self.norm(x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2)
        if allowed is not None:
            scores = scores.masked_fill(~allowed[:, None, None, :], float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.output(mixed)
        loss: Tensor = x + self.feed_forward(x)
        return loss


class Language(nn.Module):
    """Embedding, two blocks, and a head over a vocabulary."""

    def __init__(self, vocabulary: int = 4000, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Attention(width), Attention(width)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def hidden(self, tokens: Tensor, allowed: Tensor | None = None) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        return x


@project
def detection_with_matching(size: int, device: torch.device) -> Project:
    queries, classes = 100, 20
    body = mlp(256, 1024, 512).to(device)
    head = nn.Linear(512, classes + 1 + 4, bias=False).to(device)
    module = nn.ModuleList([body, head])

    def match(cost: Tensor) -> list[tuple[int, int]]:
        """Pairs of a query and an object, the cheapest first."""
        pairs = []
        cost = cost.clone()
        for _ in range(cost.shape[1]):
            query, target = divmod(int(cost.argmin()), cost.shape[1])
            pairs.append((query, target))
            cost[query] = torch.inf
            cost[:, target] = torch.inf
        return pairs

    def loss_of() -> Tensor:
        outputs = head(body(torch.randn(size, queries, 256).to(device)))
        logits, boxes = outputs[..., : classes + 1], outputs[..., classes + 1 :].sigmoid()
        wanted = torch.full((size, queries), classes, device=device)
        regression = logits.new_zeros(())
        for image in range(size):
            objects = 1 + (7 * image) % 12
            labels = torch.randint(classes, (objects,)).to(device)
            targets = torch.rand(objects, 4).to(device)
            assert (targets >= 0).all()
            assert torch.isfinite(boxes[image]).all()
            distance = (boxes[image][:, None] - targets[None]).abs().sum(-1)
            cost = distance - logits[image].softmax(-1)[:, labels]
            pairs = match(cost.detach().cpu())
            chosen = torch.tensor([query for query, _ in pairs]).to(device)
            order = torch.tensor([target for _, target in pairs]).to(device)
            wanted[image, chosen] = labels[order]
            regression = regression + functional.l1_loss(boxes[image][chosen], targets[order])
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) + regression
        return loss

    return trained(module, loss_of)


@project
def masks_of_padding(size: int, device: torch.device) -> Project:
    module = Language().to(device)

    def loss_of() -> Tensor:
        lengths = torch.randint(16, 97, (size,))
        lengths[0] = 96
        tokens = torch.randint(1, 4000, (size, 96))
        tokens[torch.arange(96)[None] >= lengths[:, None]] = 0
        tokens = tokens.to(device)
        allowed = tokens != 0
        tokens = tokens[:, : int(allowed.sum(1).max())]
        allowed = allowed[:, : tokens.shape[1]]
        hidden = module.hidden(tokens, allowed)
        logits = module.head(hidden[allowed])
        return functional.cross_entropy(logits, tokens[allowed])

    return trained(module, loss_of)


@project
def masked_language_model(size: int, device: torch.device) -> Project:
    module = Language().to(device)

    def loss_of() -> Tensor:
        tokens = torch.randint(4, 4000, (size, 128)).to(device)
        chosen = torch.rand(tokens.shape, device=device) < 0.15
        labels = tokens[chosen]
        replaced = torch.bernoulli(torch.full(tokens.shape, 0.8, device=device)).bool() & chosen
        tokens = tokens.masked_fill(replaced, 3)
        logits = module.head(module.hidden(tokens)[chosen])
        return functional.cross_entropy(logits, labels)

    return trained(module, loss_of)


@project
def contrastive_pairs(size: int, device: torch.device) -> Project:
    module = mlp(512, 8192, 2048, 128).to(device)

    def loss_of() -> Tensor:
        first = torch.randn(size, 512).to(device)
        views = torch.cat([first, first + 0.1 * torch.randn_like(first)])
        embedded = functional.normalize(module(views), dim=1)
        similar = embedded @ embedded.T / 0.5
        count = len(views)
        diagonal = torch.eye(count, dtype=torch.bool, device=device)
        labels = torch.arange(size, device=device).repeat(2)
        positive = (labels[:, None] == labels[None])[~diagonal].view(count, count - 1)
        similar = similar[~diagonal].view(count, count - 1)
        assert positive.sum(1).eq(1).all()
        logits = torch.cat(
            [similar[positive].view(count, -1), similar[~positive].view(count, -1)], dim=1
        )
        return functional.cross_entropy(logits, labels.new_zeros(count))

    return trained(module, loss_of)


@project
def mixture_of_experts(size: int, device: torch.device) -> Project:
    experts = nn.ModuleList([mlp(128, 512, 128) for _ in range(4)])
    gate = nn.Linear(128, 4, bias=False)
    module = nn.ModuleList([experts, gate]).to(device)

    def loss_of() -> Tensor:
        tokens = torch.randn(size, 64, 128).to(device).flatten(0, 1)
        weights, chosen = gate(tokens).softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(experts):
            token, rank = torch.where(chosen == number)
            mixed.index_add_(0, token, expert(tokens[token]) * weights[token, rank, None])
        return mixed.pow(2).mean()

    return trained(module, loss_of)


@project
def graphs(size: int, device: torch.device) -> Project:
    layers = nn.ModuleList([mlp(128, 256, 128) for _ in range(3)]).to(device)
    head = nn.Linear(128, 8, bias=False).to(device)
    module = nn.ModuleList([layers, head])

    def loss_of() -> Tensor:
        sizes = torch.randint(10, 31, (size,))
        batch = torch.repeat_interleave(torch.arange(size), sizes).to(device)
        nodes = int(sizes.sum())
        edges = torch.randint(nodes, (2, 4 * nodes)).to(device)
        edges = edges[:, edges[0] != edges[1]]
        x = torch.randn(nodes, 128).to(device)
        for layer in layers:
            messages = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
            x = x + layer(messages)
        count = int(batch.max().item()) + 1
        members = torch.bincount(batch)
        pooled = x.new_zeros(count, 128).scatter_add_(0, batch[:, None].expand_as(x), x)
        pooled = pooled / members[:, None]
        return functional.cross_entropy(head(pooled), torch.randint(8, (size,)).to(device))

    return trained(module, loss_of)


@project
def ctc(size: int, device: torch.device) -> Project:
    module = mlp(80, 512, 512, 64).to(device)

    def loss_of() -> Tensor:
        frames = torch.randint(100, 201, (size,)).to(device)
        targets = torch.randint(1, 64, (size, 40)).to(device)
        target_lengths = torch.randint(10, 41, (size,)).to(device)
        inputs = torch.randn(size, int(frames.max()), 80).to(device)
        if (target_lengths > frames).any():
            raise ValueError("a target is longer than its input")
        scores = module(inputs).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(scores, targets, frames, target_lengths)

    return trained(module, loss_of)


@project
def metrics_in_the_step(size: int, device: torch.device) -> Project:
    module = mlp(256, 1024, 1024, 10).to(device)
    metrics = nn.ModuleList([MulticlassF1Score(10, average="macro"), MulticlassAccuracy(10)]).to(
        device
    )

    def loss_of() -> Tensor:
        labels = torch.randint(10, (size,)).to(device)
        logits = module(torch.randn(size, 256).to(device))
        for metric in metrics:
            assert float(metric(logits, labels)) <= 1
        return functional.cross_entropy(logits, labels)

    return trained(module, loss_of)


@project
def auroc_in_the_step(size: int, device: torch.device) -> Project:
    module = mlp(256, 1024, 1024, 5).to(device)

    def loss_of() -> Tensor:
        labels = torch.randint(5, (size,)).to(device)
        logits = module(torch.randn(size, 256).to(device))
        metric = MulticlassAUROC(5).to(device)
        metric.update(logits.detach().softmax(-1), labels)
        assert 0 <= float(metric.compute()) <= 1
        return functional.cross_entropy(logits, labels)

    return trained(module, loss_of)


@project
def gradient_scaler(size: int, device: torch.device) -> Project:
    module = mlp(512, 2048, 2048, 16).to(device)
    optimizer = adam(module)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)

    def step() -> None:
        with torch.autocast(device.type, torch.float16):
            outputs = module(torch.randn(size, 512).to(device))
        loss = outputs.float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 256.0

    return Project(step)


@project
def checks_for_nan(size: int, device: torch.device) -> Project:
    module = mlp(256, 1024, 1024, 64).to(device)

    def loss_of() -> Tensor:
        inputs = torch.randn(size, 256)
        inputs[::10, 3] = torch.nan
        inputs = inputs.to(device)
        inputs = inputs[~torch.isnan(inputs).any(1)]
        outputs = module(inputs)
        # Nothing is left out here with real values.
        outputs = outputs[torch.isfinite(outputs).all(1) & (outputs == outputs).all(1)]
        loss: Tensor = outputs.pow(2).mean()
        if torch.isnan(loss) or torch.isinf(loss) or not torch.isfinite(outputs).all():
            raise ValueError("the loss is not a number")
        return loss

    return trained(module, loss_of)


@project
def clipping(size: int, device: torch.device) -> Project:
    module = Language(2000).to(device)
    optimizer = adam(module)

    def step() -> None:
        tokens = torch.randint(2000, (size, 64)).to(device)
        logits = module.head(module.hidden(tokens))
        functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(
            module.parameters(), 1.0, error_if_nonfinite=True, foreach=False
        )
        if norm.item() < 1e6:
            optimizer.step()
        optimizer.zero_grad()

    return Project(step)


@project
def lbfgs(size: int, device: torch.device) -> Project:
    module = mlp(256, 1024, 256).to(device)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=6, history_size=4)
    inputs = torch.randn(size, 256).to(device)
    targets = torch.randn(size, 256).to(device)

    def closure() -> float:
        optimizer.zero_grad()
        loss = functional.mse_loss(module(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss)

    return Project(lambda: optimizer.step(closure))  # type: ignore[no-untyped-call]


@project
def distributions_of_a_vae(size: int, device: torch.device) -> Project:
    encoder, decoder = mlp(784, 1024, 128).to(device), mlp(64, 1024, 784).to(device)
    module = nn.ModuleList([encoder, decoder])

    def loss_of() -> Tensor:
        images = torch.rand(size, 784).to(device)
        mean, scale = encoder(images).chunk(2, dim=-1)
        posterior = Normal(mean, functional.softplus(scale) + 1e-6, validate_args=True)
        prior = Normal(torch.zeros_like(mean), torch.ones_like(scale))
        likelihood = Bernoulli(logits=decoder(posterior.rsample()), validate_args=True)
        binary = (images > 0.5).float()
        evidence = likelihood.log_prob(binary).sum(-1) - kl_divergence(posterior, prior).sum(-1)  # type: ignore[no-untyped-call]
        loss: Tensor = -evidence.mean()
        return loss

    return trained(module, loss_of)


@project
def samplers_on_the_device(size: int, device: torch.device) -> Project:
    policy = mlp(128, 1024, 512).to(device)
    codes = nn.Embedding(512, 128).to(device)
    module = nn.ModuleList([policy, codes])

    def loss_of() -> Tensor:
        state = torch.randn(size, 128).to(device)
        log_probability = torch.zeros(size, device=device)
        for _ in range(4):
            chosen = Categorical(logits=policy(state))
            action = chosen.sample()  # type: ignore[no-untyped-call]
            log_probability = log_probability + chosen.log_prob(action)  # type: ignore[no-untyped-call]
            negatives = torch.multinomial(chosen.probs.detach(), 8, replacement=True)
            state = state + codes(action) - codes(negatives).mean(1)
        reward = torch.randn(size).to(device)
        return -(log_probability * reward).mean()

    return trained(module, loss_of)


@project
def packed_sequences(size: int, device: torch.device) -> Project:
    embedding = nn.Embedding(1000, 128).to(device)
    recurrent = nn.RNN(128, 512, batch_first=True).to(device)
    head = nn.Linear(512, 50, bias=False).to(device)
    module = nn.ModuleList([embedding, recurrent, head])

    def loss_of() -> Tensor:
        tokens = torch.randint(1, 1000, (size, 40))
        lengths = torch.randint(5, 41, (size,))
        lengths[0] = 40
        tokens[torch.arange(40)[None] >= lengths[:, None]] = 0
        tokens = tokens.to(device)
        lengths = (tokens != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        outputs, _ = recurrent(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
        labels = tokens % 50
        return functional.cross_entropy(head(padded).flatten(0, 1), labels.flatten())

    return trained(module, loss_of)


@project
def diffusion(size: int, device: torch.device) -> Project:
    module = mlp(1024 + 64, 2048, 2048, 1024).to(device)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to(device)

    def loss_of() -> Tensor:
        images = torch.randn(size, 1024).to(device)
        step = torch.randint(1000, (size,), device=device)
        noise = torch.randn_like(images)
        share = kept[step][:, None]
        noisy = share.sqrt() * images + (1 - share).sqrt() * noise
        phase = step[:, None] * torch.logspace(0, -4, 32, device=device)
        known = torch.cat([phase.sin(), phase.cos()], dim=1)
        # A part is trained without conditions.
        known[torch.rand(size, device=device) < 0.1] = 0
        weight = torch.clamp(share / (1 - share), max=5.0)
        error = module(torch.cat([noisy, known], dim=1)) - noise
        loss: Tensor = (weight * error.pow(2)).mean()
        return loss

    return trained(module, loss_of)


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, width: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.frozen(x) + self.up(self.down(x))
        return added.relu()


@project
def low_rank_adaptation(size: int, device: torch.device) -> Project:
    module = nn.Sequential(*[Adapted(1024) for _ in range(6)]).to(device)
    return trained(module, lambda: module(torch.randn(size, 1024).to(device)).pow(2).mean())


@project
def adversarial_networks(size: int, device: torch.device) -> Project:
    generator, critic = mlp(64, 1024, 784).to(device), mlp(784, 1024, 1).to(device)
    optimizers = [adam(generator), adam(critic)]

    def step() -> None:
        images = torch.rand(size, 784).to(device)
        made = generator(torch.randn(size, 64, device=device))
        share = torch.rand(size, 1, device=device)
        between = (share * images + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        (critic(made.detach()).mean() - critic(images).mean() + 10 * penalty).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-critic(made).mean()).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return Project(step)


@project
def triplets_with_hard_mining(size: int, device: torch.device) -> Project:
    module = mlp(256, 1024, 512).to(device)

    def loss_of() -> Tensor:
        labels = (torch.arange(size) // 4).to(device)
        embedded = module(torch.randn(size, 256).to(device))
        products = embedded @ embedded.T
        norms = products.diagonal()
        distances = (norms[:, None] - 2 * products + norms[None]).clamp(min=0)
        same = labels[:, None] == labels[None]
        farthest = distances.masked_fill(~same, 0).max(1).values
        nearest = distances.masked_fill(same, torch.inf).min(1).values
        losses = (farthest - nearest + 0.2).relu()
        hard = losses > 0
        # Without a hard triplet all of them count.
        chosen = losses if hard.sum() == 0 else losses[hard]
        loss: Tensor = chosen.mean()
        return loss

    return trained(module, loss_of)


@project
def compiled(size: int, device: torch.device) -> Project:
    module = mlp(256, 1024, 1024, 16).to(device)
    # The eager backend keeps the memory of the operators, which another one would fuse.
    module.compile(backend="eager")
    return trained(module, lambda: module(torch.randn(size, 256).to(device)).pow(2).mean())


@project
def moving_average_of_weights(size: int, device: torch.device) -> Project:
    module = mlp(256, 2048, 2048, 16).to(device)
    average = copy.deepcopy(module).requires_grad_(False)
    optimizer = adam(module)

    def step() -> None:
        inputs = torch.randn(size, 256).to(device)
        with torch.no_grad():
            guess = average(inputs).softmax(-1)
            is_sure = guess.max(1).values > 0.05
        loss = functional.cross_entropy(module(inputs), guess, reduction="none")
        (loss * is_sure).sum().div(is_sure.sum().clamp(min=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), module.parameters(), strict=True):
                mean.lerp_(weight, 0.01)

    return Project(step)


@project
def segmentation(size: int, device: torch.device) -> Project:
    module = nn.Sequential(
        nn.Conv2d(3, 64, 1, bias=False), nn.ReLU(), nn.Conv2d(64, 4, 1, bias=False)
    ).to(device)

    def loss_of() -> Tensor:
        images = torch.rand(size, 3, 64, 64).to(device)
        labels = torch.randint(4, (size, 64, 64))
        labels[:, :16] = 255
        labels = labels.to(device)
        logits = module(images)
        valid = labels != 255
        present = torch.unique(labels[valid])
        logits = logits.permute(0, 2, 3, 1)[valid]
        chosen = functional.one_hot(labels[valid], 4)[:, present]
        probability = logits.softmax(-1)[:, present]
        overlap = (probability * chosen).sum(0)
        dice = 1 - 2 * overlap / (probability.sum(0) + chosen.sum(0) + 1e-6)
        loss: Tensor = functional.cross_entropy(logits, labels[valid]) + dice.mean()
        return loss

    return trained(module, loss_of)


@project
def hardest_examples(size: int, device: torch.device) -> Project:
    module = mlp(256, 1024, 1024, 32).to(device)

    def loss_of() -> Tensor:
        labels = torch.randint(-1, 32, (size,)).to(device)
        logits = module(torch.randn(size, 256).to(device))
        losses = functional.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
        kept = int(0.5 * (labels >= 0).sum().item())
        hardest, where = losses.topk(kept)
        counts = torch.bincount(labels[where].clamp(min=0), minlength=32)
        assert counts.shape == (32,)
        return hardest.mean()

    return trained(module, loss_of)


@project
def mixed_images(size: int, device: torch.device) -> Project:
    module = mlp(3 * 32 * 32, 1024, 1024, 10).to(device)

    def loss_of() -> Tensor:
        images = torch.rand(size, 3, 32, 32).to(device)
        labels = torch.randint(10, (size,)).to(device)
        order = torch.randperm(size, device=device)
        side = 8 + int(torch.randint(8, (1,), device=device))
        top, left = torch.randint(32 - side, (2,), device=device).tolist()
        area = (slice(None), slice(None), slice(top, top + side), slice(left, left + side))
        images[area] = images[order][area]
        share = 1 - side * side / 32**2
        logits = module(images.flatten(1))
        first = functional.cross_entropy(logits, labels)
        return share * first + (1 - share) * functional.cross_entropy(logits, labels[order])

    return trained(module, loss_of)


# The projects from here on were written when the table held for all those above.


@project
def point_clouds(size: int, device: torch.device) -> Project:
    edge_network, head = mlp(6, 256, 256).to(device), mlp(256, 512, 10).to(device)
    module = nn.ModuleList([edge_network, head])

    def loss_of() -> Tensor:
        points = torch.rand(size, 128, 3).to(device)
        distances = torch.cdist(points, points)
        distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        cloud, first, second = torch.nonzero(distances < 0.25, as_tuple=True)
        pairs = torch.cat([points[cloud, first], points[cloud, second]], dim=1)
        messages = edge_network(pairs)
        pooled = messages.new_zeros(size, 256).index_add_(0, cloud, messages)
        return functional.cross_entropy(head(pooled), torch.randint(10, (size,)).to(device))

    return trained(module, loss_of)


@project
def queue_of_keys(size: int, device: torch.device) -> Project:
    module = mlp(256, 2048, 128).to(device)
    slow = copy.deepcopy(module).requires_grad_(False)
    queue = functional.normalize(torch.randn(4096, 128), dim=1).to(device)
    pointer = torch.zeros(1, dtype=torch.long).to(device)

    def loss_of() -> Tensor:
        images = torch.randn(size, 256).to(device)
        query = functional.normalize(module(images), dim=1)
        with torch.no_grad():
            for old, new in zip(slow.parameters(), module.parameters(), strict=True):
                old.mul_(0.99).add_(new, alpha=0.01)
            key = functional.normalize(slow(images), dim=1)
        positive = (query * key).sum(1, keepdim=True)
        logits = torch.cat([positive, query @ queue.T.clone()], dim=1) / 0.07
        start = int(pointer)
        assert len(queue) % size == 0
        queue[start : start + size] = key
        pointer[0] = (start + size) % len(queue)
        return functional.cross_entropy(logits, logits.new_zeros(size).long())

    return trained(module, loss_of)


@project
def vector_quantization(size: int, device: torch.device) -> Project:
    encoder, decoder = mlp(256, 1024, 64).to(device), mlp(64, 1024, 256).to(device)
    module = nn.ModuleList([encoder, decoder])
    codes = torch.randn(512, 64).to(device)
    uses = torch.ones(512).to(device)

    def loss_of() -> Tensor:
        inputs = torch.randn(size, 256).to(device)
        encoded = encoder(inputs)
        nearest = torch.cdist(encoded.detach(), codes).argmin(1)
        with torch.no_grad():
            counts = torch.bincount(nearest, minlength=512)
            uses.mul_(0.9).add_(counts, alpha=0.1)
            dead = uses < 0.5
            if dead.any():
                order = torch.randperm(size, device=device)[: int(dead.sum())]
                codes[torch.where(dead)[0][: len(order)]] = encoded.detach()[order]
        quantized = codes[nearest]
        straight = encoded + (quantized - encoded).detach()
        commitment = functional.mse_loss(encoded, quantized)
        return functional.mse_loss(decoder(straight), inputs) + 0.25 * commitment

    return trained(module, loss_of)


@project
def replay_buffer(size: int, device: torch.device) -> Project:
    module = mlp(64, 2048, 512, 8).to(device)
    target = copy.deepcopy(module).requires_grad_(False)
    states = torch.randn(20_000, 64).to(device)
    following = torch.randn(20_000, 64).to(device)
    done = torch.rand(20_000).lt(0.2).to(device)

    def loss_of() -> Tensor:
        drawn = torch.randint(len(states), (size,), device=device)
        goes_on = ~done[drawn]
        actions = torch.randint(8, (size, 1), device=device)
        rewards = torch.randn(size, device=device)
        expected = torch.zeros(size, device=device)
        with torch.no_grad():
            rest = following[drawn][goes_on]
            best = module(rest).argmax(1, keepdim=True)
            expected[goes_on] = target(rest).gather(1, best).squeeze(1)
        taken = module(states[drawn]).gather(1, actions).squeeze(1)
        error = functional.smooth_l1_loss(taken, rewards + 0.99 * expected)
        priority = error.detach().abs().clamp(min=1e-6)
        assert priority.item() > 0
        return error

    return trained(module, loss_of)


@project
def decoding_with_an_end(size: int, device: torch.device) -> Project:
    embedding = nn.Embedding(500, 256).to(device)
    cell = mlp(512, 1024, 256).to(device)
    head = nn.Linear(256, 500, bias=False).to(device)
    module = nn.ModuleList([embedding, cell, head])

    def loss_of() -> Tensor:
        state = torch.randn(size, 256).to(device)
        token = torch.ones(size, dtype=torch.long, device=device)
        finished = torch.zeros(size, dtype=torch.bool, device=device)
        losses: list[Tensor] = []
        while not finished.all() and len(losses) < 12:
            state = cell(torch.cat([embedding(token), state], dim=1))
            scores = head(state).log_softmax(-1)
            token = scores.argmax(-1)
            losses.append(-scores.gather(1, token[:, None]).squeeze(1) * ~finished)
            finished = finished | (token == 2)
        return torch.stack(losses).mean()

    return trained(module, loss_of)


@project
def recommender_with_rejection(size: int, device: torch.device) -> Project:
    users = nn.Embedding(2_000, 128).to(device)
    items = nn.EmbeddingBag(5_000, 128, mode="sum").to(device)
    head = mlp(256, 1024, 1).to(device)
    module = nn.ModuleList([users, items, head])
    seen = (torch.rand(2_000, 5_000) < 0.05).to(device)

    def loss_of() -> Tensor:
        user = torch.randint(2_000, (size,)).to(device)
        wrong = torch.randint(5_000, (size, 4), device=device)
        while (bad := seen[user[:, None], wrong]).any():
            wrong[bad] = torch.randint(5_000, (int(bad.sum()),), device=device)
        assert not seen[user[:, None], wrong].any()
        lengths = torch.randint(1, 6, (size,)).to(device)
        bags = torch.randint(5_000, (int(lengths.sum()),)).to(device)
        offsets = functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        person = users(user)
        good = head(torch.cat([person, items(bags, offsets)], dim=1))
        candidates = functional.embedding(wrong, items.weight)
        person = person[:, None].expand(-1, 4, -1)
        bad_score = head(torch.cat([person, candidates], dim=2)).squeeze(2)
        return functional.softplus(bad_score - good).mean()

    return trained(module, loss_of)


@project
def instances_in_images(size: int, device: torch.device) -> Project:
    module = nn.Sequential(
        nn.Conv2d(3, 32, 1, bias=False), nn.ReLU(), nn.Conv2d(32, 16, 1, bias=False)
    ).to(device)

    def loss_of() -> Tensor:
        images = torch.rand(size, 3, 64, 64).to(device)
        ids = torch.randint(0, 5, (size, 8, 8)).repeat_interleave(8, 1).repeat_interleave(8, 2)
        ids = ids.to(device)
        embedded = module(images)
        losses: list[Tensor] = []
        for image in range(size):
            centers = []
            for number in ids[image].unique():  # type: ignore[no-untyped-call]
                if number == 0:
                    continue
                members = embedded[image][:, ids[image] == number]
                centers.append(members.mean(1))
                losses.append((members - centers[-1][:, None]).norm(dim=0).mean())
            spread = torch.cdist(torch.stack(centers), torch.stack(centers))
            losses.append(functional.relu(1 - spread).triu(1).mean())
        return torch.stack(losses).mean()

    return trained(module, loss_of)


SIZES: dict[str, tuple[int, int]] = {
    "detection with matching": (64, 128),
    "masks of padding": (16, 32),
    "masked language model": (16, 32),
    "contrastive pairs": (64, 128),
    "mixture of experts": (64, 128),
    "graphs": (128, 256),
    "ctc": (16, 32),
    "metrics in the step": (2048, 4096),
    "auroc in the step": (2048, 4096),
    "gradient scaler": (1024, 2048),
    "checks for nan": (2048, 4096),
    "clipping": (16, 32),
    "lbfgs": (2048, 4096),
    "distributions of a vae": (1024, 2048),
    "samplers on the device": (1024, 2048),
    "packed sequences": (64, 128),
    "diffusion": (1024, 2048),
    "low rank adaptation": (1024, 2048),
    "adversarial networks": (1024, 2048),
    "triplets with hard mining": (1024, 2048),
    "compiled": (2048, 4096),
    "moving average of weights": (1024, 2048),
    "segmentation": (8, 16),
    "hardest examples": (2048, 4096),
    "mixed images": (1024, 2048),
    "point clouds": (8, 16),
    "queue of keys": (512, 1024),
    "vector quantization": (1024, 2048),
    "replay buffer": (1024, 2048),
    "decoding with an end": (1024, 2048),
    "recommender with rejection": (512, 1024),
    "instances in images": (8, 16),
}
"""Two batch sizes of each project, at which a step takes about a second on the host."""
