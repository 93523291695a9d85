/* CUDA's driver (libcuda): virtual memory for torch's allocator, and modules for Triton. */
#include "card.h"
#include "memory.h"
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct card *card_of(int device) { return &machine()->card[visible_card(device)]; }
/* A context is its device's number, one up. */
static int device_of(CUcontext context) { return context ? (int)(uintptr_t)context - 1 : 0; }
static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(device + 1); }
static CUresult now(void) { return (CUresult)error_of_call(*current_device()); }

CUresult cuInit(unsigned int flags) { return visible_cards() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *version) {
    *version = machine()->driver_version;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *count) {
    *count = visible_cards();
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return number >= 0 && number < visible_cards() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    snprintf(name, room, "%s", card_of(device)->name);
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    *bytes = card_of(device)->total_bytes;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute_of(card_of(device), attribute);
    return now();
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memcpy(uuid->bytes, card_of(device)->uuid + 4, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

/* Contexts. */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    need_context(device);
    *context = context_of(device);
    return now();
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    struct machine *locked = lock();
    int pid = getpid();
    *active = 0;
    for (int i = 0; i < MOST_PROCESSES; i++)
        if (locked->process[i].pid == pid) *active = locked->process[i].has_context[visible_card(device)];
    unlock();
    if (flags) *flags = 0;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
    int active;
    cuDevicePrimaryCtxGetState(*current_device(), NULL, &active);
    *context = active ? context_of(*current_device()) : NULL;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    *current_device() = device_of(context);
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent(CUcontext *context) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetDevice(CUdevice *device) {
    *device = *current_device();
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) {
    wait_for_card(*current_device());
    return now();
}

/* Virtual memory. */

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *of,
                                       CUmemAllocationGranularity_flags which) {
    *bytes = GRANULE;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    *start = (CUdeviceptr)reserve(bytes, alignment);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
    return unreserve((void *)start, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *of,
                     unsigned long long flags) {
    CUresult error = now();
    if (error) return error;
    *handle = take_physical(of->location.id, bytes);
    return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return drop_physical(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    return map((void *)start, bytes, handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
    return unmap((void *)start, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                        CUmemAllocationHandleType type) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *start) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *of, CUmemGenericAllocationHandle handle) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
    struct block found = block_at((void *)address);
    if (start) *start = (CUdeviceptr)found.start;
    if (bytes) *bytes = found.bytes;
    return found.place ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    struct block found = block_at((void *)address);
    if (!found.place) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = context_of(found.device); break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(CUmemorytype *)value = found.place == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = found.device; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = (CUdeviceptr)found.start; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = found.bytes; break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)value = found.place == MANAGED; break;
        default: *(CUdeviceptr *)value = address;
    }
    return CUDA_SUCCESS;
}

/* Modules: a function is a name, and runs into nothing. */

CUresult cuModuleLoadData(CUmodule *module, const void *code) {
    *module = malloc(64);
    return now();
}
CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *code, unsigned int count, CUjit_option *options,
                            void **values) {
    return cuModuleLoadData(module, code);
}
CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    return now();
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                  : 0;
    return now();
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **values, void **more) {
    int device = *current_device();
    double threads = (double)how->gridDimX * how->gridDimY * how->gridDimZ * how->blockDimX;
    work(device, 0, 0, 64 * threads);
    return (CUresult)error_of_launch(device);
}
CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                        CUstream stream, void **values, void **more) {
    CUlaunchConfig how = {.gridDimX = grid_x, .gridDimY = grid_y, .gridDimZ = grid_z, .blockDimX = block_x};
    return cuLaunchKernelEx(&how, function, values, more);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                   unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                   unsigned int shared, CUstream stream, void **values) {
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, values, NULL);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads, size_t shared) {
    *count = 2048 / (threads > 0 ? threads : 1);
    return now();
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *how) {
    *count = 1;
    return now();
}

/* Errors. */

CUresult cuGetErrorString(CUresult error, const char **words) {
    *words = words_of(error);
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = name_of(error);
    return CUDA_SUCCESS;
}
