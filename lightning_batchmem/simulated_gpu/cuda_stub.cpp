// A stub of the CUDA runtime: the functions of libcudart, libcublas, libcuda and libnvidia-ml that
// PyTorch calls, over the memory of the host. tests/cuda_stub/README.md has its settings and limits.
// Any other function of these libraries ends the process and names itself (not_modelled.cpp).
// math_stub.cpp has those for linear algebra and Fourier transforms, and cudnn_stub.cpp those of cuDNN.
//
// PyTorch's own code runs unchanged above it: the caching allocator, streams, events, hooks and
// out-of-memory errors. Kernels do nothing, so results have no meaning. Two things are modelled: the
// memory of the device (pages of 2 MiB, a context, other processes), and its time (a queue in which
// a product takes time by its operations, and any other kernel by the threads that it launches).
//
// Part of lightning-batchmem, under the Apache License 2.0 (LICENSE).

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <string>

// The types of cuBLAS, whose headers need CUDA's compiler.
using cudaDataType = int;
using cudaDataType_t = int;
using cublasHandle_t = void*;
using cublasLtHandle_t = void*;
using cublasStatus_t = int;
using cublasOperation_t = int;
using cublasPointerMode_t = int;
using cublasMath_t = int;
using cublasComputeType_t = int;
using cublasGemmAlgo_t = int;
using cublasLtMatrixLayout_t = void*;
using cublasLtMatmulDesc_t = void*;
using cublasLtMatmulPreference_t = void*;
using cublasLtMatrixLayoutAttribute_t = int;
using cublasLtMatmulDescAttributes_t = int;
using cublasLtMatmulPreferenceAttributes_t = int;

struct cublasLtMatmulAlgo_t {
  uint64_t data[8];
};

struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

const int CUBLAS_STATUS_SUCCESS = 0;
const int CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5;

// The sections of not_modelled.cpp, whose ends the linker knows.
extern "C" const char __start_not_modelled[] __attribute__((visibility("hidden")));
extern "C" const char __stop_not_modelled[] __attribute__((visibility("hidden")));

namespace {

double number(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text ? atof(text) : otherwise;
}

const size_t MIB = 1 << 20;
const size_t PAGE = 2 * MIB;

// Programs and libraries lie far above it (Linux, x86-64).
char* const FIRST_ADDRESS = reinterpret_cast<char*>(0x200000000000);
const int most_devices = 8;

std::string words(const char* name, const char* otherwise) {
  const char* text = getenv(name);
  return text ? text : otherwise;
}

// All that the environment sets, read once.
struct Settings {
  size_t totals[most_devices];
  int devices = std::min(int(number("CUDA_STUB_DEVICES", 1)), most_devices);
  double capability = number("CUDA_STUB_CAPABILITY", 8.0);
  // The architecture whose kernels run. Libraries of CUDA choose by it.
  int kernels = int(number("CUDA_STUB_KERNELS", capability * 10 + 0.5));
  size_t context = size_t(number("CUDA_STUB_CONTEXT_MIB", 300)) * MIB;
  size_t others = size_t(number("CUDA_STUB_OTHER_MIB", 0)) * MIB;
  double flops = number("CUDA_STUB_TFLOPS", 0) * 1e12;
  double bytes_per_second = number("CUDA_STUB_GBPS", 1000) * 1e9;
  double launch = number("CUDA_STUB_LAUNCH_US", 4) * 1e-6;
  int multiprocessors = int(number("CUDA_STUB_SMS", 108));
  int level_2_cache = int(number("CUDA_STUB_L2_MIB", 40) * MIB);
  std::string name = words("CUDA_STUB_NAME", "CUDA stub");
  // A file for the sentence with which the stub ends a process.
  std::string report = words("CUDA_STUB_REPORT", "");

