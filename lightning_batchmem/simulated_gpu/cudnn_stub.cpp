// cuDNN without a device: the real library chooses its engines and reports the bytes of their
// workspaces for a device that is described to it, and nothing is executed.
//
// cuDNN has such a mode since 9.8 (deviceless ahead-of-time compilation): heuristics, engines and
// execution plans take a description of the device instead of a handle
// (https://docs.nvidia.com/deeplearning/cudnn/backend/latest/developer/misc.html). PyTorch passes a
// handle, so this file stands between the two: it gives PyTorch a handle of its own, leaves it out
// of descriptors, and adds the description. All other functions with a handle need a device, and end
// the process (not_modelled.cpp); PyTorch takes its own kernels instead of them (child.py).
//
// Part of lightning-batchmem, under the Apache License 2.0 (LICENSE).

#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <string>

extern "C" [[noreturn]] __attribute__((format(printf, 1, 2))) void cuda_stub_end(const char* format,
                                                                                 ...);

// Only this file reads it. cuDNN never gets one.
struct cudnnContext {
  cudaStream_t stream = nullptr;
};

namespace {

// A function of cuDNN itself, whose name has the one of this file in front of it.
template <class Function>
Function* real(Function*, const char* name) {
  static void* library = dlopen("libcudnn.so.9", RTLD_LAZY);
  void* found = library ? dlsym(library, name) : nullptr;
  if (!found)
    cuda_stub_end("The simulated GPU does not find %s in libcudnn.so.9.", name);
  return reinterpret_cast<Function*>(found);
}

#define REAL(name) real(&name, #name)

// The properties that cuDNN reads, with its names for them. NVIDIA does not document the names; XLA
// has them (xla/stream_executor/cuda/cudnn_device_props.cc in openxla/xla, Apache 2.0).
//
// The clocks are those of an A100. Of 138 plans of ResNet-50, no other clock changed a workspace on
// an A100, and on an H100 the sum of 7,386 MiB changed by 4 MiB.
std::string description() {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  char text[2048];
  snprintf(text, sizeof text,
           "{\"deviceVer\":%d,\"multiProcessorCount\":%d,\"warpSize\":%d,"
           "\"maxSharedMemoryPerBlock\":%zu,\"maxSharedMemoryPerBlockOptin\":%zu,"
           "\"reservedSharedMemoryPerBlock\":%zu,\"maxRegistersPerSM\":%d,\"maxCtasPerSM\":%d,"
           "\"maxThreadsPerBlock\":%d,\"maxThreadsPerSM\":%d,\"regsPerBlock\":%d,"
           "\"totalGlobalMem\":%zu,\"smClockRateKHz\":1410000,\"l2CacheSize\":%d,"
           "\"maxBlockSize\":[%d,%d,%d],\"memClockRateKHz\":1215000,\"maxGridSize\":[%d,%d,%d],"
           "\"supportCoopLaunch\":1,\"pciDeviceId\":0,\"isTccDriver\":0,\"cudaDeviceId\":0,"
           "\"driverVer\":%d,\"deviceName\":\"%s\"}",
           p.major * 100 + p.minor * 10, p.multiProcessorCount, p.warpSize, p.sharedMemPerBlock,
           p.sharedMemPerBlockOptin, p.reservedSharedMemPerBlock, p.regsPerMultiprocessor,
           p.maxBlocksPerMultiProcessor, p.maxThreadsPerBlock, p.maxThreadsPerMultiProcessor,
           p.regsPerBlock, p.totalGlobalMem, p.l2CacheSize, p.maxThreadsDim[0], p.maxThreadsDim[1],
           p.maxThreadsDim[2], p.maxGridSize[0], p.maxGridSize[1], p.maxGridSize[2], CUDART_VERSION,
           p.name);
  return text;
}

cudnnBackendDescriptor_t make_device() {
  std::string text = description();
  cudnnBackendDescriptor_t made = nullptr;
  cudnnStatus_t status =
      REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &made);
  if (status == CUDNN_STATUS_SUCCESS)
    status = REAL(cudnnBackendSetAttribute)(made, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                                            CUDNN_TYPE_CHAR, int64_t(text.size()), text.c_str());
  if (status == CUDNN_STATUS_SUCCESS)
    status = REAL(cudnnBackendFinalize)(made);
  if (status != CUDNN_STATUS_SUCCESS)
    cuda_stub_end("cuDNN does not accept the description of the simulated GPU (status %d).",
                  int(status));
  return made;
}

cudnnBackendDescriptor_t device() {
  static cudnnBackendDescriptor_t made = make_device();
  return made;
}

// What tells a descriptor its device; CUDNN_ATTR_POINTWISE_MODE, which is 0, for those without one.
cudnnBackendAttributeName_t device_of(cudnnBackendDescriptorType_t type) {
  switch (type) {
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: return CUDNN_ATTR_ENGINEHEUR_DEVICEPROP;
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR: return CUDNN_ATTR_ENGINE_DEVICEPROP;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: return CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP;
    default: return CUDNN_ATTR_POINTWISE_MODE;
  }
}

}  // namespace

extern "C" {

// For a process that looks whether the library was compiled with this file.
void cuda_stub_has_cudnn() {}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* made) {
  static auto* const create = REAL(cudnnBackendCreateDescriptor);
  static auto* const set = REAL(cudnnBackendSetAttribute);
  cudnnStatus_t status = create(type, made);
  cudnnBackendAttributeName_t attribute = device_of(type);
  if (status != CUDNN_STATUS_SUCCESS || attribute == CUDNN_ATTR_POINTWISE_MODE)
    return status;
  cudnnBackendDescriptor_t described = device();
  return set(*made, attribute, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &described);
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void* values) {
  static auto* const set = REAL(cudnnBackendSetAttribute);
  // A handle is one of this file.
  if (type == CUDNN_TYPE_HANDLE)
    return CUDNN_STATUS_SUCCESS;
  return set(descriptor, name, type, count, values);
}

// A launch in the time of the device: the operations of the graph are not counted.
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t,
                                  cudnnBackendDescriptor_t) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = launch.blockDim = dim3{1, 1, 1};
  launch.stream = handle->stream;
  cudaLaunchKernelExC(&launch, nullptr, nullptr);
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
