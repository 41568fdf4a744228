// Fourier transforms and linear algebra: the functions of cuFFT, cuSOLVER, cuSPARSE, and the batched
// ones of cuBLAS, that PyTorch calls. They compute nothing, take no time, and succeed. Two things of
// them are modelled: how many bytes of work area they ask for, which PyTorch then allocates, and what
// it reads of their results: that nothing failed, and which rows were exchanged.
//
// The libraries themselves size a work area with a device only, and their documentation has no
// formulas, so that the sizes here are bounds. Each has its source, and a plan names large ones.
//
// Part of lightning-batchmem, under the Apache License 2.0 (LICENSE).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Adds a sentence to the plan.
extern "C" void cuda_stub_assume(const char* sentence);

namespace {

// All their types of status have 0 for success.
const int SUCCESS = 0;

// The bytes of a number, by cudaDataType in library_types.h.
size_t bytes_of(int type) {
  const int float64 = 1, float16 = 2, complex64 = 4, complex128 = 5, bfloat16 = 14;
  switch (type) {
    case float16:
    case bfloat16: return 2;
    case float64:
    case complex64: return 8;
    case complex128: return 16;
    default: return 4;
  }
}

// No matrix of the batch was singular.
int succeed(int* infos, int64_t count = 1) {
  if (infos)
    std::fill_n(infos, count, 0);
  return SUCCESS;
}

// Rows that stay where they are, which LAPACK counts from 1.
void exchange_nothing(int* rows, int64_t matrices, int64_t count) {
  if (!rows)
    return;
  for (int64_t i = 0; i < matrices * count; ++i)
    rows[i] = int(i % count) + 1;
}

void name_if_large(size_t bytes, const char* sentence) {
  if (bytes >= 1 << 20)
    cuda_stub_assume(sentence);
}

const char* const OF_SOLVER =
    "the work area of cuSOLVER is assumed to be one to five copies of its matrices";

// The type of the numbers is not known here: the smallest one is taken for the bytes.
int ask_for(int* numbers, int64_t count) {
  name_if_large(size_t(count) * 4, OF_SOLVER);
  *numbers = int(std::min<int64_t>(std::max<int64_t>(count, 1), INT32_MAX));
  return SUCCESS;
}

int ask_for(size_t* on_device, size_t* on_host, int64_t count, int type) {
  *on_device = size_t(std::max<int64_t>(count, 1)) * bytes_of(type);
  *on_host = 0;
  name_if_large(*on_device, OF_SOLVER);
  return SUCCESS;
}

struct Sparse {
  int64_t elements;
};

// The documentation of cuSPARSE has no bound. A copy of the elements and their places is taken.
int ask_for(size_t* bytes, const Sparse* matrix) {
  *bytes = size_t(matrix->elements) * 24;
  name_if_large(*bytes, "the work area of cuSPARSE is assumed to be a copy of its matrix");
  return SUCCESS;
}

// An LU, Cholesky or QR factorization, and a product with its result: numbers of work area. LAPACK
// needs a panel of 32 to 64 columns for QR, and nothing for the others
// (https://netlib.org/lapack/explore-html, dgeqrf, dormqr). Taken is a copy of the matrix, with a
// panel of 64 columns where the matrix is smaller.
int64_t factorization(int64_t m, int64_t n) {
  return std::max<int64_t>(m, 1) * std::max<int64_t>(n, 64);
}

// Eigenvalues and eigenvectors of a symmetric matrix by divide and conquer: LAPACK's dsyevd
// (https://netlib.org/lapack/explore-html, LWORK of dsyevd with JOBZ = 'V').
int64_t symmetric_eigen(int64_t n) {
  return 1 + 6 * n + 2 * n * n;
}

// The same of a batch, by Jacobi's method. Reported for cuSOLVER 11.4 (cheevjBatched, CUDA 11.8):
// 2,077 numbers for one matrix of 4 x 4 and 1,049 for each other one, 1,033 for one of 2 x 2. These
// are 1,028 + batch * (1,024 + (n + 1)^2): each matrix takes that of 32 x 32, the largest for which
// the kernel is made (https://github.com/cupy/cupy/issues/7261). Larger ones are taken as by divide
// and conquer, if that is more.
int64_t batched_eigen(int64_t n, int64_t batch) {
  int64_t of_one = std::max<int64_t>(1024, n * n) + (n + 1) * (n + 1);
  return 1028 + batch * std::max(of_one, symmetric_eigen(n));
}

// Eigenvalues of a general matrix: LAPACK's dgeev needs 4 * n numbers, and works best with the
// blocks of dgehrd (n * 64). Taken is a copy of the matrix besides, because the matrix is
// overwritten on a device too.
int64_t general_eigen(int64_t n) {
  return n * n + 68 * n;
}

// Singular values: LAPACK's dgesdd needs 4 * k^2 + 7 * k numbers with k = min(m, n) (JOBZ = 'S'),
// and a copy of the matrix is taken besides.
int64_t singular_values(int64_t m, int64_t n) {
  int64_t k = std::min(m, n);
  return m * n + 4 * k * k + 7 * k;
}

bool has_factors_up_to(int64_t length, int64_t largest) {
  for (int64_t factor = 2; factor <= largest; ++factor)
    while (length % factor == 0)
      length /= factor;
  return length == 1;
}

// How often the work area of a transform has the numbers of its data. A mixed-radix transform takes
// one copy, the least that cuFFT's documentation names. 15 sizes of 100 x 100 to 100 x 1,500 had
// exactly that (https://github.com/arrayfire/arrayfire/issues/1443). A length with a prime factor
// above 127 is transformed by Bluestein's algorithm (https://docs.nvidia.com/cuda/cufft, "Accuracy
// and Performance"), which pads each row to a power of two that is at least twice as long, and needs
// a second copy of that: less than 8 times the data, the most that its documentation named (up to
// CUDA 10: "in the worst case, 8 * batch * n[0] * ... * n[rank-1]").
double copies(int64_t length) {
  if (has_factors_up_to(length, 127))
    return 1;
  int64_t padded = 1;
  while (padded < 2 * length - 1)
    padded *= 2;
  return 2.0 * double(padded) / double(length);
}

}  // namespace

