/* A small NVML: the calls that the probe makes, answered from a file that a test writes.
 *
 * The file named by NVML_STUB_FILE holds lines `key value`, read again at every call:
 *   count N, name TEXT or name.I TEXT, driver TEXT, uuid.I TEXT, capability MAJOR MINOR
 *   utilization PERCENT, memory USED TOTAL (bytes), temperature C, power MILLIWATT
 *   mig.I TEXT TEXT ... (UUIDs of the instances of device I; `-` for a gap in their numbers)
 *   sample TIME_US PERCENT (any number of them)
 *   error.CALL CODE (CALL is init, handle, utilization, samples, memory, temperature, power)
 *   sleep_ms N (before each utilization call)
 * A missing value is answered with NVML_ERROR_NOT_SUPPORTED.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

typedef struct { long index; } device_t;
typedef union { double d; unsigned int ui; unsigned long long ull; } value_t;
typedef struct { unsigned long long time_us; value_t value; } sample_t;

static device_t devices[16];

static FILE *open_file(void) {
    const char *path = getenv("NVML_STUB_FILE");
    return path ? fopen(path, "r") : NULL;
}

static int lookup(const char *key, char *value, size_t size) {
    char line[256];
    size_t length = strlen(key);
    FILE *file = open_file();
    int found = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) == 0 && line[length] == ' ') {
            snprintf(value, size, "%s", line + length + 1);
            value[strcspn(value, "\n")] = '\0';
            found = 1;
            break;
        }
    }
    if (file) fclose(file);
    return found;
}

static int error_of(const char *call) {
    char key[64], value[64];
    snprintf(key, sizeof key, "error.%s", call);
    return lookup(key, value, sizeof value) ? atoi(value) : SUCCESS;
}

static int number(const char *call, unsigned int *out) {
    char value[64];
    int error = error_of(call);
    if (error) return error;
    if (!lookup(call, value, sizeof value)) return NOT_SUPPORTED;
    *out = (unsigned int)strtoul(value, NULL, 10);
    return SUCCESS;
}

static int text(const char *key, char *out, unsigned int size) {
    return lookup(key, out, size) ? SUCCESS : NOT_SUPPORTED;
}

static long count(void) {
    char value[64];
    return lookup("count", value, sizeof value) ? atol(value) : 1;
}

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return error_of("init"); }
int nvmlInit_v2(void) { return error_of("init"); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "stub error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned int size) { return text("driver", out, size); }

int nvmlDeviceGetCount_v2(unsigned int *out) { *out = (unsigned int)count(); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t **out) {
    int error = error_of("handle");
    if (error) return error;
    if ((long)index >= count()) return INVALID_ARGUMENT;
    devices[index].index = (long)index;
    *out = &devices[index];
    return SUCCESS;
}

/* UUID number `index` of a device's MIG instances; 0: there is none. */
static int instance(long device, unsigned int index, char *out, size_t size) {
    char key[32], line[256], *word;
    snprintf(key, sizeof key, "mig.%ld", device);
    if (!lookup(key, line, sizeof line)) return 0;
    for (word = strtok(line, " "); word; word = strtok(NULL, " ")) {
        if (index-- == 0) {
            snprintf(out, size, "%s", word);
            return 1;
        }
    }
    return 0;
}

int nvmlDeviceGetMigMode(device_t *device, unsigned int *current, unsigned int *pending) {
    char uuid[96];
    if (device->index == 3) return NOT_SUPPORTED;
    *current = *pending = (unsigned int)instance(device->index, 0, uuid, sizeof uuid);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned int *out) {
    (void)device;
    *out = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned int index, device_t **out) {
    static device_t handles[16 * 7];
    char uuid[96];
    if (!instance(device->index, index, uuid, sizeof uuid) || !strcmp(uuid, "-")) return NOT_FOUND;
    *out = &handles[device->index * 7 + index];
    (*out)->index = 16 + device->index * 7 + index; /* those of instances begin at 16 */
    return SUCCESS;
}

int nvmlDeviceGetUUID(device_t *device, char *out, unsigned int size) {
    char key[32];
    if (device->index >= 16) {
        long number = device->index - 16;
        return instance(number / 7, (unsigned int)(number % 7), out, size) ? SUCCESS : NOT_FOUND;
    }
    snprintf(key, sizeof key, "uuid.%ld", device->index);
    return text(key, out, size);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **out) {
    char own[96];
    for (long i = 0; i < count(); i++) {
        devices[i].index = i;
        if (nvmlDeviceGetUUID(&devices[i], own, sizeof own) == SUCCESS && !strcmp(own, uuid)) {
            *out = &devices[i];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(device_t *device, char *out, unsigned int size) {
    char key[32];
    snprintf(key, sizeof key, "name.%ld", device->index);
    return text(key, out, size) == SUCCESS ? SUCCESS : text("name", out, size);
}

int nvmlDeviceGetCudaComputeCapability(device_t *device, int *major, int *minor) {
    char value[64];
    (void)device;
    if (!lookup("capability", value, sizeof value)) return NOT_SUPPORTED;
    return sscanf(value, "%d %d", major, minor) == 2 ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetUtilizationRates(device_t *device, unsigned int *gpu_and_memory) {
    unsigned int ms;
    (void)device;
    gpu_and_memory[1] = 0;
    if (number("sleep_ms", &ms) == SUCCESS) {
        struct timespec pause = {ms / 1000, (long)(ms % 1000) * 1000000L};
        nanosleep(&pause, NULL);
    }
    return number("utilization", gpu_and_memory);
}

int nvmlDeviceGetSamples(device_t *device, int type, unsigned long long since_us, int *value_type,
                         unsigned int *size, sample_t *out) {
    char line[256];
    unsigned long long time_us;
    unsigned int percent, found = 0, any = 0;
    int error = error_of("samples");
    FILE *file;
    (void)device;
    if (error) return error;
    if (type != 1) return INVALID_ARGUMENT;
    *value_type = 1;
    file = open_file();
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "sample %llu %u", &time_us, &percent) != 2) continue;
        any = 1;
        if (time_us <= since_us) continue;
        if (out && found < *size) {
            out[found].time_us = time_us;
            out[found].value.ui = percent;
        }
        found++;
    }
    if (file) fclose(file);
    if (!any) return NOT_SUPPORTED;
    *size = found;
    return found ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(device_t *device, unsigned long long *total_free_used) {
    char value[128];
    unsigned long long used, total;
    int error = error_of("memory");
    (void)device;
    if (error) return error;
    if (!lookup("memory", value, sizeof value)) return NOT_SUPPORTED;
    if (sscanf(value, "%llu %llu", &used, &total) != 2) return INVALID_ARGUMENT;
    total_free_used[0] = total;
    total_free_used[1] = total - used;
    total_free_used[2] = used;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(device_t *device, int sensor, unsigned int *out) {
    (void)device;
    return sensor == 0 ? number("temperature", out) : INVALID_ARGUMENT;
}

int nvmlDeviceGetPowerUsage(device_t *device, unsigned int *out) {
    (void)device;
    return number("power", out);
}