  Settings() {
    bool is_exact = getenv("CUDA_STUB_BYTES");
    std::string text = is_exact ? words("CUDA_STUB_BYTES", "") : words("CUDA_STUB_GIB", "16");
    for (size_t& total : totals) {
      total = is_exact ? strtoull(text.c_str(), nullptr, 10)
                       : size_t(atof(text.c_str()) * 1024) * MIB;
      size_t comma = text.find(',');
      if (comma != std::string::npos)
        text = text.substr(comma + 1);
    }
  }
};

Settings& settings() {
  static Settings all;
  return all;
}

// The program may change its environment afterwards.
__attribute__((constructor)) void read_settings() {
  settings();
}

// What all devices of a compute capability have for each multiprocessor: NVIDIA, CUDA C++
// Programming Guide, "Technical Specifications per Compute Capability"
// (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications).
// 11.0 is from libcu++, which has the same numbers for the others
// (https://github.com/NVIDIA/cccl/blob/main/libcudacxx/include/cuda/__device/arch_traits.h).
struct Multiprocessor {
  // 10 * major + minor.
  int capability;
  int shared_memory_kib;
  // What a kernel may use of that when it asks.
  int most_shared_memory_in_block_kib;
  int most_threads;
  int most_blocks;
};

const Multiprocessor multiprocessors[] = {
    {50, 64, 48, 2048, 32},    {52, 96, 48, 2048, 32},    {53, 64, 48, 2048, 32},
    {60, 64, 48, 2048, 32},    {61, 96, 48, 2048, 32},    {62, 64, 48, 2048, 32},
    {70, 96, 96, 2048, 32},    {72, 96, 96, 2048, 32},    {75, 64, 64, 1024, 16},
    {80, 164, 163, 2048, 32},  {86, 100, 99, 1536, 16},   {87, 164, 163, 1536, 16},
    {89, 100, 99, 1536, 24},   {90, 228, 227, 2048, 32},  {100, 228, 227, 2048, 32},
    {110, 228, 227, 1536, 24}, {120, 100, 99, 1536, 24},
};

int whole_capability() {
  return int(settings().capability * 10 + 0.5);
}

// That of the capability, or of the newest one before it.
const Multiprocessor& multiprocessor() {
  const Multiprocessor* found = multiprocessors;
  for (const Multiprocessor& one : multiprocessors)
    if (one.capability <= whole_capability())
      found = &one;
  return *found;
}

struct Device {
  // Bytes that this process holds, in whole pages.
  size_t used = 0;
  // Those in blocks that cudaFreeAsync gave back to the memory pool of the device.
  size_t free_in_pool = 0;
  // The highest values of the pool since they were set back.
  size_t highest_in_blocks = 0;
  size_t highest_held = 0;
  bool has_context = false;
  // In seconds of the clock: the end of the queue, and the time that its kernels took so far.
  double busy_until = 0;
  double busy = 0;
};

struct Range {
  size_t bytes;
  // -1: pinned memory of the host.
  int device;
};

std::recursive_mutex lock;
Device all_devices[most_devices];

std::map<char*, Range>& ranges() {
  static auto* all = new std::map<char*, Range>;
  return *all;
}

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

// Keep an error for cudaGetLastError, as the runtime does.
cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess)
    last_error = error;
  return error;
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

size_t used(int device) {
  const Device& d = all_devices[device];
  return d.used + settings().others + (d.has_context ? settings().context : 0);
}

void write_all(int file, const char* text) {
  size_t left = strlen(text);
  while (left > 0) {
    ssize_t written = write(file, text, left);
    if (written <= 0)
      return;
    text += written;
    left -= size_t(written);
  }
}

}  // namespace

