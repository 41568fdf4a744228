// NCCL for one rank of many, where the other ranks do not exist. Torch's own ProcessGroupNCCL runs on
// it, with its streams, its works and the tensors that they keep. A collective puts no work on its
// stream. Small buffers get at once what an exchange with ranks that hold the same would give; larger
// ones keep what they have, as after any kernel.
//
// A communicator of several ranks takes memory of the device at its first collective, in which NCCL
// connects its channels: CUDA_STUB_NCCL_MIB, and the first one CUDA_STUB_NCCL_FIRST_MIB besides.
//
// Part of lightning-batchmem, under the Apache License 2.0 (LICENSE).

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// As nccl.h has them. Its own types differ between versions in what is not used here.
extern "C" {
typedef int ncclResult_t;
typedef struct ncclComm* ncclComm_t;
struct ncclUniqueId {
  char internal[128];
};

int cudaMalloc(void**, size_t);
int cudaFree(void*);
int cudaGetDevice(int*);
int cudaSetDevice(int);
}

struct ncclComm {
  int ranks;
  int rank;
  int device;
  void* buffers = nullptr;
  size_t bytes = 0;
  bool is_connected = false;
};

namespace {

const ncclResult_t SUCCESS = 0;
const ncclResult_t UNHANDLED_CUDA_ERROR = 1;

// Of ncclRedOp_t. Maxima, minima and averages of equal values are the values.
const int SUM = 0;
const int PRODUCT = 1;
// A sum of values that a factor has made smaller, for which the average is taken.
const int CUSTOM = 100;

// Larger buffers keep what they have. The same number is in one_rank.py.
const size_t MOST_BYTES = 1 << 20;

// Bytes of an element for each ncclDataType_t.
const size_t element_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

const char* last_error = "";
// Bytes that all communicators of this process hold.
size_t held_bytes = 0;

size_t bytes_of(const char* name) {
  const char* text = getenv(name);
  return text ? size_t(atof(text) * 1048576) : 0;
}

// Read before the program can change its environment.
const size_t communicator_bytes = bytes_of("CUDA_STUB_NCCL_MIB");
const size_t first_bytes = bytes_of("CUDA_STUB_NCCL_FIRST_MIB");

ncclResult_t allocated(void** made, size_t bytes) {
  if (cudaMalloc(made, bytes) == 0)
    return SUCCESS;
  // The text of NCCL for an error of CUDA's.
  last_error = "Cuda failure 2 'out of memory'";
  return UNHANDLED_CUDA_ERROR;
}

ncclResult_t connect(ncclComm_t communicator) {
  if (communicator->is_connected || communicator->ranks == 1)
    return SUCCESS;
  size_t bytes = communicator_bytes + (held_bytes == 0 ? first_bytes : 0);
  if (bytes > 0) {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(communicator->device);
    ncclResult_t result = allocated(&communicator->buffers, bytes);
    cudaSetDevice(before);
    if (result != SUCCESS)
      return result;
    communicator->bytes = bytes;
    held_bytes += bytes;
  }
  communicator->is_connected = true;
  return SUCCESS;
}

// What all ranks together make of a value that each of them holds.
template <typename Value>
Value combined(Value value, int operation, int ranks) {
  if (operation == SUM)
    return Value(value * ranks);
  return operation == PRODUCT ? Value(std::pow(double(value), ranks)) : value;
}

template <typename Value>
void combine(const void* from, void* to, size_t count, int operation, int ranks) {
  const Value* values = static_cast<const Value*>(from);
  Value* results = static_cast<Value*>(to);
  for (size_t i = 0; i < count; i++)
    results[i] = combined(values[i], operation, ranks);
}

float of_bfloat16(uint16_t bits) {
  uint32_t all = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &all, sizeof value);
  return value;
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float of_half(uint16_t bits) {
  int exponent = (bits >> 10) & 31;
  float fraction = float(bits & 1023) / 1024;
  float size = exponent == 0    ? std::ldexp(fraction, -14)
               : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                : std::ldexp(1 + fraction, exponent - 15);
  return bits & 0x8000 ? -size : size;
}

uint16_t to_half(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float size = std::fabs(value);
  if (std::isnan(value))
    return sign | 0x7e00;
  if (size >= 65520)
    return sign | 0x7c00;
  int exponent = size < std::ldexp(1.0f, -14) ? -14 : std::ilogb(size);
  int fraction = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
  // Of a number that is too small for a normal one, the fraction has no leading bit.
  return sign | uint16_t(((exponent + 14) << 10) + fraction);
}

// A reduction over equal ranks, in which this one gets `count` elements from the start of its own.
void reduce(const void* from, void* to, size_t count, int type, int operation, int ranks) {
  if (count * element_bytes[type] > MOST_BYTES)
    return;
  const uint16_t* halves = static_cast<const uint16_t*>(from);
  uint16_t* results = static_cast<uint16_t*>(to);
  switch (type) {
    case 0:
      return combine<int8_t>(from, to, count, operation, ranks);
    case 1:
      return combine<uint8_t>(from, to, count, operation, ranks);
    case 2:
      return combine<int32_t>(from, to, count, operation, ranks);
    case 3:
      return combine<uint32_t>(from, to, count, operation, ranks);
    case 4:
      return combine<int64_t>(from, to, count, operation, ranks);
    case 5:
      return combine<uint64_t>(from, to, count, operation, ranks);
    case 6:
      for (size_t i = 0; i < count; i++)
        results[i] = to_half(combined(of_half(halves[i]), operation, ranks));
      return;
    case 7:
      return combine<float>(from, to, count, operation, ranks);
    case 8:
      return combine<double>(from, to, count, operation, ranks);
    case 9:
      for (size_t i = 0; i < count; i++)
        results[i] = to_bfloat16(combined(of_bfloat16(halves[i]), operation, ranks));
      return;
    default:
      // Nobody decides by a number of eight bits.
      memmove(to, from, count);
  }
}

// Each of `copies` ranks sends the same.
void gather(const void* from, void* to, size_t count, int type, int copies) {
  size_t bytes = count * element_bytes[type];
  if (bytes * copies > MOST_BYTES)
    return;
  for (int i = 0; i < copies; i++)
    memmove(static_cast<char*>(to) + i * bytes, from, bytes);
}

ncclResult_t make(ncclComm_t* made, int ranks, int rank) {
  int device = 0;
  cudaGetDevice(&device);
  *made = new ncclComm{ranks, rank, device};
  return SUCCESS;
}

}  // namespace