// The caller clears its arguments away, so that a function need not declare them (System V ABI).
#define DOES_NOTHING(name) \
  int name() {             \
    return SUCCESS;        \
  }
// It does not look into what it makes, which is freed by a function that does nothing.
#define MAKES(name)                           \
  int name(void** made) {                     \
    static char any;                          \
    *made = &any;                             \
    return SUCCESS;                           \
  }

extern "C" {

// cuFFT.

int cufftCreate(int* plan) {
  *plan = 0;
  return SUCCESS;
}

int cufftXtMakePlanMany(int, int rank, long long* lengths, long long*, long long, long long,
                        int input, long long*, long long, long long, int output, long long batch,
                        size_t* bytes, int) {
  double numbers = double(batch), most_copies = 1;
  for (int i = 0; i < rank; ++i) {
    // A real transform of an even length is a complex one of half the length.
    bool is_halved = i == rank - 1 && input != output && lengths[i] % 2 == 0;
    numbers *= double(is_halved ? lengths[i] / 2 + 1 : lengths[i]);
    most_copies = std::max(most_copies, copies(lengths[i]));
  }
  *bytes = size_t(numbers * most_copies) * std::max(bytes_of(input), bytes_of(output));
  name_if_large(*bytes,
                "the work area of cuFFT is assumed to be a copy of what it transforms, and up to 8"
                " copies where a length has a prime factor above 127");
  return SUCCESS;
}

DOES_NOTHING(cufftDestroy)
DOES_NOTHING(cufftSetAutoAllocation)
DOES_NOTHING(cufftSetStream)
DOES_NOTHING(cufftSetWorkArea)
DOES_NOTHING(cufftXtExec)

// cuSOLVER.

MAKES(cusolverDnCreate)
MAKES(cusolverDnCreateParams)
MAKES(cusolverDnCreateGesvdjInfo)
MAKES(cusolverDnCreateSyevjInfo)
DOES_NOTHING(cusolverDnDestroy)
DOES_NOTHING(cusolverDnDestroyParams)
DOES_NOTHING(cusolverDnDestroyGesvdjInfo)
DOES_NOTHING(cusolverDnDestroySyevjInfo)
DOES_NOTHING(cusolverDnSetStream)
DOES_NOTHING(cusolverDnXgesvdjSetMaxSweeps)
DOES_NOTHING(cusolverDnXgesvdjSetSortEig)
DOES_NOTHING(cusolverDnXgesvdjSetTolerance)
DOES_NOTHING(cusolverDnXsyevjSetMaxSweeps)
DOES_NOTHING(cusolverDnXsyevjSetSortEig)
DOES_NOTHING(cusolverDnXsyevjSetTolerance)

// Those of a type of numbers, and of its words for an orthogonal and a symmetric matrix.
#define SOLVER(T, orthogonal, symmetric)                                                          \
  int cusolverDn##T##getrf_bufferSize(void*, int m, int n, void*, int, int* work) {               \
    return ask_for(work, factorization(m, n));                                                    \
  }                                                                                               \
  int cusolverDn##T##getrf(void*, int m, int n, void*, int, void*, int* rows, int* info) {        \
    exchange_nothing(rows, 1, std::min(m, n));                                                    \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##getrs(void*, int, int, int, void*, int, void*, void*, int, int* info) {      \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##potrf_bufferSize(void*, int, int n, void*, int, int* work) {                 \
    return ask_for(work, factorization(n, n));                                                    \
  }                                                                                               \
  int cusolverDn##T##potrf(void*, int, int, void*, int, void*, int, int* info) {                  \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##potrs(void*, int, int, int, void*, int, void*, int, int* info) {             \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##potrfBatched(void*, int, int, void*, int, int* infos, int batch) {           \
    return succeed(infos, batch);                                                                 \
  }                                                                                               \
  int cusolverDn##T##potrsBatched(void*, int, int, int, void*, int, void*, int, int* info, int) { \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##geqrf_bufferSize(void*, int m, int n, void*, int, int* work) {               \
    return ask_for(work, factorization(m, n));                                                    \
  }                                                                                               \
  int cusolverDn##T##geqrf(void*, int, int, void*, int, void*, void*, int, int* info) {           \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##orthogonal##gqr_bufferSize(void*, int m, int n, int, void*, int, void*,      \
                                                int* work) {                                      \
    return ask_for(work, factorization(m, n));                                                    \
  }                                                                                               \
  int cusolverDn##T##orthogonal##gqr(void*, int, int, int, void*, int, void*, void*, int,         \
                                     int* info) {                                                 \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##orthogonal##mqr_bufferSize(void*, int, int, int m, int n, int, void*, int,   \
                                                void*, void*, int, int* work) {                   \
    return ask_for(work, factorization(m, n));                                                    \
  }                                                                                               \
  int cusolverDn##T##orthogonal##mqr(void*, int, int, int, int, int, void*, int, void*, void*,    \
                                     int, void*, int, int* info) {                                \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##sytrf_bufferSize(void*, int n, void*, int, int* work) {                      \
    return ask_for(work, factorization(n, n));                                                    \
  }                                                                                               \
  int cusolverDn##T##sytrf(void*, int, int n, void*, int, int* rows, void*, int, int* info) {     \
    exchange_nothing(rows, 1, n);                                                                 \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##symmetric##evd_bufferSize(void*, int, int, int n, void*, int, void*,         \
                                               int* work) {                                       \
    return ask_for(work, symmetric_eigen(n));                                                     \
  }                                                                                               \
  int cusolverDn##T##symmetric##evd(void*, int, int, int, void*, int, void*, void*, int,          \
                                    int* info) {                                                  \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##symmetric##evj_bufferSize(void*, int, int, int n, void*, int, void*,         \
                                               int* work, void*) {                                \
    return ask_for(work, batched_eigen(n, 1));                                                    \
  }                                                                                               \
  int cusolverDn##T##symmetric##evj(void*, int, int, int, void*, int, void*, void*, int,          \
                                    int* info, void*) {                                           \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##symmetric##evjBatched_bufferSize(void*, int, int, int n, void*, int, void*,  \
                                                      int* work, void*, int batch) {              \
    return ask_for(work, batched_eigen(n, batch));                                                \
  }                                                                                               \
  int cusolverDn##T##symmetric##evjBatched(void*, int, int, int, void*, int, void*, void*, int,   \
                                           int* infos, void*, int batch) {                        \
    return succeed(infos, batch);                                                                 \
  }                                                                                               \
  int cusolverDn##T##gesvd_bufferSize(void*, int m, int n, int* work) {                           \
    return ask_for(work, singular_values(m, n));                                                  \
  }                                                                                               \
  int cusolverDn##T##gesvd(void*, signed char, signed char, int, int, void*, int, void*, void*,   \
                           int, void*, int, void*, int, void*, int* info) {                       \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##gesvdj_bufferSize(void*, int, int, int m, int n, void*, int, void*, void*,   \
                                       int, void*, int, int* work, void*) {                       \
    return ask_for(work, singular_values(m, n));                                                  \
  }                                                                                               \
  int cusolverDn##T##gesvdj(void*, int, int, int, int, void*, int, void*, void*, int, void*, int, \
                            void*, int, int* info, void*) {                                       \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cusolverDn##T##gesvdjBatched_bufferSize(void*, int, int m, int n, void*, int, void*, void*, \
                                              int, void*, int, int* work, void*, int batch) {     \
    return ask_for(work, batch * singular_values(m, n));                                          \
  }                                                                                               \
  int cusolverDn##T##gesvdjBatched(void*, int, int, int, void*, int, void*, void*, int, void*,    \
                                   int, void*, int, int* infos, void*, int batch) {               \
    return succeed(infos, batch);                                                                 \
  }                                                                                               \
  int cusolverDn##T##gesvdaStridedBatched_bufferSize(                                             \
      void*, int, int, int m, int n, void*, int, long long, void*, long long, void*, int,         \
      long long, void*, int, long long, int* work, int batch) {                                   \
    return ask_for(work, batch * singular_values(m, n));                                          \
  }                                                                                               \
  int cusolverDn##T##gesvdaStridedBatched(                                                        \
      void*, int, int, int, int, void*, int, long long, void*, long long, void*, int, long long,  \
      void*, int, long long, void*, int, int* infos, double*, int batch) {                        \
    return succeed(infos, batch);                                                                 \
  }