// End the process with a sentence: what comes after it would have no meaning.
extern "C" [[noreturn]] __attribute__((format(printf, 1, 2))) void cuda_stub_end(const char* format,
                                                                                 ...) {
  char sentence[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(sentence, sizeof sentence - 1, format, arguments);
  va_end(arguments);
  strcat(sentence, "\n");
  int file = STDERR_FILENO;
  // The process that named this file prints what is in it.
  if (!settings().report.empty())
    file = open(settings().report.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  write_all(file < 0 ? STDERR_FILENO : file, sentence);
  // Without the functions that are registered for the end, which may call more of CUDA.
  _exit(70);
}

namespace {

// The file name of the library that contains an address.
std::string library_of(const void* address) {
  Dl_info place{};
  if (!dladdr(address, &place) || !place.dli_fname)
    return "unknown code";
  const char* slash = strrchr(place.dli_fname, '/');
  return slash ? slash + 1 : place.dli_fname;
}

}  // namespace

// Functions of a process that knows which line of the program runs: one adds a sentence to the plan,
// and the other one ends the process.
static void (*on_assumption)(const char* sentence) = nullptr;
static void (*on_not_modelled)(const char* function, const char* library) = nullptr;

extern "C" void cuda_stub_tell(void (*assume)(const char*), void (*end)(const char*, const char*)) {
  on_assumption = assume;
  on_not_modelled = end;
}

extern "C" void cuda_stub_assume(const char* sentence) {
  if (on_assumption)
    on_assumption(sentence);
}

extern "C" [[noreturn]] void cuda_stub_not_modelled(const char* library, const char* function,
                                                    const void* caller) {
  if (on_not_modelled)
    on_not_modelled(function, library);
  cuda_stub_end("The simulated GPU does not have %s of %s, which %s calls.", function, library,
                library_of(caller).c_str());
}

namespace {

// An error of the host must not look like a full device.
[[noreturn]] void refused_by_host(size_t bytes) {
  cuda_stub_end(
      "The host refuses %zu MiB of address space for the simulated GPU: %s (ulimit -v,"
      " vm.overcommit_memory or vm.max_map_count).",
      bytes / MIB, strerror(errno));
}

// True if the device has room for so many bytes more, which it then holds.
bool take(int device, size_t bytes) {
  Device& d = all_devices[device];
  d.has_context = true;
  if (used(device) + bytes > settings().totals[device])
    return false;
  d.used += bytes;
  return true;
}

size_t pages(size_t bytes) {
  return (bytes + PAGE - 1) / PAGE * PAGE;
}

// The lowest free addresses. PyTorch's allocator prefers blocks at low ones, so two runs are equal only
// if the same calls get the same addresses.
char* free_addresses(size_t bytes) {
  char* free = FIRST_ADDRESS;
  for (const auto& [begin, range] : ranges()) {
    if (begin >= free + bytes)
      break;
    free = std::max(free, begin + pages(range.bytes));
  }
  return free;
}

// Reserve address space that starts at a page of the device, at the wanted page where that is free.
// The host gives memory to what is written.
char* map(size_t bytes, int protection, char* wanted) {
  char* at = static_cast<char*>(mmap(wanted, bytes + PAGE, protection,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED)
    refused_by_host(bytes);
  char* aligned = reinterpret_cast<char*>(pages(reinterpret_cast<size_t>(at)));
  if (aligned > at)
    munmap(at, size_t(aligned - at));
  munmap(aligned + bytes, size_t(at + PAGE - aligned));
  return aligned;
}

// Reserve address space for memory that is recorded in `ranges`.
char* map_recorded(size_t bytes, int device) {
  // The page more that `map` asks for is free too, or the host would choose.
  char* at = map(bytes, PROT_READ | PROT_WRITE, free_addresses(bytes + PAGE));
  ranges()[at] = {bytes, device};
  return at;
}

std::map<char*, Range>::iterator range_of(const void* pointer) {
  auto p = static_cast<char*>(const_cast<void*>(pointer));
  auto next = ranges().upper_bound(p);
  if (next == ranges().begin())
    return ranges().end();
  auto found = std::prev(next);
  return p < found->first + found->second.bytes ? found : ranges().end();
}

// Streams and events. A stream that captures adds up the seconds of its graph.

struct Stream {
  int device = 0;
  int priority = 0;
  bool captures = false;
  unsigned long long capture_id = 0;
  double captured = 0;
};

struct Event {
  double at = 0;
};

struct Graph {
  double seconds = 0;
};

Stream default_streams[most_devices];

// The numbers up to 2 stand for the default streams.
Stream& stream_of(cudaStream_t stream) {
  auto number = reinterpret_cast<size_t>(stream);
  if (number <= 2)
    return default_streams[current];
  return *reinterpret_cast<Stream*>(stream);
}

// Put work of so many seconds into the queue of the device, or into the graph that is captured.
void run(double seconds, cudaStream_t stream) {
  if (settings().flops == 0)
    return;
  std::lock_guard<std::recursive_mutex> guard(lock);
  Stream& s = stream_of(stream);
  if (s.captures) {
    s.captured += seconds;
    return;
  }
  Device& d = all_devices[current];
  d.busy_until = std::max(d.busy_until, now()) + seconds;
  d.busy += seconds;
}

void wait_until(double time) {
  double left = time - now();
  if (left > 0)
    usleep(useconds_t(left * 1e6));
}

void kernel(dim3 grid, dim3 block, cudaStream_t stream) {
  double threads = double(grid.x) * grid.y * grid.z * block.x * block.y * block.z;
  // A thread of an elementwise kernel reads and writes four numbers of four bytes.
  run(std::max(settings().launch, threads * 48 / settings().bytes_per_second), stream);
}

void product(double m, double n, double k, double batch, cudaStream_t stream) {
  if (settings().flops > 0)
    run(std::max(settings().launch, 2 * m * n * k * batch / settings().flops), stream);
}

}  // namespace

extern "C" {

// For a process that sets the size of the device before it starts CUDA.
void cuda_stub_resize(size_t bytes) {
  settings().totals[0] = bytes;
}

// Devices.

cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices)
    return remember(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", settings().name.c_str());
  p->uuid.bytes[0] = char(0xA0 + device);
  p->totalGlobalMem = settings().totals[device];
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = size_t(multiprocessor().most_shared_memory_in_block_kib) << 10;
  p->sharedMemPerMultiprocessor = size_t(multiprocessor().shared_memory_kib) << 10;
  // Of the driver, in each block.
  p->reservedSharedMemPerBlock = whole_capability() >= 80 ? 1024 : 0;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = whole_capability() / 10;
  p->minor = whole_capability() % 10;
  p->textureAlignment = 512;
  p->multiProcessorCount = settings().multiprocessors;
  p->concurrentKernels = p->canMapHostMemory = p->unifiedAddressing = p->managedMemory =
      p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  p->pciBusID = device + 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = settings().level_2_cache;
  p->maxThreadsPerMultiProcessor = multiprocessor().most_threads;
  p->maxBlocksPerMultiProcessor = multiprocessor().most_blocks;
  p->streamPrioritiesSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = int(p.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = int(p.reservedSharedMemPerBlock);
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size_t(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  wait_until(all_devices[current].busy_until);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  return last_error;
}

// The errors that the stub returns, with the words of the real runtime.
const struct {
  cudaError_t error;
  const char* name;
  const char* text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
};

const char* cudaGetErrorString(cudaError_t error) {
  for (const auto& one : errors)
    if (one.error == error)
      return one.text;
  return "unrecognized error code";
}

const char* cudaGetErrorName(cudaError_t error) {
  for (const auto& one : errors)
    if (one.error == error)
      return one.name;
  return "unrecognized error code";
}

// Memory.

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  *pointer = nullptr;
  if (bytes == 0) {
    all_devices[current].has_context = true;
    return cudaSuccess;
  }
  if (!take(current, pages(bytes)))
    return remember(cudaErrorMemoryAllocation);
  *pointer = map_recorded(pages(bytes), current);
  return cudaSuccess;
}

// Return the memory of a block to the device.
void release(std::map<char*, Range>::iterator block) {
  all_devices[block->second.device].used -= block->second.bytes;
  munmap(block->first, block->second.bytes);
  ranges().erase(block);
}

cudaError_t cudaFree(void* pointer) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  all_devices[current].has_context = true;
  if (!pointer)
    return cudaSuccess;
  auto found = ranges().find(static_cast<char*>(pointer));
  if (found == ranges().end())
    return remember(cudaErrorInvalidValue);
  cudaDeviceSynchronize();
  release(found);
  return cudaSuccess;
}

// The memory pool of a device: freed blocks stay in it until it is trimmed or memory runs out. Any
// block can become a part of any other one.

size_t in_blocks(const Device& d) {
  return d.used - d.free_in_pool;
}

void note_highest(Device& d) {
  d.highest_in_blocks = std::max(d.highest_in_blocks, in_blocks(d));
  d.highest_held = std::max(d.highest_held, d.used);
}

void trim(Device& d) {
  d.used -= d.free_in_pool;
  d.free_in_pool = 0;
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  Device& d = all_devices[current];
  size_t reused = std::min(d.free_in_pool, pages(bytes));
  d.free_in_pool -= reused;
  d.used -= reused;
  cudaError_t error = cudaMalloc(pointer, bytes);
  if (error != cudaSuccess) {
    trim(d);
    error = cudaMalloc(pointer, bytes);
  }
  note_highest(d);
  return error;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto found = ranges().find(static_cast<char*>(pointer));
  if (found == ranges().end())
    return remember(cudaErrorInvalidValue);
  size_t bytes = found->second.bytes;
  Device& d = all_devices[found->second.device];
  release(found);
  d.used += bytes;
  d.free_in_pool += bytes;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(&all_devices[device]);
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void*) {
  Device& d = *reinterpret_cast<Device*>(pool);
  if (attribute == cudaMemPoolAttrUsedMemHigh)
    d.highest_in_blocks = in_blocks(d);
  if (attribute == cudaMemPoolAttrReservedMemHigh)
    d.highest_held = d.used;
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const Device& d = *reinterpret_cast<Device*>(pool);
  size_t bytes = 0;
  switch (attribute) {
    case cudaMemPoolAttrUsedMemCurrent: bytes = in_blocks(d); break;
    case cudaMemPoolAttrUsedMemHigh: bytes = d.highest_in_blocks; break;
    case cudaMemPoolAttrReservedMemCurrent: bytes = d.used; break;
    case cudaMemPoolAttrReservedMemHigh: bytes = d.highest_held; break;
    default: break;
  }
  *static_cast<uint64_t*>(value) = bytes;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) {
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  trim(*reinterpret_cast<Device*>(pool));
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  all_devices[current].has_context = true;
  *total = settings().totals[current];
  *free_bytes = *total - std::min(*total, used(current));
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  *pointer = map_recorded(pages(bytes), -1);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto found = ranges().find(static_cast<char*>(pointer));
  if (found != ranges().end()) {
    munmap(found->first, found->second.bytes);
    ranges().erase(found);
  }
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void*) {
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* pointer) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  memset(a, 0, sizeof *a);
  auto found = range_of(pointer);
  if (found == ranges().end()) {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -1;
    return cudaSuccess;
  }
  bool on_host = found->second.device < 0;
  a->type = on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = on_host ? 0 : found->second.device;
  a->devicePointer = a->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

// Whether it is memory of a device, or pinned memory of the host.
bool is_known(const void* pointer) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  return range_of(pointer) != ranges().end();
}

bool is_on_device(const void* pointer) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto found = range_of(pointer);
  return found != ranges().end() && found->second.device >= 0;
}

// What the default kind means for two addresses.
cudaMemcpyKind kind_of(cudaMemcpyKind kind, const void* to, const void* from) {
  if (kind != cudaMemcpyDefault)
    return kind;
  if (is_on_device(to))
    return is_on_device(from) ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
  return is_on_device(from) ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

// The seconds of a copy. Between the host and a device it takes 12 GB/s.
double copy_seconds(cudaMemcpyKind kind, double bytes) {
  bool inside = kind == cudaMemcpyDeviceToDevice;
  return settings().launch + bytes / (inside ? settings().bytes_per_second / 2 : 12e9);
}

// A copy inside the device moves nothing: no kernel has written what it would copy.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  kind = kind_of(kind, to, from);
  if (kind != cudaMemcpyDeviceToDevice)
    memmove(to, from, bytes);
  run(copy_seconds(kind, double(bytes)), stream);
  if (kind == cudaMemcpyDeviceToHost && !is_known(to))
    cudaDeviceSynchronize();
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return cudaDeviceSynchronize();
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  kind = kind_of(kind, to, from);
  for (size_t row = 0; row < height && kind != cudaMemcpyDeviceToDevice; row++)
    memmove(static_cast<char*>(to) + row * to_pitch,
            static_cast<const char*>(from) + row * from_pitch, width);
  run(copy_seconds(kind, double(width) * double(height)), stream);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind) {
  cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
  return cudaDeviceSynchronize();
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

// Write zeros to a device. It gives whole pages back to the host, which brings them as zeros when
// they are read.
void write_zeros(char* begin, size_t bytes) {
  const size_t host_page = 4096;
  auto first = (reinterpret_cast<size_t>(begin) + host_page - 1) / host_page * host_page;
  auto last = (reinterpret_cast<size_t>(begin) + bytes) / host_page * host_page;
  if (first >= last || madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) != 0) {
    memset(begin, 0, bytes);
    return;
  }
  memset(begin, 0, first - reinterpret_cast<size_t>(begin));
  memset(reinterpret_cast<void*>(last), 0, reinterpret_cast<size_t>(begin) + bytes - last);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  // Memory of the host can be a file, or shared with another process.
  if (value == 0 && is_on_device(to))
    write_zeros(static_cast<char*>(to), bytes);
  else
    memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  run(settings().launch + double(bytes) / settings().bytes_per_second, stream);
  return cudaMemset(to, value, bytes);
}

cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char space[1 << 16];
  *pointer = space;
  return cudaSuccess;
}