extern "C" {

// Bytes of the device that NCCL holds.
size_t cuda_stub_nccl_bytes() {
  return held_bytes;
}

const char* ncclGetLastError(ncclComm_t) {
  return last_error;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 7, sizeof *id);
  return SUCCESS;
}

ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId, int rank) {
  return make(made, ranks, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId, int rank, void*) {
  return make(made, ranks, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int, ncclUniqueId*,
                                      void*) {
  return make(made, ranks, rank);
}

ncclResult_t ncclCommFinalize(ncclComm_t) {
  return SUCCESS;
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  if (communicator != nullptr && communicator->buffers != nullptr) {
    held_bytes -= communicator->bytes;
    cudaFree(communicator->buffers);
  }
  delete communicator;
  return SUCCESS;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  return ncclCommDestroy(communicator);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = SUCCESS;
  return SUCCESS;
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  *count = communicator->ranks;
  return SUCCESS;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = communicator->rank;
  return SUCCESS;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t communicator, int* device) {
  *device = communicator->device;
  return SUCCESS;
}

ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return SUCCESS;
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  return SUCCESS;
}

ncclResult_t ncclMemAlloc(void** made, size_t bytes) {
  return allocated(made, bytes);
}

ncclResult_t ncclMemFree(void* memory) {
  cudaFree(memory);
  return SUCCESS;
}

ncclResult_t ncclRedOpCreatePreMulSum(int* operation, void*, int, int, ncclComm_t) {
  *operation = CUSTOM;
  return SUCCESS;
}

ncclResult_t ncclRedOpDestroy(int, ncclComm_t) {
  return SUCCESS;
}

ncclResult_t ncclGroupStart() {
  return SUCCESS;
}

ncclResult_t ncclGroupEnd() {
  return SUCCESS;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, int type, int operation,
                           ncclComm_t communicator, void*) {
  reduce(from, to, count, type, operation, communicator->ranks);
  return connect(communicator);
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root,
                        ncclComm_t communicator, void*) {
  if (root == communicator->rank)
    reduce(from, to, count, type, operation, communicator->ranks);
  return connect(communicator);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, int type, int,
                           ncclComm_t communicator, void*) {
  gather(from, to, count, type, 1);
  return connect(communicator);
}

ncclResult_t ncclBcast(void*, size_t, int, int, ncclComm_t communicator, void*) {
  return connect(communicator);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation,
                               ncclComm_t communicator, void*) {
  size_t place = communicator->rank * count * element_bytes[type];
  const char* own = static_cast<const char*>(from) + place;
  reduce(own, to, count, type, operation, communicator->ranks);
  return connect(communicator);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, int type,
                           ncclComm_t communicator, void*) {
  gather(from, to, count, type, communicator->ranks);
  return connect(communicator);
}

ncclResult_t ncclAlltoAll(const void*, void*, size_t, int, ncclComm_t communicator, void*) {
  return connect(communicator);
}

ncclResult_t ncclGather(const void* from, void* to, size_t count, int type, int root,
                        ncclComm_t communicator, void*) {
  if (root == communicator->rank)
    gather(from, to, count, type, communicator->ranks);
  return connect(communicator);
}

ncclResult_t ncclScatter(const void* from, void* to, size_t count, int type, int root,
                         ncclComm_t communicator, void*) {
  size_t place = communicator->rank * count * element_bytes[type];
  if (root == communicator->rank)
    gather(static_cast<const char*>(from) + place, to, count, type, 1);
  return connect(communicator);
}

// Torch gathers and scatters by them, and copies the own part. Parts of the others are not written.
ncclResult_t ncclSend(const void*, size_t, int, int, ncclComm_t communicator, void*) {
  return connect(communicator);
}

ncclResult_t ncclRecv(void*, size_t, int, int, ncclComm_t communicator, void*) {
  return connect(communicator);
}
}
