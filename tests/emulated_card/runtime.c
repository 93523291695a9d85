/* CUDA's runtime (libcudart): what torch, bitsandbytes and DeepSpeed ask of it. */
#define _GNU_SOURCE
#include "card.h"
#include "kernels.h"
#include "memory.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define current (*current_device())
static __thread cudaError_t last;

/* A call's result, remembered as the runtime does. An error of the card itself stays. */
static cudaError_t result(cudaError_t error) {
    cudaError_t of_card = visible_cards() ? (cudaError_t)error_of_call(current) : cudaErrorNoDevice;
    if (error == cudaSuccess) error = of_card;
    if (error != cudaSuccess) {
        last = error;
        say("error %d", (int)error);
    }
    return error;
}

static bool exists(int device) { return device >= 0 && device < visible_cards(); }

/* A function that says or notes something, and fails only if the card does; and such a one of a device. */
#define SAYS(name, parameters, ...) cudaError_t name parameters { __VA_ARGS__; return result(cudaSuccess); }
#define SAYS_OF_DEVICE(name, parameters, ...) \
    cudaError_t name parameters { \
        if (!exists(device)) return last = cudaErrorInvalidDevice; \
        __VA_ARGS__; \
        return result(cudaSuccess); \
    }

/* Devices. */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = visible_cards();
    if (machine()->driver_version / 1000 < CUDART_VERSION / 1000) return last = cudaErrorInsufficientDriver;
    return *count ? cudaSuccess : (last = cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
    if (!exists(device)) return last = visible_cards() ? cudaErrorInvalidDevice : cudaErrorNoDevice;
    current = device;
    need_context(device);
    return result(cudaSuccess);
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = machine()->driver_version;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) { /* also on a card that has failed: torch asks while it handles that */
    *device = current;
    return cudaSuccess;
}
SAYS(cudaDeviceSynchronize, (void), wait_for_card(current))
SAYS(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), *least = 0, *greatest = -5)
SAYS(cudaDeviceCanAccessPeer, (int *can, int device, int peer),
     *can = exists(device) && exists(peer) && device != peer && card_of(device)->link_generation)
SAYS_OF_DEVICE(cudaDeviceGetAttribute, (int *value, enum cudaDeviceAttr attribute, int device),
               *value = attribute_of(card_of(device), attribute))
SAYS_OF_DEVICE(cudaDeviceGetPCIBusId, (char *text, int room, int device),
               snprintf(text, room, "%s", card_of(device)->pci))
SAYS_OF_DEVICE(cudaGetDeviceProperties, (struct cudaDeviceProp *shown, int device),
    const struct card *card = card_of(device);
    *shown = (struct cudaDeviceProp){
        .totalGlobalMem = card->total_bytes, .totalConstMem = 65536, .l2CacheSize = card->l2_bytes,
        .major = card->major, .minor = card->minor, .multiProcessorCount = card->multiprocessors,
        .warpSize = 32, .maxThreadsPerBlock = 1024, .maxBlocksPerMultiProcessor = 32,
        .maxThreadsPerMultiProcessor = attribute_of(card, cudaDevAttrMaxThreadsPerMultiProcessor),
        .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535},
        .regsPerBlock = 65536, .regsPerMultiprocessor = 65536,
        .sharedMemPerBlock = 48 * 1024, .sharedMemPerBlockOptin = card->shared_per_block,
        .sharedMemPerMultiprocessor = card->shared_per_multiprocessor, .reservedSharedMemPerBlock = 1024,
        .memoryBusWidth = card->bus_bits, .pciBusID = attribute_of(card, cudaDevAttrPciBusId), .asyncEngineCount = 3,
        .canMapHostMemory = 1, .concurrentKernels = 1, .ECCEnabled = 1, .unifiedAddressing = 1,
        .streamPrioritiesSupported = 1, .managedMemory = 1, .concurrentManagedAccess = 1, .cooperativeLaunch = 1,
        .hostRegisterSupported = 1, .memoryPoolsSupported = 1, .clusterLaunch = card->major >= 9,
    };
    snprintf(shown->name, sizeof shown->name, "%s", card->name);
    uuid_of(card, (unsigned char *)shown->uuid.bytes))

/* Errors, in the runtime's words. */

const char *cudaGetErrorString(cudaError_t error) { return words_of(error); }
const char *cudaGetErrorName(cudaError_t error) { return name_of(error); }
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void) {
    cudaError_t found = last;
    last = cudaSuccess;
    return found;
}

/* Memory. */

