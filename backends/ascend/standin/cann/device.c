/* Devices, contexts and memory: AscendCL API reference, "Device Management" and "Memory Management" (acl/acl_rt.h);
 * and the questions that torch_npu asks about a device, answered as an Atlas A2 would.
 *
 * A device's memory is the host's, so that operators can be emulated in place. STANDIN_DEVICES says how many devices
 * there are (8 unless given). */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

int aclrtSynchronizeDevice(void);

static _Thread_local int current;

static uint32_t devices(void)
{
    const char *given = getenv("STANDIN_DEVICES");
    return given ? (uint32_t)atoi(given) : 8;
}

int aclInit(const char *config)
{
    (void)config;
    return SUCCESS;
}

int aclFinalize(void) { return SUCCESS; }
const char *aclGetRecentErrMsg(void) { return "stand-in for CANN: look above for what it said"; }
const char *aclrtGetSocName(void) { return "Ascend910B3"; }

int aclrtGetDeviceCount(uint32_t *count)
{
    *count = devices();
    return *count ? SUCCESS : NO_DEVICE;
}

int aclrtSetDevice(int32_t device)
{
    if (device < 0 || (uint32_t)device >= devices())
        return NO_DEVICE;
    current = device;
    return SUCCESS;
}

int aclrtGetDevice(int32_t *device)
{
    *device = current;
    return SUCCESS;
}

int aclrtResetDevice(int32_t device)
{
    (void)device;
    return SUCCESS;
}

int aclrtGetCurrentContext(void **context) /* one a device; never looked into */
{
    static char contexts[64];
    *context = contexts + current;
    return SUCCESS;
}

int aclrtSetCurrentContext(void *context)
{
    (void)context;
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------------- memory */

static int allocate(void **memory, size_t size)
{
    size_t whole = size ? (size + 511) / 512 * 512 : 512;
    if (posix_memalign(memory, 512, whole))
        return NO_MEMORY;
    memset(*memory, 0xff, whole); /* NaN in every floating dtype: what nobody wrote shows */
    return SUCCESS;
}

int aclrtMalloc(void **memory, size_t size, int policy)
{
    (void)policy;
    return allocate(memory, size);
}

int aclrtMallocAlign32(void **memory, size_t size, int policy) { return aclrtMalloc(memory, size, policy); }
int aclrtMallocHost(void **memory, size_t size) { return allocate(memory, size); }

int aclrtFree(void *memory) /* waits for the device, as the real one is said to */
{
    aclrtSynchronizeDevice();
    free(memory);
    return SUCCESS;
}

int aclrtFreeHost(void *memory) { return aclrtFree(memory); }

typedef struct {
    void *target;
    const void *source;
    size_t count;
} Copy;

static int copy(void *argument)
{
    const Copy *c = argument;
    memmove(c->target, c->source, c->count);
    return SUCCESS;
}

int aclrtMemcpy(void *target, size_t room, const void *source, size_t count, int kind)
{
    (void)kind;
    if (count > room)
        return INTERNAL;
    memmove(target, source, count);
    return SUCCESS;
}

int aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t count, int kind, void *stream)
{
    (void)kind;
    if (count > room)
        return INTERNAL;
    Copy c = {target, source, count};
    on_stream(stream, copy, &c, sizeof c);
    return SUCCESS;
}

int aclrtMemset(void *target, size_t room, int32_t value, size_t count)
{
    if (count > room)
        return INTERNAL;
    memset(target, value, count);
    return SUCCESS;
}

int aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total)
{
    (void)attribute;
    *free_bytes = (size_t)60 << 30;
    *total = (size_t)64 << 30;
    return SUCCESS;
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    (void)device, (void)peer;
    *can = 1;
    return SUCCESS;
}

int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags)
{
    (void)peer, (void)flags;
    return SUCCESS;
}

/* ----------------------------------------------------------------------------- questions and settings */

enum { CORES = 24 }; /* of an Atlas A2: 24 cube cores */

int aclGetDeviceCapability(uint32_t device, int what, int64_t *value)
{
    (void)device, (void)what;
    *value = CORES;
    return SUCCESS;
}

static int64_t options[64]; /* ACL_OPT_DETERMINISTIC and its like: kept, and told */

int aclrtSetSysParamOpt(int option, int64_t value)
{
    if (option < 0 || option >= 64)
        return INTERNAL;
    options[option] = value;
    return SUCCESS;
}

int aclrtGetSysParamOpt(int option, int64_t *value)
{
    if (option < 0 || option >= 64)
        return INTERNAL;
    *value = options[option];
    return SUCCESS;
}

int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

size_t aclGetCompileoptSize(int option)
{
    (void)option;
    return 16;
}

int aclGetCompileopt(int option, char *value, size_t size)
{
    (void)option;
    memset(value, 0, size);
    return SUCCESS;
}

/* Settings that change nothing here. */
#define ACCEPTED(name)    \
    int name(void)        \
    {                     \
        return SUCCESS;   \
    }
ACCEPTED(aclrtSetDeviceSatMode)
ACCEPTED(aclrtSetOpWaitTimeout)
ACCEPTED(aclrtSetStreamFailureMode)

int aclrtSetOpExecuteTimeOutV2(uint64_t wanted, uint64_t *set)
{
    *set = wanted;
    return SUCCESS;
}

/* aclsysGetCANNVersion (acl/acl_base.h). The text ends up in reports, and says what this is. */

typedef struct {
    char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
} PackageVersion;

int aclsysGetCANNVersion(int package, PackageVersion *version)
{
    (void)package;
    memset(version, 0, sizeof *version);
    strcpy(version->version, "8.5.0.stand-in");
    strcpy(version->major, "8");
    strcpy(version->minor, "5");
    strcpy(version->release, "0");
    return SUCCESS;
}

int aclsysGetVersionStr(const char *package, char *version)
{
    (void)package;
    strcpy(version, "8.5.0.stand-in");
    return SUCCESS;
}
