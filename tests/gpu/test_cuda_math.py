"""Fourier transforms, linear algebra and sparse products on the stub: shapes, and work areas."""

import ctypes

import pytest
import torch
from torch.distributions import MultivariateNormal

from lightning_batchmem.simulated_gpu.known import mark_unknown
from lightning_batchmem.simulated_gpu.values import Values
from tests.helpers.cuda_stub import is_cuda_stub

pytestmark = pytest.mark.skipif(not is_cuda_stub(), reason="kernels have results on a real device")

# Of cudaDataType in library_types.h.
FLOAT32, COMPLEX64 = 0, 4


@pytest.fixture
def values():
    values = Values()
    values.enter()
    yield values
    values.exit()


@pytest.fixture(params=(1, 255))
def stale(request):
    """Fill memory that is free, so that whatever torch reads of a kernel's result is garbage."""
    for size, count in ((2**20, 8), (2**25, 2)):
        blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        for block in blocks:
            ctypes.memset(block.data_ptr(), request.param, size)


def positive(a):
    return a @ a.mH + a.shape[-1] * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def normal(a):
    return MultivariateNormal(a[..., 0], positive(a)).log_prob(a[..., 1])


def sparse(a):
    eye = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    places = torch.arange(a.shape[-2], device=a.device).expand(2, -1)
    made = torch.sparse_coo_tensor(places, torch.ones_like(a[..., 0]).flatten()[: len(eye)])
    matrix = a.flatten(0, -3)[0] if a.dim() > 2 else a
    return eye.to_sparse_csr() @ matrix, eye.to_sparse() @ matrix, torch.sparse.mm(made, matrix)


linalg, fft = torch.linalg, torch.fft
REAL = {
    "normal": normal,
    "rfft": fft.rfft,
    "irfft": lambda a: fft.irfft(fft.rfft(a)),
    "irfft2": lambda a: fft.irfft2(fft.rfft2(a)),
    "a prime length": lambda a: fft.rfft(a, n=131),
}
FUNCTIONS = {
    "inv": linalg.inv,
    "det": linalg.det,
    "slogdet": linalg.slogdet,
    "solve": lambda a: linalg.solve(a, a[..., :2]),
    "cholesky": lambda a: linalg.cholesky(positive(a)),
    "cholesky_solve": lambda a: torch.cholesky_solve(a, linalg.cholesky(positive(a))),
    "eigh": lambda a: linalg.eigh(positive(a)),
    "eig": lambda a: linalg.eig(a.detach()),
    "svd": lambda a: linalg.svd(a, full_matrices=False),
    "svdvals": linalg.svdvals,
    "qr": linalg.qr,
    "lstsq": lambda a: linalg.lstsq(a, a[..., :2])[0],
    "pinv": linalg.pinv,
    "lu_factor": lambda a: linalg.lu_factor(a)[0],
    "lu": lambda a: linalg.lu(a),
    "ldl": lambda a: linalg.ldl_solve(*linalg.ldl_factor(positive(a.detach())), a.detach()),
    "matrix_exp": linalg.matrix_exp,
    "solve_triangular": lambda a: linalg.solve_triangular(a.tril(), a, upper=False),
    "ormqr": lambda a: torch.ormqr(*torch.geqrf(a.detach()), a),
    "fft": fft.fft,
    "ifft2": fft.ifft2,
    "sparse": sparse,
    **REAL,
}


def shapes(function, shape, dtype, device):
    """Of the results, and of the gradient."""
    matrix = torch.randn(shape, dtype=dtype, device=device)
    if device == "cuda":
        mark_unknown(matrix)
    matrix.requires_grad_()
    result = function(matrix)
    made = result if isinstance(result, tuple) else (result,)
    losses = [each.abs().square().sum() for each in made if each.requires_grad]
    if losses:
        sum(losses).backward()
    return [each.shape for each in made], matrix.grad is not None


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(3, 3), (5, 32, 32), (3, 600, 600)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_shapes_are_those_of_the_host(name, shape, dtype, stale, values):
    if dtype.is_complex and name in REAL:
        return
    on_device = shapes(FUNCTIONS[name], shape, dtype, "cuda")
    # Torch chooses other functions for larger matrices; the host would take long for them.
    smaller = (*shape[:-2], 40, 40) if shape[-1] > 40 else shape
    on_host = shapes(FUNCTIONS[name], smaller, dtype, "cpu")
    if smaller == shape:
        assert on_device == on_host
    assert on_device[1] == on_host[1]
    assert values.assumptions == []


def test_results_of_known_matrices_are_computed(values):
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]], device="cuda")
    assert torch.linalg.det(matrix).item() == pytest.approx(5)
    assert torch.linalg.eigvalsh(matrix).sum().item() == pytest.approx(5)
    assert torch.fft.fft(matrix[0])[0].real.item() == pytest.approx(3)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(2, 2, device="cuda"))


def work_area(*lengths, types=(COMPLEX64, COMPLEX64), batch=1):
    """Bytes of cuFFT's work area."""
    numbers = (ctypes.c_longlong * len(lengths))(*lengths)
    found = ctypes.c_size_t()
    zero, none = ctypes.c_longlong(0), None
    of_input = (none, zero, zero, types[0])
    of_output = (none, zero, zero, types[1])
    many = ctypes.c_longlong(batch)
    plan = (0, len(lengths), numbers, *of_input, *of_output, many, ctypes.byref(found), COMPLEX64)
    assert ctypes.CDLL(None).cufftXtMakePlanMany(*plan) == 0
    return found.value


def test_work_areas_of_transforms():
    # What arrayfire reported for 100 x 100 to 100 x 1,500 (arrayfire/arrayfire#1443).
    for columns in range(100, 1600, 100):
        assert work_area(100, columns) == 8 * 100 * columns
    assert work_area(400, types=(FLOAT32, COMPLEX64), batch=7) == 8 * 201 * 7
    # Up to 127 a prime number has a kernel of its own; above, rows are padded to a power of two.
    assert work_area(127) == 8 * 127
    assert work_area(131) == 8 * 2 * 512
    worst = max(work_area(length) / (8 * length) for length in range(1, 3000))
    assert 7 < worst < 8
