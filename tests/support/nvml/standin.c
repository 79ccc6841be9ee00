/* A stand-in for libnvidia-ml.so.1: the entry points pynvml uses, over a world described in a small text file.
 *
 * The file is named by the environment variable NVML_STANDIN and read again at every call, so that a test changes the
 * world while the program under test runs. One "key value" per line; see NvmlWorld in __init__.py, which writes it.
 * A call that "hangs" sleeps in the kernel until the file no longer says so.
 *
 * "load hang", "load abort", "load crash", "load exit" and "load fork" (a process that stays) happen in the library's
 * constructor, that is while it is being loaded. "init_do" does the same in nvmlInit, but for the hang.
 *
 * -DOLD_DRIVER leaves out what drivers before 510 do not have: memory info version 2 and nvmlDeviceGetTemperatureV.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25
};
#define MAX_GPUS 16
#define MAX_PROCESSES 32
#define MAX_XIDS 64
#define XID_EVENT 8ull

typedef struct { unsigned pid; unsigned long long memory; } process_t;
typedef struct {
    char uuid[96], name[96], unsupported[256];
    unsigned long long total, used, reserved;
    int utilization, temperature, minor, error, hang, processes, mig;
    unsigned long long ecc, reasons;
    process_t process[MAX_PROCESSES];
} gpu_t;
typedef struct { int gpu; unsigned long long code; } xid_t;
typedef struct {
    int init, hang, init_hang, devices, xids;
    xid_t xid[MAX_XIDS]; /* all that ever happened, oldest first */
    char driver[80], load[16], init_do[16];
    gpu_t gpu[MAX_GPUS];
} world_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned version; unsigned sensor; int temperature; } temperature_t;
typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute; } process_info_t;
typedef struct { void *device; unsigned long long type, data; unsigned instance, compute; } event_data_t;
typedef struct { char registered[MAX_GPUS]; int seen; } event_set_t;
typedef struct {
    char legacy[16]; unsigned domain, bus, device, pci_device, pci_subsystem; char bus_id[32];
} pci_info_t;

static atomic_int started;
static char devices[MAX_GPUS]; /* a handle is the address of one of these */

static void text(char *target, size_t size, const char *value) { snprintf(target, size, "%s", value); }

static void gpu_line(gpu_t *gpu, const char *key, const char *value) {
    if (!strcmp(key, "uuid")) text(gpu->uuid, sizeof gpu->uuid, value);
    else if (!strcmp(key, "name")) text(gpu->name, sizeof gpu->name, value);
    else if (!strcmp(key, "unsupported")) text(gpu->unsupported, sizeof gpu->unsupported, value);
    else if (!strcmp(key, "total")) gpu->total = strtoull(value, NULL, 10);
    else if (!strcmp(key, "used")) gpu->used = strtoull(value, NULL, 10);
    else if (!strcmp(key, "reserved")) gpu->reserved = strtoull(value, NULL, 10);
    else if (!strcmp(key, "utilization")) gpu->utilization = atoi(value);
    else if (!strcmp(key, "temperature")) gpu->temperature = atoi(value);
    else if (!strcmp(key, "minor")) gpu->minor = atoi(value);
    else if (!strcmp(key, "error")) gpu->error = atoi(value);
    else if (!strcmp(key, "hang")) gpu->hang = atoi(value);
    else if (!strcmp(key, "mig")) gpu->mig = atoi(value);
    else if (!strcmp(key, "ecc")) gpu->ecc = strtoull(value, NULL, 10);
    else if (!strcmp(key, "reasons")) gpu->reasons = strtoull(value, NULL, 10);
    else if (!strcmp(key, "process") && gpu->processes < MAX_PROCESSES) {
        process_t *process = &gpu->process[gpu->processes];
        if (sscanf(value, "%u %llu", &process->pid, &process->memory) == 2) gpu->processes++;
    }
}

