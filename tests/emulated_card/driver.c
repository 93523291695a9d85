/* CUDA's driver (libcuda): virtual memory for torch's allocator, and modules for Triton. */
#include "card.h"
#include "memory.h"
#include <cuda.h>
#include <stdlib.h>

#define current (*current_device())
/* A context is its device's number, one up. */
static int device_of(CUcontext context) { return context ? (int)(uintptr_t)context - 1 : 0; }
static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(device + 1); }
static CUresult now(void) { return error_of_call(current); }

/* A function that says or notes something. */
#define SAYS(name, parameters, ...) CUresult name parameters { __VA_ARGS__; return CUDA_SUCCESS; }

CUresult cuInit(unsigned int flags) { return visible_cards() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return number >= 0 && number < visible_cards() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
SAYS(cuDriverGetVersion, (int *version), *version = machine()->driver_version)
SAYS(cuDeviceGetCount, (int *count), *count = visible_cards())
SAYS(cuDeviceGetAttribute, (int *value, CUdevice_attribute attribute, CUdevice device),
     *value = attribute_of(card_of(device), attribute))
SAYS(cuDeviceGetUuid, (CUuuid *uuid, CUdevice device), uuid_of(card_of(device), (unsigned char *)uuid->bytes))

/* Contexts. */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    need_context(device);
    *context = context_of(device);
    return now();
}
SAYS(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned int *flags, int *active),
     *flags = 0, *active = has_context(device))
SAYS(cuCtxGetCurrent, (CUcontext *context), *context = has_context(current) ? context_of(current) : NULL)
SAYS(cuCtxSetCurrent, (CUcontext context), current = device_of(context))

/* Virtual memory. */

static CUresult error_of_virtual_memory(int device) {
    return card_of(device)->lacks_virtual_memory ? CUDA_ERROR_NOT_SUPPORTED : now();
}
static CUresult valid(bool is) { return is ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

SAYS(cuMemGetAllocationGranularity,
     (size_t *bytes, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags which), *bytes = GRANULE)
CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    CUresult error = error_of_virtual_memory(current);
    if (error) return error;
    *start = (CUdeviceptr)reserve(bytes, alignment);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) { return valid(unreserve((void *)start, bytes)); }
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *of,
                     unsigned long long flags) {
    CUresult error = error_of_virtual_memory(of->location.id);
    if (error) return error;
    *handle = take_physical(of->location.id, bytes);
    return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return valid(drop_physical(handle)); }
CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    return valid(map((void *)start, bytes, handle));
}
CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) { return valid(unmap((void *)start, bytes)); }
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

/* Functions of modules, which are names: they run into nothing. */

SAYS(cuFuncGetAttribute, (int *value, CUfunction_attribute attribute, CUfunction function),
     *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
              : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                   : 0)
static CUresult launched(double blocks, double threads) {
    work(current, 0, 0, 64 * blocks * threads); /* Triton's threads read and write several vectors each */
    return error_of_launch(current);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **values, void **more) {
    return launched((double)how->gridDimX * how->gridDimY * how->gridDimZ,
                    (double)how->blockDimX * how->blockDimY * how->blockDimZ);
}
#define LAUNCHES(name, ...) \
    CUresult name(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, \
                  unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared, \
                  CUstream stream, __VA_ARGS__) { \
        return launched((double)grid_x * grid_y * grid_z, (double)block_x * block_y * block_z); \
    }
LAUNCHES(cuLaunchKernel, void **values, void **more)
LAUNCHES(cuLaunchCooperativeKernel, void **values)
SAYS(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *count, CUfunction function, int threads, size_t shared),
     *count = 2048 / (threads > 0 ? threads : 1))
SAYS(cuOccupancyMaxActiveClusters, (int *count, CUfunction function, const CUlaunchConfig *how), *count = 1)

/* Errors. */

SAYS(cuGetErrorString, (CUresult error, const char **words), *words = words_of(error))
SAYS(cuGetErrorName, (CUresult error, const char **name), *name = name_of(error))
