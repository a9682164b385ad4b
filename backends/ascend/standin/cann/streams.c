/* Streams and events: AscendCL API reference, "Stream Management" and "Event Management" (acl/acl_rt.h).
 *
 * A stream is a thread with a queue, so that what is not waited for is really not there yet: a missing wait in the
 * library shows as a wrong number, as it would on a device. An event counts how often it was recorded and how often
 * that was reached. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "standin.h"

typedef struct Task {
    int (*run)(void *);
    struct Task *next;
    char argument[];
} Task;

typedef struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Task *first, *last;
    int busy, ends, error;
    struct Stream *next; /* in the list of all */
} Stream;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, reached;
    int users; /* the owner, and tasks that are under way */
    struct timespec when;
} Event;

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *all_streams;
static Stream *usual; /* what a null stream means */

/* ------------------------------------------------------------------------------------------ streams */

static void *work(void *own)
{
    Stream *s = own;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->ends)
            pthread_cond_wait(&s->changed, &s->lock);
        if (!s->first)
            break;
        Task *task = s->first;
        s->first = task->next;
        if (!s->first)
            s->last = NULL;
        s->busy = 1;
        pthread_mutex_unlock(&s->lock);
        int result = task->run(task->argument);
        free(task);
        pthread_mutex_lock(&s->lock);
        s->busy = 0;
        if (result != SUCCESS)
            s->error = result;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static Stream *make_stream(void)
{
    Stream *s = calloc(1, sizeof *s);
    pthread_t thread;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    pthread_mutex_lock(&all_lock);
    s->next = all_streams;
    all_streams = s;
    pthread_mutex_unlock(&all_lock);
    pthread_create(&thread, NULL, work, s);
    pthread_detach(thread);
    return s;
}

static Stream *stream_of(void *given)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    if (given)
        return given;
    pthread_mutex_lock(&once);
    if (!usual)
        usual = make_stream();
    pthread_mutex_unlock(&once);
    return usual;
}

void on_stream(void *stream, int (*run)(void *), const void *argument, size_t size)
{
    Stream *s = stream_of(stream);
    Task *task = malloc(sizeof *task + size);
    task->run = run;
    task->next = NULL;
    if (size)
        memcpy(task->argument, argument, size);
    pthread_mutex_lock(&s->lock);
    if (s->last)
        s->last->next = task;
    else
        s->first = task;
    s->last = task;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static int drain(Stream *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->first || s->busy)
        pthread_cond_wait(&s->changed, &s->lock);
    int error = s->error;
    pthread_mutex_unlock(&s->lock);
    return error;
}

int aclrtCreateStream(void **stream)
{
    *stream = make_stream();
    return SUCCESS;
}

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags)
{
    (void)priority, (void)flags;
    return aclrtCreateStream(stream);
}

int aclrtDestroyStream(void *stream) /* its memory stays: torch_npu may still ask about it at exit */
{
    Stream *s = stream_of(stream);
    int error = drain(s);
    pthread_mutex_lock(&s->lock);
    s->ends = 1;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return error;
}

int aclrtDestroyStreamForce(void *stream) { return aclrtDestroyStream(stream); }
int aclrtSynchronizeStream(void *stream) { return drain(stream_of(stream)); }

int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t milliseconds)
{
    (void)milliseconds;
    return aclrtSynchronizeStream(stream);
}

int aclrtSynchronizeDevice(void)
{
    pthread_mutex_lock(&all_lock);
    Stream *s = all_streams;
    pthread_mutex_unlock(&all_lock);
    int error = SUCCESS;
    for (; s; s = s->next) {
        int mine = drain(s);
        if (mine)
            error = mine;
    }
    return error;
}

int aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds)
{
    (void)milliseconds;
    return aclrtSynchronizeDevice();
}

int aclrtStreamQuery(void *stream, int *status) /* 0 complete, 1 not ready */
{
    Stream *s = stream_of(stream);
    pthread_mutex_lock(&s->lock);
    *status = s->first || s->busy;
    pthread_mutex_unlock(&s->lock);
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------------- events */

typedef struct {
    Event *event;
    uint64_t count;
} Moment;

static void let_go(Event *e) /* with its lock held */
{
    int last = --e->users == 0;
    pthread_mutex_unlock(&e->lock);
    if (last)
        free(e);
}

static int reach(void *argument)
{
    Moment *m = argument;
    pthread_mutex_lock(&m->event->lock);
    m->event->reached = m->count;
    clock_gettime(CLOCK_MONOTONIC, &m->event->when);
    pthread_cond_broadcast(&m->event->changed);
    let_go(m->event);
    return SUCCESS;
}

static int await(void *argument)
{
    Moment *m = argument;
    pthread_mutex_lock(&m->event->lock);
    while (m->event->reached < m->count)
        pthread_cond_wait(&m->event->changed, &m->event->lock);
    let_go(m->event);
    return SUCCESS;
}

int aclrtCreateEventExWithFlag(void **event, uint32_t flags)
{
    (void)flags;
    Event *e = calloc(1, sizeof *e);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->users = 1;
    *event = e;
    return SUCCESS;
}

int aclrtCreateEventWithFlag(void **event, uint32_t flags) { return aclrtCreateEventExWithFlag(event, flags); }
int aclrtCreateEvent(void **event) { return aclrtCreateEventExWithFlag(event, 0); }

int aclrtDestroyEvent(void *event)
{
    Event *e = event;
    pthread_mutex_lock(&e->lock);
    let_go(e);
    return SUCCESS;
}

int aclrtRecordEvent(void *event, void *stream)
{
    Event *e = event;
    pthread_mutex_lock(&e->lock);
    Moment m = {e, ++e->recorded};
    e->users++;
    pthread_mutex_unlock(&e->lock);
    on_stream(stream, reach, &m, sizeof m);
    return SUCCESS;
}

int aclrtStreamWaitEvent(void *stream, void *event)
{
    Event *e = event;
    pthread_mutex_lock(&e->lock);
    Moment m = {e, e->recorded};
    e->users++;
    pthread_mutex_unlock(&e->lock);
    on_stream(stream, await, &m, sizeof m);
    return SUCCESS;
}

int aclrtSynchronizeEvent(void *event)
{
    Event *e = event;
    pthread_mutex_lock(&e->lock);
    uint64_t count = e->recorded;
    while (e->reached < count)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
    return SUCCESS;
}

int aclrtQueryEventStatus(void *event, int *status) /* 0 not ready, 1 complete */
{
    Event *e = event;
    pthread_mutex_lock(&e->lock);
    *status = e->reached >= e->recorded;
    pthread_mutex_unlock(&e->lock);
    return SUCCESS;
}

int aclrtResetEvent(void *event, void *stream)
{
    (void)event, (void)stream;
    return SUCCESS;
}

int aclrtEventElapsedTime(float *milliseconds, void *first, void *second)
{
    const Event *a = first, *b = second;
    *milliseconds = (b->when.tv_sec - a->when.tv_sec) * 1e3f + (b->when.tv_nsec - a->when.tv_nsec) * 1e-6f;
    return SUCCESS;
}