SOLVER(S, or, sy)
SOLVER(D, or, sy)
SOLVER(C, un, he)
SOLVER(Z, un, he)

// Those for all types, with numbers of 64 bits.

int cusolverDnXpotrf_bufferSize(void*, void*, int, int64_t n, int type, void*, int64_t, int,
                                size_t* on_device, size_t* on_host) {
  return ask_for(on_device, on_host, factorization(n, n), type);
}

int cusolverDnXpotrf(void*, void*, int, int64_t, int, void*, int64_t, int, void*, size_t, void*,
                     size_t, int* info) {
  return succeed(info);
}

int cusolverDnXpotrs(void*, void*, int, int64_t, int64_t, int, void*, int64_t, int, void*, int64_t,
                     int* info) {
  return succeed(info);
}

int cusolverDnXgeqrf_bufferSize(void*, void*, int64_t m, int64_t n, int type, void*, int64_t, int,
                                void*, int, size_t* on_device, size_t* on_host) {
  return ask_for(on_device, on_host, factorization(m, n), type);
}

int cusolverDnXgeqrf(void*, void*, int64_t, int64_t, int, void*, int64_t, int, void*, int, void*,
                     size_t, void*, size_t, int* info) {
  return succeed(info);
}

int cusolverDnXsyevd_bufferSize(void*, void*, int, int, int64_t n, int type, void*, int64_t, int,
                                void*, int, size_t* on_device, size_t* on_host) {
  return ask_for(on_device, on_host, symmetric_eigen(n), type);
}

