/* NVIDIA's management library (libnvidia-ml), which sees every card, whatever a process is allowed to use. */
#include "card.h"
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stdio.h>
#include <string.h>

static const struct card *card_of(nvmlDevice_t device) { return (const struct card *)device; }
static int number_of(nvmlDevice_t device) { return (int)(card_of(device) - machine()->card); }
static nvmlReturn_t answer(nvmlDevice_t device) { return card_of(device)->gone ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS; }
static nvmlReturn_t text(char *to, unsigned int room, const char *words) {
    return snprintf(to, room, "%s", words) < (int)room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlInit_v2(void) { return machine() ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED; }
nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int room) {
    return text(version, room, machine()->driver);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = machine()->driver_version;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = machine()->cards;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int number, nvmlDevice_t *device) {
    if (number >= (unsigned int)machine()->cards) return NVML_ERROR_INVALID_ARGUMENT;
    *device = (nvmlDevice_t)&machine()->card[number];
    return answer(*device);
}
static nvmlReturn_t handle(nvmlDevice_t *device, const char *wanted, bool by_slot) {
    for (int i = 0; i < machine()->cards; i++) {
        const struct card *one = &machine()->card[i];
        /* Slots are written with four digits of the domain, or with eight. */
        const char *slot = strchr(wanted, ':');
        bool is = by_slot ? slot && !strcmp(strchr(one->pci, ':'), slot) : !strcmp(one->uuid, wanted);
        if (is) return nvmlDeviceGetHandleByIndex_v2(i, device);
    }
    return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) { return handle(device, uuid, false); }
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *slot, nvmlDevice_t *device) {
    return handle(device, slot, true);
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int room) {
    nvmlReturn_t error = answer(device);
    return error ? error : text(name, room, card_of(device)->name);
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int room) {
    return text(uuid, room, card_of(device)->uuid);
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    *info = (nvmlPciInfo_t){.bus = number_of(device) + 1};
    snprintf(info->busId, sizeof info->busId, "0000%s", card_of(device)->pci);
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%s", card_of(device)->pci);
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending) {
    return NVML_ERROR_NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    *major = card_of(device)->major, *minor = card_of(device)->minor;
    return answer(device);
}
static uint64_t used(nvmlDevice_t device) {
    struct machine *locked = lock();
    uint64_t found = used_bytes(locked, number_of(device));
    unlock();
    return found;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    const struct card *card = card_of(device);
    memory->total = card->marketed_bytes;
    memory->used = used(device) + card->marketed_bytes - card->total_bytes;
    memory->free = memory->total - memory->used;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    const struct card *card = card_of(device);
    memory->total = card->marketed_bytes;
    memory->reserved = card->marketed_bytes - card->total_bytes;
    memory->used = used(device);
    memory->free = memory->total - memory->reserved - memory->used;
    return answer(device);
}
/* Who holds a card: the first `room` of them, and how many there are. */
static unsigned int holders(nvmlDevice_t device, struct process *shown, unsigned int room) {
    struct machine *locked = lock();
    int card = number_of(device);
    unsigned int found = 0;
    used_bytes(locked, card); /* forgets who has ended */
    for (int i = 0; i < MOST_PROCESSES; i++)
        if (locked->process[i].pid && locked->process[i].has_context[card] && found++ < room)
            shown[found - 1] = locked->process[i];
    uint64_t taken = locked->card[card].taken_bytes; /* by a process of another container */
    if (taken && found++ < room) {
        shown[found - 1] = (struct process){.pid = 1};
        shown[found - 1].held_bytes[card] = taken;
    }
    unlock();
    return found;
}
static nvmlReturn_t listed(unsigned int found, unsigned int *count) {
    bool fits = found <= *count;
    *count = found;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *shown) {
    struct process of[MOST_PROCESSES + 1];
    unsigned int found = holders(device, of, MOST_PROCESSES + 1);
    for (unsigned int i = 0; i < found && i < *count; i++)
        shown[i] = (nvmlProcessInfo_t){.pid = of[i].pid, .usedGpuMemory = of[i].held_bytes[number_of(device)],
                                       .gpuInstanceId = ~0u, .computeInstanceId = ~0u};
    return listed(found, count);
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *shown) {
    struct process of[MOST_PROCESSES + 1];
    unsigned int found = holders(device, of, MOST_PROCESSES + 1);
    for (unsigned int i = 0; i < found && i < *count; i++)
        shown[i] = (nvmlProcessInfo_v1_t){.pid = of[i].pid, .usedGpuMemory = of[i].held_bytes[number_of(device)]};
    return listed(found, count);
}
nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    *milliwatts = 1000u * card_of(device)->power_limit_watts;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    return nvmlDeviceGetPowerManagementLimit(device, milliwatts);
}
nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    *milliwatts = 1000u * card_of(device)->default_power_limit_watts;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    *milliwatts = 500u * card_of(device)->power_limit_watts;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    *mhz = type == NVML_CLOCK_MEM ? card_of(device)->memory_clock_mhz : card_of(device)->clock_mhz;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    *mhz = type == NVML_CLOCK_MEM ? card_of(device)->memory_clock_mhz : card_of(device)->most_clock_mhz;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    *reasons = card_of(device)->throttle_reasons;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *degrees) {
    *degrees = card_of(device)->temperature;
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *shown) {
    *shown = (nvmlUtilization_t){0};
    return answer(device);
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *state) {
    *state = card_of(device)->link_generation ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return card_of(device)->link_generation ? answer(device) : NVML_ERROR_NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type) {
    return NVML_ERROR_NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *info) {
    return NVML_ERROR_NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info) {
    return NVML_ERROR_NOT_SUPPORTED;
}
const char *nvmlErrorString(nvmlReturn_t error) {
    return error == NVML_SUCCESS              ? "Success"
           : error == NVML_ERROR_GPU_IS_LOST  ? "GPU is lost"
           : error == NVML_ERROR_NOT_FOUND    ? "Not Found"
           : error == NVML_ERROR_NOT_SUPPORTED ? "Not Supported"
                                              : "Unknown Error";
}