// Streams, events, graphs.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  auto* made = new Stream;
  made->device = current;
  made->priority = priority;
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<Stream*>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaDeviceSynchronize();
}

cudaError_t cudaStreamQuery(cudaStream_t) {
  return all_devices[current].busy_until <= now() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  reinterpret_cast<Event*>(event)->at = std::max(now(), all_devices[current].busy_until);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return reinterpret_cast<Event*>(event)->at <= now() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  wait_until(reinterpret_cast<Event*>(event)->at);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = float((reinterpret_cast<Event*>(end)->at - reinterpret_cast<Event*>(start)->at) * 1e3);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      stream_of(stream).captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// CUDA 12 has a form without edges.
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  if (edges)
    *edges = nullptr;
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, size_t* count) {
#endif
  cudaStreamIsCapturing(stream, status);
  if (id)
    *id = stream_of(stream).capture_id;
  if (graph)
    *graph = nullptr;
  if (dependencies)
    *dependencies = nullptr;
  if (count)
    *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  static unsigned long long captures = 0;
  Stream& s = stream_of(stream);
  s.captures = true;
  s.capture_id = ++captures;
  s.captured = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream& s = stream_of(stream);
  s.captures = false;
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{s.captured});
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

// Of CUDA 12, where the name above is a newer one.
#undef cudaGraphInstantiate
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  run(reinterpret_cast<Graph*>(graph)->seconds, stream);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}

