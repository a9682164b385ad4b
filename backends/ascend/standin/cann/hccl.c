/* HCCL between processes of one machine: HCCL API reference (hccl/hccl.h, hccl/hccl_types.h).
 *
 * Each message is a file in STANDIN_FOLDER (/dev/shm unless given), named by communicator, sender, receiver and number:
 * written under another name, renamed when it is whole, removed by who reads it. All work happens on the stream that
 * is passed, so a receive delays its stream and no other, as on a device. There are no collectives: transports of
 * burst_portable are made of messages. */

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

uint32_t HcclGetCommConfigCapability(void) { return 0; }
const char *HcclGetErrorString(int code) { return code ? "stand-in HCCL failed" : "success"; }

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