static cudaError_t taken(void **to, enum place place, size_t bytes) {
    cudaError_t error = result(cudaSuccess);
    if (error) return error;
    *to = take_block(place, current, bytes);
    return result(*to ? cudaSuccess : cudaErrorMemoryAllocation);
}
static cudaError_t dropped(void *start, enum place place) {
    return result(!start || drop_block(start, place) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMalloc(void **to, size_t bytes) { return taken(to, DEVICE, bytes); }
cudaError_t cudaMallocAsync(void **to, size_t bytes, cudaStream_t stream) { return taken(to, DEVICE, bytes); }
cudaError_t cudaMallocManaged(void **to, size_t bytes, unsigned int flags) { return taken(to, MANAGED, bytes); }
cudaError_t cudaHostAlloc(void **to, size_t bytes, unsigned int flags) { return taken(to, PINNED, bytes); }
cudaError_t cudaFree(void *start) {
    need_context(current);
    return dropped(start, DEVICE);
}
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return dropped(start, DEVICE); }
cudaError_t cudaFreeHost(void *start) { return dropped(start, PINNED); }
cudaError_t cudaHostUnregister(void *start) { return dropped(start, REGISTERED); }
cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned int flags) {
    return result(note_block(start, bytes) ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    need_context(current);
    uint64_t used = used_bytes(lock(), visible_card(current));
    unlock();
    *total = card_of(current)->total_bytes;
    *left = used < *total ? *total - used : 0;
    return result(cudaSuccess);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *shown, const void *address) {
    struct block found = block_at(address);
    static const enum cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice,
                                                cudaMemoryTypeManaged, cudaMemoryTypeHost, cudaMemoryTypeHost};
    *shown = (struct cudaPointerAttributes){.type = types[found.place], .device = found.device};
    if (found.place) shown->devicePointer = (void *)address;
    if (found.place != DEVICE) shown->hostPointer = (void *)address;
    return result(cudaSuccess);
}
static const void *of_many[2][64]; /* torch's kernels that find whether any of many is true, and whether all are */
static cudaError_t moved(void *to, const void *from, size_t bytes) {
    static const void *numbers[4096]; /* where the program put a single number, by the place of its block */
#define NUMBER(address) numbers[(uintptr_t)(address) / 512 % 4096]
    enum place source = block_at(from).place, target = block_at(to).place;
    copy(to, from, bytes);
    bool crosses = (source == DEVICE) != (target == DEVICE);
    /* Kernels compute nothing, so a question to the card must be answered here. README.md says how. */
    if (bytes == 1 && crosses && source == DEVICE) *(char *)to = !any_asked, any_asked = false;
    if (bytes == 4 && crosses && target == DEVICE) NUMBER(to) = to;
    else if (bytes == 4 && crosses && NUMBER(from) != from) memset(to, 0, bytes);
    const struct card *card = card_of(current);
    work(current, 0, 0, bytes * (crosses ? card->bytes_per_second / card->link_bytes_per_second : 2.0));
    return result(cudaSuccess);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return moved(to, from, bytes);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    wait_for_card(current);
    return moved(to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t bytes, cudaStream_t stream) {
    return moved(to, from, bytes);
}
SAYS(cudaMemcpy2DAsync, (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind, cudaStream_t stream),
     for (size_t row = 0; row < height; row++)
         copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width))
SAYS(cudaMemset, (void *start, int value, size_t bytes),
     if (bytes <= MIB) memset(start, value, bytes); work(current, 0, 0, bytes))
SAYS(cudaMemsetAsync, (void *start, int value, size_t bytes, cudaStream_t stream), cudaMemset(start, value, bytes))
SAYS(cudaDeviceGetDefaultMemPool, (cudaMemPool_t *pool, int device), *pool = (cudaMemPool_t)(uintptr_t)(device + 1))
SAYS(cudaMemPoolGetAttribute, (cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value), *(uint64_t *)value = 0)

/* Streams and events. Work is done when it is asked for, so all of it is in order, and an event is a moment. */

struct CUstream_st {
    int device, priority;
    enum cudaStreamCaptureStatus capture;
    unsigned long long capture_id;
};
struct CUevent_st {
    double at;
    int device;
};
static struct CUstream_st usual; /* the stream with no name */

static struct CUstream_st *stream_of(cudaStream_t stream) { return (uintptr_t)stream < 16 ? &usual : stream; }
static int device_of(cudaStream_t stream) { return stream_of(stream) == &usual ? current : stream->device; }