int cusolverDnXsyevd(void*, void*, int, int, int64_t, int, void*, int64_t, int, void*, int, void*,
                     size_t, void*, size_t, int* info) {
  return succeed(info);
}

int cusolverDnXsyevBatched_bufferSize(void*, void*, int, int, int64_t n, int type, void*, int64_t,
                                      int, void*, int, size_t* on_device, size_t* on_host,
                                      int64_t batch) {
  return ask_for(on_device, on_host, batched_eigen(n, batch), type);
}

int cusolverDnXsyevBatched(void*, void*, int, int, int64_t, int, void*, int64_t, int, void*, int,
                           void*, size_t, void*, size_t, int* infos, int64_t batch) {
  return succeed(infos, batch);
}

int cusolverDnXgeev_bufferSize(void*, void*, int, int, int64_t n, int type, void*, int64_t, int,
                               void*, int, void*, int64_t, int, void*, int64_t, int,
                               size_t* on_device, size_t* on_host) {
  return ask_for(on_device, on_host, general_eigen(n), type);
}

int cusolverDnXgeev(void*, void*, int, int, int64_t, int, void*, int64_t, int, void*, int, void*,
                    int64_t, int, void*, int64_t, int, void*, size_t, void*, size_t, int* info) {
  return succeed(info);
}

