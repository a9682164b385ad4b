/* HCCL between processes of one machine: HCCL API reference (hccl/hccl.h, hccl/hccl_types.h).
 *
 * Each message is a file in STANDIN_FOLDER (/dev/shm unless given), named by communicator, sender, receiver and number:
 * written under another name, renamed when it is whole, removed by who reads it. All work happens on the stream that
 * is passed, so a receive holds up its stream and nobody else, as on a device. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

enum { ROOT_INFO_BYTES = 4108, MOST_RANKS = 64, POLL_MICROSECONDS = 50, PATH = 512 };
enum { HCCL_INVALID = 2, HCCL_TIMEOUT = 9, HCCL_INTERNAL = 4 };
enum { SUM, PRODUCT, MAX, MIN }; /* HcclReduceOp */

typedef struct {
    char name[64];
    uint32_t ranks, rank;
    uint64_t sent[MOST_RANKS], received[MOST_RANKS];
} Communicator;

typedef struct { /* HcclSendRecvItem */
    int kind;    /* 0 send, 1 receive */
    void *buffer;
    uint64_t count;
    int type;
    uint32_t peer;
} Item;

/* HcclDataType: int8 int16 int32 fp16 fp32 int64 uint64 uint8 uint16 uint32 fp64 bfp16 */
static const size_t SIZES[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
enum { TYPES = sizeof SIZES / sizeof *SIZES };

static double deadline(void)
{
    const char *given = getenv("STANDIN_DEADLINE");
    return given ? atof(given) : 120.0;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* ------------------------------------------------------------------------------------------ messages */

static void path_of(char *path, const Communicator *c, uint32_t from, uint32_t to, uint64_t number)
{
    const char *folder = getenv("STANDIN_FOLDER");
    snprintf(path, PATH, "%s/standin-hccl-%s-%u-%u-%lu", folder ? folder : "/dev/shm", c->name, from, to,
             (unsigned long)number);
}

static int put(Communicator *c, uint32_t to, const void *bytes, size_t size)
{
    char path[PATH], draft[PATH + 8];
    path_of(path, c, c->rank, to, c->sent[to]++);
    snprintf(draft, sizeof draft, "%s.draft", path);
    int file = open(draft, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    if (file < 0)
        return HCCL_INTERNAL;
    for (size_t done = 0; done < size;) {
        ssize_t wrote = write(file, (const char *)bytes + done, size - done);
        if (wrote < 0)
            return close(file), HCCL_INTERNAL;
        done += wrote;
    }
    close(file);
    return rename(draft, path) ? HCCL_INTERNAL : SUCCESS;
}

static int get(Communicator *c, uint32_t from, void *bytes, size_t size)
{
    char path[PATH];
    path_of(path, c, from, c->rank, c->received[from]++);
    int file;
    double until = now() + deadline();
    while ((file = open(path, O_RDONLY)) < 0) {
        if (now() > until) {
            fprintf(stderr, "stand-in HCCL: rank %u waited in vain for rank %u\n", c->rank, from);
            return HCCL_TIMEOUT;
        }
        usleep(POLL_MICROSECONDS);
    }
    struct stat facts;
    fstat(file, &facts);
    if ((size_t)facts.st_size != size) {
        fprintf(stderr, "stand-in HCCL: rank %u expects %zu bytes of rank %u, and there are %ld\n", c->rank, size, from,
                (long)facts.st_size);
        return close(file), HCCL_INVALID;
    }
    for (size_t done = 0; done < size;) {
        ssize_t got = read(file, (char *)bytes + done, size - done);
        if (got <= 0)
            return close(file), HCCL_INTERNAL;
        done += got;
    }
    close(file);
    unlink(path);
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------- communicators */

int HcclGetRootInfo(void *info)
{
    static int made;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(info, 0, ROOT_INFO_BYTES);
    snprintf(info, 64, "%d-%lx-%lx-%d", (int)getpid(), (long)t.tv_sec, t.tv_nsec, __sync_add_and_fetch(&made, 1));
    return SUCCESS;
}

int HcclCommInitRootInfo(uint32_t ranks, const void *info, uint32_t rank, void **communicator)
{
    if (ranks > MOST_RANKS || rank >= ranks)
        return HCCL_INVALID;
    Communicator *c = calloc(1, sizeof *c);
    strncpy(c->name, info, sizeof c->name - 1);
    c->ranks = ranks;
    c->rank = rank;
    *communicator = c;
    return SUCCESS;
}

int HcclCommInitRootInfoConfig(uint32_t ranks, const void *info, uint32_t rank, const void *config, void **communicator)
{
    (void)config;
    return HcclCommInitRootInfo(ranks, info, rank, communicator);
}

int HcclCommDestroy(void *communicator) /* its memory stays: streams may still hold work of it */
{
    (void)communicator;
    return SUCCESS;
}

int HcclGetCommAsyncError(void *communicator, int *error)
{
    (void)communicator;
    *error = SUCCESS;
    return SUCCESS;
}

int HcclGetCommName(void *communicator, char *name)
{
    strcpy(name, ((Communicator *)communicator)->name);
    return SUCCESS;
}

int HcclGetRankId(void *communicator, uint32_t *rank)
{
    *rank = ((Communicator *)communicator)->rank;
    return SUCCESS;
}

int HcclGetRankSize(void *communicator, uint32_t *ranks)
{
    *ranks = ((Communicator *)communicator)->ranks;
    return SUCCESS;
}

uint32_t HcclGetCommConfigCapability(void) { return 0; }
const char *HcclGetErrorString(int code) { return code ? "stand-in HCCL failed" : "success"; }

int HcclSetConfig(int what, int64_t value)
{
    (void)what, (void)value;
    return SUCCESS;
}

int HcclGetConfig(int what, int64_t *value)
{
    (void)what;
    *value = 0;
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------------ transfers */

typedef struct {
    Communicator *c;
    uint32_t count;
    Item items[];
} Batch;

static int exchange(void *argument)
{
    Batch *b = argument;
    int error = SUCCESS;
    for (int kind = 0; kind < 2 && !error; kind++) /* sends first: a receive may wait for a peer that waits for them */
        for (uint32_t i = 0; i < b->count && !error; i++) {
            Item *item = b->items + i;
            size_t size = item->count * SIZES[item->type];
            if (item->kind != kind)
                continue;
            error = kind ? get(b->c, item->peer, item->buffer, size) : put(b->c, item->peer, item->buffer, size);
        }
    return error;
}

int HcclBatchSendRecv(const Item *items, uint32_t count, void *communicator, void *stream)
{
    size_t size = sizeof(Batch) + count * sizeof(Item);
    Batch *b = malloc(size);
    b->c = communicator;
    b->count = count;
    for (uint32_t i = 0; i < count; i++) {
        if (items[i].type < 0 || items[i].type >= TYPES || items[i].peer >= b->c->ranks)
            return free(b), HCCL_INVALID;
        b->items[i] = items[i];
    }
    on_stream(stream, exchange, b, size);
    free(b);
    return SUCCESS;
}

int HcclSend(void *buffer, uint64_t count, int type, uint32_t peer, void *communicator, void *stream)
{
    Item item = {0, buffer, count, type, peer};
    return HcclBatchSendRecv(&item, 1, communicator, stream);
}

int HcclRecv(void *buffer, uint64_t count, int type, uint32_t peer, void *communicator, void *stream)
{
    Item item = {1, buffer, count, type, peer};
    return HcclBatchSendRecv(&item, 1, communicator, stream);
}

/* ---------------------------------------------------------------------------------------- collectives */

typedef struct {
    Communicator *c;
    const void *source;
    void *target;
    uint64_t count;
    int type, operation;
    uint32_t root;
} Collective;

static int broadcast(void *argument)
{
    Collective *o = argument;
    size_t size = o->count * SIZES[o->type];
    if (o->c->rank != o->root)
        return get(o->c, o->root, o->target, size);
    for (uint32_t r = 0; r < o->c->ranks; r++)
        if (r != o->root && put(o->c, r, o->source, size))
            return HCCL_INTERNAL;
    return SUCCESS;
}

static int gather(void *argument)
{
    Collective *o = argument;
    size_t size = o->count * SIZES[o->type];
    memmove((char *)o->target + o->c->rank * size, o->source, size);
    for (uint32_t r = 0; r < o->c->ranks; r++)
        if (r != o->c->rank && put(o->c, r, (char *)o->target + o->c->rank * size, size))
            return HCCL_INTERNAL;
    for (uint32_t r = 0; r < o->c->ranks; r++)
        if (r != o->c->rank) {
            int error = get(o->c, r, (char *)o->target + r * size, size);
            if (error)
                return error;
        }
    return SUCCESS;
}

#define REDUCE(T)                                                              \
    for (uint64_t i = 0; i < o->count; i++) {                                  \
        T total = ((const T *)all)[i];                                         \
        for (uint32_t r = 1; r < o->c->ranks; r++) {                           \
            T x = ((const T *)all)[r * o->count + i];                          \
            total = o->operation == SUM       ? (T)(total + x)                 \
                    : o->operation == PRODUCT ? (T)(total * x)                 \
                    : o->operation == MAX     ? (total > x ? total : x)        \
                                              : (total < x ? total : x);       \
        }                                                                      \
        ((T *)o->target)[i] = total;                                           \
    }                                                                          \
    break

static int reduce(void *argument)
{
    Collective *o = argument;
    void *all = malloc(o->c->ranks * o->count * SIZES[o->type] + 1);
    Collective parts = *o;
    parts.target = all;
    int error = gather(&parts);
    if (!error)
        switch (o->type) {
        case 0: REDUCE(int8_t);
        case 2: REDUCE(int32_t);
        case 4: REDUCE(float);
        case 5: REDUCE(int64_t);
        case 7: REDUCE(uint8_t);
        case 10: REDUCE(double);
        default: error = HCCL_INVALID; /* 16-bit floating dtypes: burst_portable reduces none */
        }
    free(all);
    return error;
}

static int collective(int (*run)(void *), Collective o, void *stream)
{
    if (o.type < 0 || o.type >= TYPES)
        return HCCL_INVALID;
    on_stream(stream, run, &o, sizeof o);
    return SUCCESS;
}

int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, void *communicator, void *stream)
{
    return collective(broadcast, (Collective){communicator, buffer, buffer, count, type, 0, root}, stream);
}

int HcclAllGather(void *source, void *target, uint64_t count, int type, void *communicator, void *stream)
{
    return collective(gather, (Collective){communicator, source, target, count, type, 0, 0}, stream);
}

int HcclAllReduce(void *source, void *target, uint64_t count, int type, int operation, void *communicator, void *stream)
{
    return collective(reduce, (Collective){communicator, source, target, count, type, operation, 0}, stream);
}

int HcclBarrier(void *communicator, void *stream)
{
    static uint8_t mine, all[MOST_RANKS];
    return HcclAllGather(&mine, all, 1, 7, communicator, stream);
}