// Kernels.

thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} configuration;

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {
}

void __cudaUnregisterFatBinary(void**) {
}

void __cudaRegisterHostVar(void**, const char*, char*, size_t) {
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {
}

// The kernel of torch.cuda._sleep(cycles), the only one whose time is an argument.
const void* sleeper;

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  if (strstr(name, "spin_kernel"))
    sleeper = function;
}

void launched(const void* function, dim3 grid, dim3 block, void** arguments, cudaStream_t stream) {
  if (function == sleeper && settings().flops > 0)
    run(double(*static_cast<int64_t*>(arguments[0])) / 1.4e9, stream);
  else
    kernel(grid, block, stream);
}

char __cudaInitModule(void**) {
  return 0;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* found, const void* function) {
  *found = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void** arguments, size_t,
                               cudaStream_t stream) {
  launched(k, grid, block, arguments, stream);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t stream) {
  launched(function, grid, block, arguments, stream);
  return cudaSuccess;
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                        void** arguments, size_t, cudaStream_t stream) {
  launched(function, grid, block, arguments, stream);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void**) {
  kernel(c->gridDim, c->blockDim, c->stream);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = settings().kernels;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

// The driver's functions for segments that expand.

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
    *value = 1;
    return CUDA_SUCCESS;
  }
  cudaDeviceGetAttribute(value, cudaDeviceAttr(attribute), device);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "error of the stub";
  return CUDA_SUCCESS;
}

