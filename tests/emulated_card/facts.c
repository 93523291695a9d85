/* Facts of cards and errors, which CUDA's runtime and its driver number alike. */
#include "card.h"
#include <driver_types.h>

int attribute_of(const struct card *card, int attribute) {
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return 2147483647;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * 1024;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return card->shared_per_block;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return card->shared_per_multiprocessor;
        case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
        case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrMultiProcessorCount: return card->multiprocessors;
        case cudaDevAttrMaxThreadsPerMultiProcessor: /* CUDA programming guide, technical specifications */
            return card->major == 7 && card->minor == 5 ? 1024 : card->major == 8 && card->minor ? 1536 : 2048;
        case cudaDevAttrL2CacheSize: return card->l2_bytes;
        case cudaDevAttrGlobalMemoryBusWidth: return card->bus_bits;
        case cudaDevAttrClockRate: return card->most_clock_mhz * 1000;
        case cudaDevAttrMemoryClockRate: return card->memory_clock_mhz * 1000;
        case cudaDevAttrComputeCapabilityMajor: return card->major;
        case cudaDevAttrComputeCapabilityMinor: return card->minor;
        case cudaDevAttrClusterLaunch: return card->major >= 9;
        case cudaDevAttrIntegrated: case cudaDevAttrKernelExecTimeout: case cudaDevAttrComputeMode:
        case cudaDevAttrTccDriver: case cudaDevAttrPageableMemoryAccess: case cudaDevAttrIsMultiGpuBoard:
        case cudaDevAttrPciDomainId: case cudaDevAttrPciDeviceId: case cudaDevAttrMpsEnabled:
        case cudaDevAttrMemoryPoolSupportedHandleTypes: case 128: /* fabric handles */ case 132: /* multicast */ return 0;
        default: return 1;
    }
}

static const struct {
    int error;
    const char *name, *words;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

static int place_of(int error) {
    for (int i = 0; i < (int)(sizeof errors / sizeof *errors); i++)
        if (errors[i].error == error) return i;
    return -1;
}
const char *words_of(int error) {
    if (place_of(error) < 0) say("error %d has no words here", error);
    return place_of(error) < 0 ? "unrecognized error code" : errors[place_of(error)].words;
}
const char *name_of(int error) { return place_of(error) < 0 ? "unrecognized error code" : errors[place_of(error)].name; }