int cusolverDnXsytrs_bufferSize(void*, int, int64_t n, int64_t sides, int type, void*, int64_t,
                                void*, int, void*, int64_t, size_t* on_device, size_t* on_host) {
  return ask_for(on_device, on_host, n * sides, type);
}

int cusolverDnXsytrs(void*, int, int64_t, int64_t, int, void*, int64_t, void*, int, void*, int64_t,
                     void*, size_t, void*, size_t, int* info) {
  return succeed(info);
}

// The batched functions of cuBLAS. They have no work area.

#define BATCHED(T)                                                                                \
  int cublas##T##getrfBatched(void*, int n, void*, int, int* rows, int* infos, int batch) {       \
    exchange_nothing(rows, batch, n);                                                             \
    return succeed(infos, batch);                                                                 \
  }                                                                                               \
  int cublas##T##getrsBatched(void*, int, int, int, void*, int, void*, void*, int, int* info,     \
                              int) {                                                              \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cublas##T##geqrfBatched(void*, int, int, void*, int, void*, int* info, int) {               \
    return succeed(info);                                                                         \
  }                                                                                               \
  int cublas##T##gelsBatched(void*, int, int, int, int, void*, int, void*, int, int* info,        \
                             int* infos, int batch) {                                             \
    succeed(infos, batch);                                                                        \
    return succeed(info);                                                                         \
  }

BATCHED(S)
BATCHED(D)
BATCHED(C)
BATCHED(Z)

// MAGMA, which is a part of PyTorch, calls them for batches of larger matrices.
DOES_NOTHING(cublasSgemmBatched)
DOES_NOTHING(cublasDgemmBatched)
DOES_NOTHING(cublasCgemmBatched)
DOES_NOTHING(cublasZgemmBatched)

// cuSPARSE, for products of a sparse matrix and a dense one.

MAKES(cusparseCreate)
MAKES(cusparseCreateDnMat)
MAKES(cusparseCreateDnVec)
DOES_NOTHING(cusparseDestroy)
DOES_NOTHING(cusparseDestroyDnMat)
DOES_NOTHING(cusparseDestroyDnVec)
DOES_NOTHING(cusparseSetStream)
DOES_NOTHING(cusparseSetPointerMode)
DOES_NOTHING(cusparseCsrSetStridedBatch)
DOES_NOTHING(cusparseDnMatSetStridedBatch)
DOES_NOTHING(cusparseSpMM)
DOES_NOTHING(cusparseSpMV)
DOES_NOTHING(cusparseXcoo2csr)

int cusparseCreateCsr(Sparse** made, int64_t, int64_t, int64_t elements) {
  *made = new Sparse{elements};
  return SUCCESS;
}

int cusparseCreateCoo(Sparse** made, int64_t, int64_t, int64_t elements) {
  *made = new Sparse{elements};
  return SUCCESS;
}

int cusparseDestroySpMat(Sparse* one) {
  delete one;
  return SUCCESS;
}

int cusparseSpMM_bufferSize(void*, int, int, void*, Sparse* matrix, void*, void*, void*, int, int,
                            size_t* bytes) {
  return ask_for(bytes, matrix);
}

int cusparseSpMV_bufferSize(void*, int, void*, Sparse* matrix, void*, void*, void*, int, int,
                            size_t* bytes) {
  return ask_for(bytes, matrix);
}

// Products of two complex vectors.

DOES_NOTHING(cublasCdotc_v2)
DOES_NOTHING(cublasCdotu_v2)
DOES_NOTHING(cublasZdotc_v2)
DOES_NOTHING(cublasZdotu_v2)

}  // extern "C"
