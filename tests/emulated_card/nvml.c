/* NVIDIA's management library (libnvidia-ml), which sees every card, whatever a process is allowed to use. */
#include "card.h"
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stdio.h>
#include <string.h>

static const struct card *of(nvmlDevice_t device) { return (const struct card *)device; }
static int place_of(nvmlDevice_t device) { return (int)(of(device) - machine()->card); }
static nvmlDevice_t device_at(int place) { return (nvmlDevice_t)&machine()->card[place]; }
static nvmlReturn_t answer(nvmlDevice_t device) { return of(device)->gone ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS; }
static nvmlReturn_t text(char *to, unsigned int room, const char *words) {
    return snprintf(to, room, "%s", words) < (int)room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlInit_v2(void) { return machine() ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED; }
nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { return nvmlInit_v2(); }
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int room) {
    return text(version, room, machine()->driver);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = machine()->driver_version;
    return NVML_SUCCESS;
}

/* Devices: cards come first, in the order of their slots, and their instances after them. */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    for (*count = 0; *count < (unsigned int)machine()->cards && !machine()->card[*count].parent;) ++*count;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int number, nvmlDevice_t *device) {
    unsigned int cards;
    nvmlDeviceGetCount_v2(&cards);
    if (number >= cards) return NVML_ERROR_INVALID_ARGUMENT;
    *device = device_at(number);
    return answer(*device);
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    for (int i = 0; i < machine()->cards; i++)
        if (!strcmp(machine()->card[i].uuid, uuid)) return answer(*device = device_at(i));
    return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *slot, nvmlDevice_t *device) {
    const char *bus = strchr(slot, ':'); /* the domain before it has four digits, or eight */
    for (int i = 0; bus && i < machine()->cards; i++)
        if (!strcmp(strchr(machine()->card[i].pci, ':'), bus)) return answer(*device = device_at(i));
    return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int room) {
    nvmlReturn_t error = answer(device);
    return error ? error : text(name, room, of(device)->name);
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int room) {
    return text(uuid, room, of(device)->uuid);
}

/* What is asked about a whole card; instances have no answer (MIG user guide, "Telemetry"). */
#define OF_CARD(name, parameters, ...) \
    nvmlReturn_t name parameters { \
        if (of(device)->parent) return NVML_ERROR_NOT_SUPPORTED; \
        __VA_ARGS__; \
        return answer(device); \
    }
#define NUMBER(name, type, value) OF_CARD(name, (nvmlDevice_t device, type *shown), *shown = (value))
#define CLOCK(name, processor) \
    OF_CARD(name, (nvmlDevice_t device, nvmlClockType_t type, unsigned int *shown), \
            *shown = type == NVML_CLOCK_MEM ? of(device)->memory_clock_mhz : of(device)->processor)

NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned int, 1000u * of(device)->power_limit_watts)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, 1000u * of(device)->default_power_limit_watts)
NUMBER(nvmlDeviceGetPowerUsage, unsigned int, 500u * of(device)->power_limit_watts)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, of(device)->throttle_reasons)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, of(device)->throttle_reasons)
NUMBER(nvmlDeviceGetUtilizationRates, nvmlUtilization_t, (nvmlUtilization_t){0})
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned int, of(device)->major < 8 ? 0 : 7)
CLOCK(nvmlDeviceGetClockInfo, clock_mhz)
CLOCK(nvmlDeviceGetMaxClockInfo, most_clock_mhz)
OF_CARD(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *major, int *minor),
        *major = of(device)->major, *minor = of(device)->minor)
OF_CARD(nvmlDeviceGetTotalEccErrors, (nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                      unsigned long long *shown),
        *shown = type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED ? of(device)->memory_errors : 0)

/* MIG. */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending) {
    *now = *pending = instance_of(place_of(device), 0) >= 0;
    return *now ? answer(device) : NVML_ERROR_NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int number, nvmlDevice_t *instance) {
    int place = instance_of(place_of(device), number);
    if (place < 0) return NVML_ERROR_NOT_FOUND;
    return answer(*instance = device_at(place));
}

/* Memory, and who holds it. */

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    memory->total = of(device)->marketed_bytes;
    memory->reserved = memory->total - of(device)->total_bytes;
    memory->used = used_bytes(lock(), place_of(device));
    unlock();
    memory->free = memory->total - memory->reserved - memory->used;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlMemory_v2_t of;
    nvmlReturn_t error = nvmlDeviceGetMemoryInfo_v2(device, &of);
    *memory = (nvmlMemory_t){.total = of.total, .free = of.free, .used = of.used + of.reserved};
    return error;
}
/* All that hold a card or instances of it, and how many there are. */
#define MOST_HOLDERS ((MOST_PROCESSES + 1) * MOST_CARDS)
static unsigned int holders(nvmlDevice_t device, nvmlProcessInfo_t *shown) {
    struct machine *locked = lock();
    unsigned int found = 0;
    used_bytes(locked, place_of(device)); /* forgets who has ended */
    for (int place = 0; place < locked->cards; place++) {
        const struct card *card = &locked->card[place];
        if (place != place_of(device) && card->parent != place_of(device) + 1) continue;
        unsigned int instance = card->parent ? place : ~0u;
        if (card->taken_bytes) /* by a process of another container */
            shown[found++] = (nvmlProcessInfo_t){1, card->taken_bytes, instance, instance};
        for (const struct process *one = locked->process; one < locked->process + MOST_PROCESSES; one++)
            if (one->pid && one->has_context[place])
                shown[found++] = (nvmlProcessInfo_t){one->pid, one->held_bytes[place], instance, instance};
    }
    unlock();
    return found;
}
#define HOLDERS(name, type, ...) \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *shown) { \
        nvmlProcessInfo_t all[MOST_HOLDERS]; \
        unsigned int found = holders(device, all), room = *count; \
        *count = found; \
        for (unsigned int i = 0; i < found && i < room; i++) shown[i] = (type){__VA_ARGS__}; \
        return found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE; \
    }
HOLDERS(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, all[i].pid, all[i].usedGpuMemory)
HOLDERS(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t,
        all[i].pid, all[i].usedGpuMemory, all[i].gpuInstanceId, all[i].computeInstanceId)
const char *nvmlErrorString(nvmlReturn_t error) { return error == NVML_SUCCESS ? "Success" : "Unknown Error"; }