static int load(world_t *world) {
    const char *path = getenv("NVML_STANDIN");
    FILE *file = path ? fopen(path, "re") : NULL;
    char line[512];
    memset(world, 0, sizeof *world);
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        char *value = strchr(line, ' ');
        int index;
        char key[64];
        if (!value) continue;
        *value++ = 0;
        value[strcspn(value, "\n")] = 0;
        if (sscanf(line, "gpu.%d.%63s", &index, key) == 2) {
            if (index >= 0 && index < MAX_GPUS) gpu_line(&world->gpu[index], key, value);
        }
        else if (!strcmp(line, "init")) world->init = atoi(value);
        else if (!strcmp(line, "init_hang")) world->init_hang = atoi(value);
        else if (!strcmp(line, "hang")) world->hang = atoi(value);
        else if (!strcmp(line, "devices")) world->devices = atoi(value);
        else if (!strcmp(line, "xid") && world->xids < MAX_XIDS) {
            xid_t *xid = &world->xid[world->xids];
            if (sscanf(value, "%d %llu", &xid->gpu, &xid->code) == 2) world->xids++;
        }
        else if (!strcmp(line, "load")) text(world->load, sizeof world->load, value);
        else if (!strcmp(line, "init_do")) text(world->init_do, sizeof world->init_do, value);
        else if (!strcmp(line, "driver")) text(world->driver, sizeof world->driver, value);
    }
    fclose(file);
    if (world->devices > MAX_GPUS) world->devices = MAX_GPUS;
    return 1;
}

static void nap(void) {
    struct timespec rest = {0, 10 * 1000 * 1000};
    nanosleep(&rest, NULL);
}

static void misbehave(const char *how) {
    if (!strcmp(how, "abort")) abort();
    if (!strcmp(how, "crash")) raise(SIGSEGV);
    if (!strcmp(how, "exit")) exit(7);
    if (!strcmp(how, "fork") && fork() == 0) { alarm(30); pause(); _exit(0); }
}

__attribute__((constructor)) static void loaded(void) {
    world_t world;
    while (load(&world) && !strcmp(world.load, "hang")) nap();
    misbehave(world.load);
}

/* The state of the world for a call on the library as a whole, after any hang. */
static int library(world_t *world) {
    do {
        if (!load(world)) return DRIVER_NOT_LOADED;
        if (world->hang) nap();
    } while (world->hang);
    if (!atomic_load(&started)) return UNINITIALIZED;
    return world->init; /* a driver that goes away under a running program fails every call */
}

/* The same for a call on one device; *gpu is set unless the result is an error. */
static int device(void *handle, world_t *world, gpu_t **gpu) {
    ptrdiff_t index = (char *)handle - devices;
    int result;
    for (;;) {
        if ((result = library(world)) != SUCCESS) return result;
        if (index < 0 || index >= world->devices) return INVALID_ARGUMENT;
        if (!world->gpu[index].hang) break;
        nap();
    }
    *gpu = &world->gpu[index];
    return (*gpu)->error;
}

static int unsupported(const gpu_t *gpu, const char *what) {
    size_t size = strlen(what);
    for (const char *at = gpu->unsupported; (at = strstr(at, what)); at += size) {
        int begins = at == gpu->unsupported || at[-1] == ',';
        if (begins && (at[size] == 0 || at[size] == ',')) return 1;
    }
    return 0;
}

#define DEVICE(handle, what)                                            \
    world_t world;                                                      \
    gpu_t *gpu = NULL;                                                  \
    int result = device(handle, &world, &gpu);                          \
    if (result != SUCCESS) return result;                               \
    if (unsupported(gpu, what)) return NOT_SUPPORTED

int nvmlInitWithFlags(unsigned flags) {
    world_t world;
    (void)flags;
    do {
        if (!load(&world)) return DRIVER_NOT_LOADED;
        if (world.init_hang) nap();
    } while (world.init_hang);
    misbehave(world.init_do);
    if (world.init != SUCCESS) return world.init;
    atomic_fetch_add(&started, 1);
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    int count = atomic_load(&started);
    while (count > 0)
        if (atomic_compare_exchange_weak(&started, &count, count - 1)) return SUCCESS;
    return UNINITIALIZED;
}

