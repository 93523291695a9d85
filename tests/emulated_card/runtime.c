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

static const struct card *card_of(int device) { return &machine()->card[visible_card(device)]; }
static bool exists(int device) { return device >= 0 && device < visible_cards(); }

/* Devices. */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = visible_cards();
    return *count ? cudaSuccess : (last = cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return result(cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
    if (!exists(device)) return last = visible_cards() ? cudaErrorInvalidDevice : cudaErrorNoDevice;
    current = device;
    need_context(device);
    return result(cudaSuccess);
}
cudaError_t cudaDeviceSynchronize(void) {
    wait_for_card(current);
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
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *shown, int device) {
    if (!exists(device)) return last = cudaErrorInvalidDevice;
    const struct card *card = card_of(device);
    *shown = (struct cudaDeviceProp){
        .totalGlobalMem = card->total_bytes,
        .sharedMemPerBlock = 48 * 1024,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .memPitch = 2147483647,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .totalConstMem = 65536,
        .major = card->major,
        .minor = card->minor,
        .textureAlignment = 512,
        .texturePitchAlignment = 32,
        .multiProcessorCount = card->multiprocessors,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .ECCEnabled = 1,
        .pciBusID = visible_card(device) + 1,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .memoryBusWidth = card->bus_bits,
        .l2CacheSize = card->l2_bytes,
        .maxThreadsPerMultiProcessor = attribute_of(card, cudaDevAttrMaxThreadsPerMultiProcessor),
        .streamPrioritiesSupported = 1,
        .globalL1CacheSupported = 1,
        .localL1CacheSupported = 1,
        .sharedMemPerMultiprocessor = card->shared_per_multiprocessor,
        .regsPerMultiprocessor = 65536,
        .managedMemory = 1,
        .concurrentManagedAccess = 1,
        .computePreemptionSupported = 1,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = card->shared_per_block,
        .maxBlocksPerMultiProcessor = 32,
        .reservedSharedMemPerBlock = 1024,
        .hostRegisterSupported = 1,
        .memoryPoolsSupported = 1,
        .clusterLaunch = card->major >= 9,
    };
    snprintf(shown->name, sizeof shown->name, "%s", card->name);
    unsigned char *to = (unsigned char *)shown->uuid.bytes;
    for (const char *at = card->uuid + 4; *at && to < (unsigned char *)shown->uuid.bytes + 16; at++)
        if (*at != '-' && at[1]) sscanf(at++, "%2hhx", to++);
    return result(cudaSuccess);
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    if (!exists(device)) return last = cudaErrorInvalidDevice;
    *value = attribute_of(card_of(device), attribute);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
    if (!exists(device)) return last = cudaErrorInvalidDevice;
    snprintf(text, room, "%s", card_of(device)->pci);
    return result(cudaSuccess);
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = exists(device) && exists(peer) && device != peer && card_of(device)->link_generation;
    return result(cudaSuccess);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return result(cudaSuccess);
}

/* Errors, in the runtime's words. */

const char *cudaGetErrorString(cudaError_t error) { return words_of(error); }
const char *cudaGetErrorName(cudaError_t error) { return name_of(error); }
cudaError_t cudaGetLastError(void) {
    cudaError_t found = last;
    last = cudaSuccess;
    return found;
}
cudaError_t cudaPeekAtLastError(void) { return last; }

/* Memory. */

static cudaError_t given(void **to, void *block) {
    *to = block;
    return result(block ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaMalloc(void **to, size_t bytes) {
    cudaError_t error = result(cudaSuccess);
    return error ? error : given(to, take_block(DEVICE, current, bytes));
}
cudaError_t cudaMallocAsync(void **to, size_t bytes, cudaStream_t stream) { return cudaMalloc(to, bytes); }
cudaError_t cudaMallocManaged(void **to, size_t bytes, unsigned int flags) {
    return given(to, take_block(MANAGED, current, bytes));
}
cudaError_t cudaFree(void *start) {
    need_context(current);
    return result(!start || drop_block(start, DEVICE) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }
cudaError_t cudaHostAlloc(void **to, size_t bytes, unsigned int flags) {
    return given(to, take_block(PINNED, current, bytes));
}
cudaError_t cudaFreeHost(void *start) {
    return result(!start || drop_block(start, PINNED) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned int flags) {
    return result(note_block(start, bytes) ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void *start) {
    return result(drop_block(start, REGISTERED) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    need_context(current);
    struct machine *locked = lock();
    int card = visible_card(current);
    uint64_t used = used_bytes(locked, card);
    *total = locked->card[card].total_bytes;
    *left = used < *total ? *total - used : 0;
    unlock();
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
static cudaError_t moved(void *to, const void *from, size_t bytes) {
    enum place source = block_at(from).place, target = block_at(to).place;
    copy(to, from, bytes);
    /* Kernels compute nothing, so a question to the card must be answered here. What libraries ask by a single byte (is
     * this batch one sequence each, is everything finite) is true in sound training. */
    if (bytes == 1 && source == DEVICE && target != DEVICE) *(char *)to = 1;
    bool crosses = (source == DEVICE) != (target == DEVICE);
    work(current, 0, 0, crosses ? bytes * card_of(current)->bytes_per_second / card_of(current)->link_bytes_per_second
                                : 2.0 * bytes);
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
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return result(cudaSuccess);
}
cudaError_t cudaMemset(void *start, int value, size_t bytes) {
    if (bytes <= MIB) memset(start, value, bytes);
    work(current, 0, 0, bytes);
    return result(cudaSuccess);
}
cudaError_t cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(start, value, bytes);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)(uintptr_t)(device + 1);
    return result(cudaSuccess);
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = 0;
    return result(cudaSuccess);
}

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

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    *stream = calloc(1, sizeof **stream);
    **stream = (struct CUstream_st){.device = current, .priority = priority};
    return result(cudaSuccess);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (stream_of(stream) != &usual) free(stream);
    return result(cudaSuccess);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaDeviceSynchronize(); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return result(cudaSuccess);
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned int flags) {
    call(stream, cudaSuccess, data);
    return result(cudaSuccess);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    call(data);
    return result(cudaSuccess);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    *event = calloc(1, sizeof **event);
    (*event)->device = current;
    return result(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return result(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->at = clock_seconds();
    return result(cudaSuccess);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaDeviceSynchronize(); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = (float)(1e3 * (to->at - from->at));
    return result(cudaSuccess);
}

/* Graphs: what is captured is done at once, and a launch of it does nothing more. */

static unsigned long long captures;
static struct CUstream_st *capturing;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    struct CUstream_st *one = stream_of(stream);
    one->capture = cudaStreamCaptureStatusActive, one->capture_id = ++captures;
    capturing = one;
    return result(cudaSuccess);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    stream_of(stream)->capture = cudaStreamCaptureStatusNone;
    capturing = NULL;
    *graph = calloc(1, 64);
    return result(cudaSuccess);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = stream_of(stream)->capture;
    return result(cudaSuccess);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    struct CUstream_st *one = stream_of(stream);
    if (status) *status = one->capture;
    if (id) *id = one->capture_id;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return result(cudaSuccess);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    *made = calloc(1, 64);
    return result(cudaSuccess);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(made, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    return result((cudaError_t)error_of_launch(current));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return result(cudaSuccess);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    free(graph);
    return result(cudaSuccess);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = 0;
    return result(cudaSuccess);
}

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
    note_kernel(host, (struct image *)handle, name);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
static cudaError_t launched(const void *function, dim3 grid, dim3 block) {
    need_context(current);
    const struct card *card = card_of(current);
    if (!architecture_of(function, card->major, card->minor)) return result(cudaErrorNoKernelImageForDevice);
    work(current, 0, 0, bytes_of_launch(function, (uint64_t)grid.x * grid.y * grid.z, (uint64_t)block.x * block.y * block.z));
    return result((cudaError_t)error_of_launch(current));
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **values, size_t shared,
                             cudaStream_t stream) {
    return launched(function, grid, block);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **values, size_t shared,
                               cudaStream_t stream) {
    return launched(kernel, grid, block);
}
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **values, size_t shared,
                                        cudaStream_t stream) {
    return launched(function, grid, block);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **values) {
    return launched(function, how->gridDim, how->blockDim);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *shown, const void *function) {
    const struct card *card = card_of(current);
    int binary = architecture_of(function, card->major, card->minor);
    *shown = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = binary, .ptxVersion = binary};
    return result(binary ? cudaSuccess : cudaErrorNoKernelImageForDevice);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int threads,
                                                                   size_t shared, unsigned int flags) {
    *count = 2048 / (threads > 0 ? threads : 1);
    return result(cudaSuccess);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, threads, shared, 0);
}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char values[1 << 20];
    *address = values;
    return result(cudaSuccess);
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values,
                                unsigned int count, enum cudaLibraryOption *more, void **more_values,
                                unsigned int more_count) {
    *library = calloc(1, 64);
    return result(cudaSuccess);
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = (cudaKernel_t)library;
    return result(cudaSuccess);
}

/* The driver's functions, by their names. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    char second[128]; /* a later form of the function, which the headers give the old name */
    snprintf(second, sizeof second, "%s_v2", symbol);
    *function = driver ? dlsym(driver, second) : NULL;
    if (driver && !*function) *function = dlsym(driver, symbol);
    if (!*function) say("the driver has no %s", symbol);
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return result(cudaSuccess);
}