SAYS(cudaStreamCreateWithPriority, (cudaStream_t *stream, unsigned int flags, int priority),
     *stream = calloc(1, sizeof **stream), (*stream)->device = current, (*stream)->priority = priority)
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
SAYS(cudaStreamDestroy, (cudaStream_t stream), if (stream_of(stream) != &usual) free(stream))
SAYS(cudaStreamSynchronize, (cudaStream_t stream), wait_for_card(device_of(stream)))
SAYS(cudaStreamGetPriority, (cudaStream_t stream, int *priority), *priority = stream_of(stream)->priority)
SAYS(cudaStreamAddCallback, (cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned int flags),
     call(stream, cudaSuccess, data))
SAYS(cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t call, void *data), call(data))
SAYS(cudaEventCreateWithFlags, (cudaEvent_t *event, unsigned int flags), *event = calloc(1, sizeof **event))
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
SAYS(cudaEventDestroy, (cudaEvent_t event), free(event))
SAYS(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream),
     event->device = device_of(stream), event->at = clock_seconds(event->device))
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    return cudaEventRecord(event, stream);
}
SAYS(cudaEventSynchronize, (cudaEvent_t event), wait_for_card(event->device))
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = (float)(1e3 * (to->at - from->at));
    return result(from->device == to->device ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

/* Graphs: what is captured is done at once, and a launch of it does nothing more. */

static unsigned long long captures;

SAYS(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode),
     stream_of(stream)->capture = cudaStreamCaptureStatusActive, stream_of(stream)->capture_id = ++captures)
SAYS(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph),
     stream_of(stream)->capture = cudaStreamCaptureStatusNone, *graph = calloc(1, 64))
SAYS(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status),
     *status = stream_of(stream)->capture)
SAYS(cudaStreamGetCaptureInfo, (cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                size_t *count),
     if (status) *status = stream_of(stream)->capture;
     if (id) *id = stream_of(stream)->capture_id;
     if (graph) *graph = NULL; if (nodes) *nodes = NULL; if (edges) *edges = NULL; if (count) *count = 0)
SAYS(cudaGraphGetNodes, (cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count), *count = 0)
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return result(error_of_launch(current)); }

/* Kernels. */

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configured;

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared;
    *(cudaStream_t *)stream = configured.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *wrapper) { return (void **)kernels_of(wrapper); }
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *size) {
    static int found[2];
    bool all = strstr(name, "15and_kernel_cuda"), any = strstr(name, "14or_kernel_cuda") || strstr(name, "OrFunctorIb");
    if ((all || any) && found[all] < 64) of_many[all][found[all]++] = host;
    note_kernel(host, (struct image *)handle);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
static cudaError_t launched(const void *function, dim3 grid, dim3 block) {
    need_context(current);
    const struct card *card = card_of(current);
    if (!architecture_of(function, card->major, card->minor)) return result(cudaErrorNoKernelImageForDevice);
    for (int i = 0; i < 64; i++) any_asked = function == of_many[0][i] || (any_asked && function != of_many[1][i]);
    double threads = (double)grid.x * grid.y * grid.z * block.x * block.y * block.z;
    work(current, 0, 0, 16 * threads); /* four bytes, four times: most kernels read and write vectors */
    return result(error_of_launch(current));
}
#define LAUNCHES(name, type) \
    cudaError_t name(type function, dim3 grid, dim3 block, void **values, size_t shared, cudaStream_t stream) { \
        return launched(function, grid, block); \
    }
LAUNCHES(cudaLaunchKernel, const void *)
LAUNCHES(cudaLaunchCooperativeKernel, const void *)
LAUNCHES(__cudaLaunchKernel, cudaKernel_t)
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **values) {
    return launched(function, how->gridDim, how->blockDim);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *shown, const void *function) {
    int code = architecture_of(function, card_of(current)->major, card_of(current)->minor);
    *shown = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = code, .ptxVersion = code};
    return result(code ? cudaSuccess : cudaErrorNoKernelImageForDevice);
}
SAYS(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *count, const void *function, int threads, size_t shared),
     *count = 2048 / (threads > 0 ? threads : 1))
SAYS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
     (int *count, const void *function, int threads, size_t shared, unsigned int flags),
     *count = 2048 / (threads > 0 ? threads : 1))
SAYS(cudaGetSymbolAddress, (void **address, const void *symbol), static char values[1 << 20]; *address = values)

/* The driver's functions, by their names. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    char second[128]; /* a later form of the function, which the headers give the old name */
    snprintf(second, sizeof second, "%s_v2", symbol);
    *function = dlsym(driver, second);
    if (!*function) *function = dlsym(driver, symbol);
    if (!*function) say("the driver has no %s", symbol);
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return result(cudaSuccess);
}
