"""A training script with Fourier transforms or linear algebra in its step, for ``simulate``.

python tests/helpers/simulated_math.py CASE

It knows nothing of the simulation, and has no file of this repository.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader

SIZES = (3, 32, 300)


def spectrogram(signal: Tensor) -> Tensor:
    """The log mel spectrogram of a signal; the matrix stands for one with triangles."""
    window = torch.hann_window(400, device=signal.device)
    parts = torch.stft(signal, 400, 160, window=window, return_complex=True)
    mel = torch.rand(80, 201, device=signal.device) @ parts.abs().square()
    # A prime number of samples.
    whole = torch.fft.rfft(signal[..., :15013])
    return mel.clamp(min=1e-6).log().mean(-1) + torch.fft.irfft(whole).mean(-1, keepdim=True)


def solved(matrix: Tensor) -> Tensor:
    """A sum of what many functions make of a batch of matrices."""
    size = matrix.shape[-1]
    positive = matrix @ matrix.mT + size * torch.eye(size, device=matrix.device)
    lower = torch.linalg.cholesky(positive)
    side = matrix[..., :2]
    outs = (
        torch.linalg.inv(matrix),
        torch.linalg.det(matrix),
        torch.linalg.slogdet(positive)[1],
        torch.linalg.solve(matrix, side),
        torch.cholesky_solve(side, lower),
        *torch.linalg.eigh(positive),
        *torch.linalg.svd(matrix, full_matrices=False),
        *torch.linalg.qr(matrix),
        torch.linalg.lstsq(matrix, side)[0],
        torch.linalg.pinv(matrix),
        torch.linalg.lu_factor(matrix)[0],
        torch.linalg.matrix_exp(matrix),
        torch.linalg.solve_triangular(lower, side, upper=False),
        torch.linalg.eigvals(matrix).abs(),
        MultivariateNormal(side[..., 0], positive).log_prob(side[..., 1]),
    )
    return torch.stack([out.flatten(1).mean(1) if out.dim() > 1 else out for out in outs]).sum(0)


class Sound(LightningModule):
    """A classifier of spectrograms of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(80, 10)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(spectrogram(batch)).logsumexp(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Poses(Sound):
    """Matrices of three sizes, each made by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.ModuleList(nn.Linear(80, size * size) for size in SIZES)

    def training_step(self, batch: Tensor) -> Tensor:
        short = batch[:, :80]
        matrices = [
            layer(short).unflatten(-1, (size, size))
            for layer, size in zip(self.sizes, SIZES, strict=True)
        ]
        # The host reads a result.
        if torch.linalg.det(matrices[0][0]) == 0:
            raise ValueError("a determinant is 0")
        return torch.stack([solved(matrix).mean() for matrix in matrices]).sum()


class Graph(Sound):
    """A product of two sparse matrices."""

    def training_step(self, batch: Tensor) -> Tensor:
        eye = torch.eye(8, device=self.device).to_sparse_csr()
        return self.layer(batch[:, :80]).mean() + (eye @ eye).to_dense().mean()


MODELS = {"sound": Sound, "poses": Poses, "graph": Graph}


def main() -> None:
    data = [torch.randn(16000) for _ in range(64)]
    trainer = Trainer(max_epochs=1, accelerator="gpu", logger=False, enable_checkpointing=False)
    trainer.fit(MODELS[sys.argv[1]](), DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