#if CUDA_VERSION >= 12090
// Messages of the driver, of which the stub has none.
CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* made) {
  *made = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) {
  return CUDA_SUCCESS;
}
#endif

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
  *at = reinterpret_cast<CUdeviceptr>(map(bytes, PROT_NONE, nullptr));
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  munmap(reinterpret_cast<void*>(at), bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* p, unsigned long long) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  int device = p ? p->location.id : current;
  if (!take(device, bytes))
    return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = CUmemGenericAllocationHandle(reinterpret_cast<size_t>(new Range{bytes, device}));
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto* one = reinterpret_cast<Range*>(size_t(handle));
  all_devices[one->device].used -= one->bytes;
  delete one;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) != 0)
    refused_by_host(bytes);
  ranges()[reinterpret_cast<char*>(at)] = {bytes, reinterpret_cast<Range*>(size_t(handle))->device};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto p = reinterpret_cast<char*>(at);
  auto found = ranges().lower_bound(p);
  while (found != ranges().end() && found->first < p + bytes)
    found = ranges().erase(found);
  madvise(p, bytes, MADV_DONTNEED);
  mprotect(p, bytes, PROT_NONE);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  cudaMemsetAsync(reinterpret_cast<void*>(to), value, bytes, stream);
  return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  if (value == 0)
    return cuMemsetD8Async(to, 0, count * sizeof value, stream);
  std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
  run(settings().launch + double(count * sizeof value) / settings().bytes_per_second, stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue32(CUstream, CUdeviceptr at, cuuint32_t value, unsigned) {
  *reinterpret_cast<cuuint32_t*>(at) = value;
  return CUDA_SUCCESS;
}

// Private tables of the driver, of which none is answered. Some libraries work without them, as on a
// machine without a driver: NVRTC compiles, cuDNN and the cuBLASLt that it calls plan, and with CUPTI
// the profiler of torch reports no kernels.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  const void* caller = __builtin_return_address(0);
  std::string library = library_of(caller);
  bool works_without = false;
  for (const char* name : {"libcupti", "libnvrtc", "libcudnn", "libcublasLt"})
    works_without = works_without || library.rfind(name, 0) == 0;
  if (!works_without)
    cuda_stub_not_modelled("libcuda.so.1", "cuGetExportTable", caller);
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = settings().devices;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = all_devices[device].has_context;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(&all_devices[device]);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(&all_devices[current]);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}

// Descriptions of a tensor, which only kernels read.
CUresult cuTensorMapEncodeTiled(CUtensorMap* made, CUtensorMapDataType, cuuint32_t, void*,
                                const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(made, 0, sizeof *made);
  return CUDA_SUCCESS;
}

// Those that Triton calls, for torch.compile. Its kernels are compiled, and do nothing.

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit, size_t) {
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* made, const void*) {
  *made = reinterpret_cast<CUmodule>(new int{});
  return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule* made, const char*) {
  return cuModuleLoadData(made, nullptr);
}

CUresult cuModuleLoadDataEx(CUmodule* made, const void*, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(made, nullptr);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule) {
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* found, CUmodule module, const char*) {
  *found = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto found = range_of(reinterpret_cast<void*>(pointer));
  if (found == ranges().end())
    return CUDA_ERROR_INVALID_VALUE;
  bool on_host = found->second.device < 0;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(value) = pointer;
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = on_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = on_host ? 0 : found->second.device;
      break;
    default: cuda_stub_end("The simulated GPU does not have attribute %d of a pointer.", attribute);
  }
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                        unsigned bz, unsigned, CUstream stream, void**, void**) {
  kernel(dim3(x, y, z), dim3(bx, by, bz), stream);
  return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                   void** arguments) {
  return cuLaunchKernel(f, x, y, z, bx, by, bz, shared, stream, arguments, nullptr);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction, void**, void**) {
  kernel(dim3(c->gridDimX, c->gridDimY, c->gridDimZ),
         dim3(c->blockDimX, c->blockDimY, c->blockDimZ), c->hStream);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  *count = 1;
  return CUDA_SUCCESS;
}

// What cuDNN calls when it compiles the kernels of attention: a module is loaded, its kernels are
// looked up, and linking gives back what it was given.

#undef cuCtxPopCurrent
#undef cuCtxPushCurrent
#undef cuLinkAddData
#undef cuLinkCreate
#undef cuStreamGetCtx

CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_OF_THE_STUB";
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext) {
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  return context ? cuCtxGetCurrent(context) : CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream, CUcontext* context) {
  return cuCtxGetCurrent(context);
}

