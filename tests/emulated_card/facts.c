/* Facts of cards and errors, which CUDA's runtime and its driver number alike. */
#include "card.h"
#include <driver_types.h>
#include <stdio.h>
#include <stdlib.h>

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
            if (card->major == 7 && card->minor == 5) return 1024;
            return (card->major == 8 && card->minor) || card->major == 12 ? 1536 : 2048;
        case cudaDevAttrPciBusId: return (int)strtol(card->pci + sizeof "0000:" - 1, NULL, 16);
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
        case cudaDevAttrMemoryPoolSupportedHandleTypes: case 128: /* fabric */ case 132: return 0; /* multicast */
        case 102: /* virtual memory management */ return !card->lacks_virtual_memory;
        default: return 1;
    }
}

/* A UUID's digits, after "GPU-" or "MIG-". */
void uuid_of(const struct card *card, unsigned char bytes[16]) {
    const char *at = card->uuid + 4;
    for (int i = 0; i < 16; i++, at += 2) {
        if (*at == '-') at++;
        sscanf(at, "%2hhx", bytes + i);
    }
}

#define ERROR(error, words) {error, #error, words}
static const struct error {
    int number;
    const char *name, *words;
} errors[] = {
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    ERROR(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    ERROR(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorUnknown, "unknown error"),
};

static const struct error *found(int number) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].number == number) return errors + i;
    say("error %d has no words here", number);
    static const struct error unknown = {0, "unrecognized error code", "unrecognized error code"};
    return &unknown;
}
const char *words_of(int error) { return found(error)->words; }
const char *name_of(int error) { return found(error)->name; }