const char *nvmlErrorString(int code) {
    static _Thread_local char line[64];
    snprintf(line, sizeof line, "stand-in error %d", code);
    return line;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    world_t world;
    int result = library(&world);
    if (result == SUCCESS) text(version, length, world.driver);
    return result;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    world_t world;
    int result = library(&world);
    if (result == SUCCESS) *count = (unsigned)world.devices;
    return result;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    world_t world;
    int result = library(&world);
    if (result != SUCCESS) return result;
    if ((int)index >= world.devices) return INVALID_ARGUMENT;
    if (world.gpu[index].error == GPU_IS_LOST) return GPU_IS_LOST;
    *handle = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    DEVICE(handle, "uuid");
    text(uuid, length, gpu->uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    DEVICE(handle, "name");
    text(name, length, gpu->name);
    return SUCCESS;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    DEVICE(handle, "index");
    *index = (unsigned)((char *)handle - devices);
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) {
    DEVICE(handle, "minor");
    *minor = (unsigned)gpu->minor;
    return SUCCESS;
}

/* As the real one: version 1 counts the driver's reserve as used. */
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    DEVICE(handle, "memory");
    memory->total = gpu->total;
    memory->used = gpu->used + gpu->reserved;
    memory->free = memory->used < gpu->total ? gpu->total - memory->used : 0;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *rates) {
    DEVICE(handle, "utilization");
    rates->gpu = (unsigned)gpu->utilization;
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *temperature) {
    DEVICE(handle, "temperature");
    (void)sensor;
    *temperature = (unsigned)gpu->temperature;
    return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    DEVICE(handle, "memory");
    if (unsupported(gpu, "memory_v2")) return NOT_SUPPORTED;
    if (memory->version != (sizeof(memory_v2_t) | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memory->total = gpu->total;
    memory->used = gpu->used;
    memory->reserved = gpu->reserved;
    memory->free = gpu->used + gpu->reserved < gpu->total ? gpu->total - gpu->used - gpu->reserved : 0;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureV(void *handle, temperature_t *temperature) {
    DEVICE(handle, "temperature");
    if (temperature->version != (sizeof(temperature_t) | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    temperature->temperature = gpu->temperature;
    return SUCCESS;
}
#endif

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_info_t *infos) {
    DEVICE(handle, "processes");
    unsigned room = *count;
    *count = (unsigned)gpu->processes;
    if (!gpu->processes) return SUCCESS;
    if (room < *count || !infos) return INSUFFICIENT_SIZE;
    for (int i = 0; i < gpu->processes; i++)
        infos[i] = (process_info_t){gpu->process[i].pid, gpu->process[i].memory, 0xffffffff, 0xffffffff};
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    DEVICE(handle, "mig");
    *current = *pending = (unsigned)gpu->mig;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned type, unsigned counter, unsigned long long *count) {
    DEVICE(handle, "ecc");
    *count = type == 1 && counter == 0 ? gpu->ecc : 0; /* uncorrected, volatile */
    return SUCCESS;
}

static int reasons_of(void *handle, unsigned long long *reasons) {
    DEVICE(handle, "reasons");
    *reasons = gpu->reasons;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    return reasons_of(handle, reasons);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    return reasons_of(handle, reasons);
}
#endif

/* GPU n sits at 0000:(16 + n):00.0. */
int nvmlDeviceGetPciInfo_v3(void *handle, pci_info_t *pci) {
    DEVICE(handle, "pci");
    memset(pci, 0, sizeof *pci);
    pci->bus = 16 + (unsigned)((char *)handle - devices);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    return SUCCESS;
}

int nvmlEventSetCreate(event_set_t **set) {
    world_t world;
    int result = library(&world);
    if (result != SUCCESS) return result;
    *set = calloc(1, sizeof **set);
    (*set)->seen = world.xids; /* what was before is not told */
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, event_set_t *set) {
    DEVICE(handle, "events");
    if (!(types & XID_EVENT)) return NOT_SUPPORTED;
    set->registered[(char *)handle - devices] = 1;
    return SUCCESS;
}

int nvmlEventSetWait_v2(event_set_t *set, event_data_t *data, unsigned milliseconds) {
    world_t world;
    int result = library(&world);
    (void)milliseconds; /* nobody here waits */
    if (result != SUCCESS) return result;
    while (set->seen < world.xids) {
        xid_t *xid = &world.xid[set->seen++];
        if (xid->gpu < 0 || xid->gpu >= world.devices || !set->registered[xid->gpu]) continue;
        *data = (event_data_t){&devices[xid->gpu], XID_EVENT, xid->code, 0xffffffff, 0xffffffff};
        return SUCCESS;
    }
    return TIMEOUT;
}

int nvmlEventSetFree(event_set_t *set) {
    free(set);
    return SUCCESS;
}