CUresult cuLibraryLoadData(CUlibrary* made, const void*, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  *made = reinterpret_cast<CUlibrary>(new int{});
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadFromFile(CUlibrary* made, const char*, CUjit_option*, void**, unsigned,
                               CUlibraryOption*, void**, unsigned) {
  return cuLibraryLoadData(made, nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0);
}

CUresult cuLibraryUnload(CUlibrary library) {
  delete reinterpret_cast<int*>(library);
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* found, CUlibrary library, const char*) {
  *found = reinterpret_cast<CUkernel>(library);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel, CUdevice) {
  return cuFuncGetAttribute(value, attribute, nullptr);
}

CUresult cuKernelSetAttribute(CUfunction_attribute, int, CUkernel, CUdevice) {
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialClusterSize(int* size, CUfunction, const CUlaunchConfig*) {
  // The largest that all devices with clusters have.
  *size = 8;
  return CUDA_SUCCESS;
}

struct Linked {
  const void* data;
  size_t bytes;
};

CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* state) {
  *state = reinterpret_cast<CUlinkState>(new Linked{});
  return CUDA_SUCCESS;
}

CUresult cuLinkAddData(CUlinkState state, CUjitInputType, void* data, size_t bytes, const char*,
                       unsigned, CUjit_option*, void**) {
  *reinterpret_cast<Linked*>(state) = {data, bytes};
  return CUDA_SUCCESS;
}

CUresult cuLinkComplete(CUlinkState state, void** data, size_t* bytes) {
  auto* linked = reinterpret_cast<Linked*>(state);
  *data = const_cast<void*>(linked->data);
  *bytes = linked->bytes;
  return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state) {
  delete reinterpret_cast<Linked*>(state);
  return CUDA_SUCCESS;
}

// The driver's function of a name, or null. Of several versions of a function it is the newest one
// that is modelled. One that is not modelled is found too, and ends the process when it is called.
void* driver_function(const char* name) {
  static void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  void* any = nullptr;
  for (const char* version : {"_v4", "_v3", "_v2", ""}) {
    void* found = dlsym(self ? self : RTLD_DEFAULT, (std::string(name) + version).c_str());
    if (found && (found < __start_not_modelled || found >= __stop_not_modelled))
      return found;
    if (found)
      any = found;
  }
  return any;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

#undef cudaGetDriverEntryPoint
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}

CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t,
                          CUdriverProcAddressQueryResult* result) {
  *function = driver_function(name);
  if (result)
    *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// cuBLAS: products take time, and nothing else.

struct Layout {
  uint64_t rows, columns;
  int32_t batch;
};

struct Blas {
  cudaStream_t stream;
  cublasPointerMode_t pointer_mode;
  cublasMath_t math_mode;
};

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = reinterpret_cast<cublasHandle_t>(new Blas{});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return cublasCreate_v2(handle);
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream) {
  *stream = reinterpret_cast<Blas*>(handle)->stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  reinterpret_cast<Blas*>(handle)->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = reinterpret_cast<Blas*>(handle)->pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  reinterpret_cast<Blas*>(handle)->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = reinterpret_cast<Blas*>(handle)->math_mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  reinterpret_cast<Blas*>(handle)->math_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

#define STREAM reinterpret_cast<Blas*>(handle)->stream

cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                              int n, int k, const float*, const float*, int, const float*, int,
                              const float*, float*, int) {
  product(m, n, k, 1, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t,
                                         cublasOperation_t, int m, int n, int k, const float*,
                                         const float*, int, long long, const float*, int, long long,
                                         const float*, float*, int, long long, int batch) {
  product(m, n, k, batch, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                            int n, int k, const void*, const void*, cudaDataType, int, const void*,
                            cudaDataType, int, const void*, void*, cudaDataType, int,
                            cublasComputeType_t, cublasGemmAlgo_t) {
  product(m, n, k, 1, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t,
                                          cublasOperation_t, int m, int n, int k, const void*,
                                          const void*, cudaDataType, int, long long, const void*,
                                          cudaDataType, int, long long, const void*, void*,
                                          cudaDataType, int, long long, int batch,
                                          cublasComputeType_t, cublasGemmAlgo_t) {
  product(m, n, k, batch, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSgemv_v2(cublasHandle_t handle, cublasOperation_t, int m, int n, const float*,
                              const float*, int, const float*, int, const float*, float*, int) {
  product(m, n, 1, 1, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

// In double precision.
cublasStatus_t cublasDgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                              int n, int k, const double*, const double*, int, const double*, int,
                              const double*, double*, int) {
  product(m, n, k, 1, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t handle, cublasOperation_t,
                                         cublasOperation_t, int m, int n, int k, const double*,
                                         const double*, int, long long, const double*, int,
                                         long long, const double*, double*, int, long long,
                                         int batch) {
  product(m, n, k, batch, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDgemv_v2(cublasHandle_t handle, cublasOperation_t, int m, int n, const double*,
                              const double*, int, const double*, int, const double*, double*, int) {
  product(m, n, 1, 1, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

// Complex numbers: a product of two has four of real ones.
cublasStatus_t cublasCgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                              int n, int k, const void*, const void*, int, const void*, int,
                              const void*, void*, int) {
  product(m, n, k, 4, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasZgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                              int n, int k, const void*, const void*, int, const void*, int,
                              const void*, void*, int) {
  product(m, n, k, 4, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasCgemmStridedBatched(cublasHandle_t handle, cublasOperation_t,
                                         cublasOperation_t, int m, int n, int k, const void*,
                                         const void*, int, long long, const void*, int, long long,
                                         const void*, void*, int, long long, int batch) {
  product(m, n, k, 4.0 * batch, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasZgemmStridedBatched(cublasHandle_t handle, cublasOperation_t,
                                         cublasOperation_t, int m, int n, int k, const void*,
                                         const void*, int, long long, const void*, int, long long,
                                         const void*, void*, int, long long, int batch) {
  product(m, n, k, 4.0 * batch, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasCgemv_v2(cublasHandle_t handle, cublasOperation_t, int m, int n, const void*,
                              const void*, int, const void*, int, const void*, void*, int) {
  product(m, n, 1, 4, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasZgemv_v2(cublasHandle_t handle, cublasOperation_t, int m, int n, const void*,
                              const void*, int, const void*, int, const void*, void*, int) {
  product(m, n, 1, 4, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

// Dot products.
cublasStatus_t cublasSdot_v2(cublasHandle_t handle, int n, const float*, int, const float*, int,
                             float*) {
  product(1, 1, n, 1, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDdot_v2(cublasHandle_t handle, int n, const double*, int, const double*, int,
                             double*) {
  product(1, 1, n, 1, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDotEx(cublasHandle_t handle, int n, const void*, cudaDataType, int,
                           const void*, cudaDataType, int, void*, cudaDataType, cudaDataType) {
  product(1, 1, n, 1, STREAM);
  return CUBLAS_STATUS_SUCCESS;
}

// Solutions of m equations with a triangular matrix, for n right sides.
#define TRIANGULAR(name, multiplications)                                                        \
  cublasStatus_t name##_v2(cublasHandle_t handle, int side, int, int, int, int m, int n,         \
                           const void*, const void*, int, void*, int) {                          \
    product(m, n, (side == 0 ? m : n) / 2.0, multiplications, STREAM);                           \
    return CUBLAS_STATUS_SUCCESS;                                                                \
  }                                                                                              \
  cublasStatus_t name##Batched(cublasHandle_t handle, int side, int, int, int, int m, int n,     \
                               const void*, const void*, int, void*, int, int batch) {           \
    product(m, n, (side == 0 ? m : n) / 2.0, multiplications * double(batch), STREAM);           \
    return CUBLAS_STATUS_SUCCESS;                                                                \
  }

TRIANGULAR(cublasStrsm, 1)
TRIANGULAR(cublasDtrsm, 1)
TRIANGULAR(cublasCtrsm, 4)
TRIANGULAR(cublasZtrsm, 4)

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType, uint64_t rows,
                                          uint64_t columns, int64_t) {
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{rows, columns, 1});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t one) {
  delete reinterpret_cast<Layout*>(one);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t one,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t) {
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
    reinterpret_cast<Layout*>(one)->batch = *static_cast<const int32_t*>(value);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t,
                                        cudaDataType_t) {
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new int{});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t one) {
  delete reinterpret_cast<int*>(one);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
                                              const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new int{});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t one) {
  delete reinterpret_cast<int*>(one);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t found[], int* count) {
  memset(found, 0, sizeof *found);
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                              cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t,
                              const void*, const void*, cublasLtMatrixLayout_t, void*,
                              cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream) {
  auto* left = reinterpret_cast<Layout*>(a);
  auto* result = reinterpret_cast<Layout*>(d);
  // One side of the left matrix is a side of the result, and the other one is summed over.
  double summed = double(left->rows) * double(left->columns) / double(result->rows);
  product(double(result->rows), double(result->columns), summed, result->batch, stream);
  return CUBLAS_STATUS_SUCCESS;
}

// NVML, for those who load libnvidia-ml.so.1: a link to this file.

struct NvmlMemory {
  unsigned long long total, free, used;
};

struct NvmlRates {
  unsigned gpu, memory;
};

// torch calls the first name, and Python's binding the second one.
int nvmlInit() {
  return 0;
}

int nvmlInit_v2() {
  return 0;
}

int nvmlInitWithFlags(unsigned) {
  return 0;
}

int nvmlShutdown() {
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = unsigned(settings().devices);
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &all_devices[index];
  return index < unsigned(settings().devices) ? 0 : 2;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = &all_devices[0];
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char*, void** device) {
  *device = &all_devices[0];
  return 0;
}

int nvmlDeviceGetName(void*, char* text, unsigned size) {
  snprintf(text, size, "%s", settings().name.c_str());
  return 0;
}

int nvmlDeviceGetUUID(void*, char* text, unsigned size) {
  snprintf(text, size, "GPU-a0000000-0000-0000-0000-000000000000");
  return 0;
}

int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = unsigned(static_cast<Device*>(device) - all_devices);
  return 0;
}

int nvmlDeviceGetMemoryInfo(void* device, NvmlMemory* m) {
  auto number = static_cast<Device*>(device) - all_devices;
  m->total = settings().totals[number];
  m->used = used(int(number));
  m->free = m->total - m->used;
  return 0;
}

int nvmlDeviceGetUtilizationRates(void* device, NvmlRates* rates) {
  static double last_busy[most_devices], last_time[most_devices];
  auto* d = static_cast<Device*>(device);
  size_t i = size_t(d - all_devices);
  double time = now(),
         share = last_time[i] > 0 ? (d->busy - last_busy[i]) / (time - last_time[i]) : 0;
  last_busy[i] = d->busy;
  last_time[i] = time;
  rates->gpu = rates->memory = unsigned(100 * std::min(1.0, std::max(0.0, share)));
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return 0;
}

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "0.0.stub");
  return 0;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) {
  return 3;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) {
  return 3;
}

// The caller's structure stays zero, which means that the device has no fabric.
int nvmlDeviceGetGpuFabricInfoV(void*, void*) {
  return 0;
}

const char* nvmlErrorString(int) {
  return "error of the stub";
}

int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 100000;
  return 0;
}

int nvmlDeviceGetTemperature(void*, int, unsigned* degrees) {
  *degrees = 40;
  return 0;
}

}  // extern "C"
